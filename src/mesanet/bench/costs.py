"""Floating-point operations and state of every mixer while generating, exactly, from the config.

This is the paper's table of inference costs with its constants: what it takes to bring the state up to date with one
token and to read the output from it, from queries, keys, values and gates that are there already. A multiplication,
addition, subtraction or division is one operation, so that a dot product of n numbers is 2 n; exponentials and square
roots, a handful for each head, are not counted. Every formula counts the token-by-token rule in `ops/reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from mesanet.config import check_in_range
from mesanet.config.model import ModelConfig
from mesanet.mixers import mixer_class
from mesanet.mixers.hawk import BlockLinear, hawk_state_size
from mesanet.mixers.layers import ShortConvolution
from mesanet.model.backbone import LanguageModel


class Cost(NamedTuple):
    """What the rule of one mixer costs for each token, and what it has to remember."""

    update: int
    """Operations that bring the state up to date."""
    output: int
    """Operations that read the output."""
    state: int
    """Numbers in the state."""

    def times(self, count: int) -> Cost:
        """So many of them."""
        return Cost(self.update * count, self.output * count, self.state * count)


class Sizes(NamedTuple):
    """What the cost of one head depends on."""

    key: int
    value: int
    position: int
    """The token's place in the text, counted from one: so many keys softmax attention looks at."""
    steps: int | None
    """Solver steps; None for a direct solve."""


def _attention(keys: int, size: Sizes) -> Cost:
    """Scores and weighted sum over all keys, and for each score the softmax's subtraction, sum and division."""
    return Cost(0, keys * (2 * size.key + 2 * size.value + 3), keys * (size.key + size.value))


def _mamba2(size: Sizes) -> Cost:
    pairs = size.key * size.value
    return Cost(3 * pairs, 2 * pairs, pairs)


def _gla(size: Sizes) -> Cost:
    return _mamba2(size)._replace(update=3 * size.key * size.value + size.key)


def _deltanet(size: Sizes) -> Cost:
    """Answer to the key, its difference to the value times the write gate, and that into the state."""
    pairs = size.key * size.value
    return Cost(4 * pairs + 2 * size.value, 2 * pairs, pairs)


def _gated_deltanet(size: Sizes) -> Cost:
    return _deltanet(size)._replace(update=5 * size.key * size.value + 2 * size.value)


def _mlstm(size: Sizes) -> Cost:
    """GLA, the normaliser and its overlap with the query; the stabiliser, and the division of the output."""
    gla = _gla(size)
    # The written key is there already. Two additions bring the gates down to the stabiliser, after one of its own.
    update = gla.update + 2 * size.key + 3
    return Cost(update, gla.output + 2 * size.key + size.value + 2, gla.state + size.key + 1)


def _longhorn(size: Sizes) -> Cost:
    """One minus k^2 step^T, that times the state, plus k (step v)^T; the step is precision / (1 + precision k^T k)."""
    pairs = size.key * size.value
    step = 2 * size.key + 3
    return Cost(5 * pairs + step + size.key + size.value, 2 * pairs, pairs)


def _mesa(size: Sizes) -> Cost:
    """Two states like GLA's; the solver's start value and steps, or a direct solve; the read-out with the solution."""
    square, pairs, key = size.key**2, size.key * size.value, size.key
    update = 3 * square + 3 * pairs + key
    if size.steps is None:
        return Cost(update, _direct_solve(key) + 2 * pairs, square + pairs)
    product = 2 * square + 2 * key
    # q / diag(H + ridge), the residual, and its square.
    start = 2 * key + product + key + 2 * key
    # The step's length, solution, residual, its square, and the next direction; two ratios.
    step = product + 2 * key + 2 * key + 2 * key + 2 * key + 2 * key + 2
    return Cost(update, start + size.steps * step + 2 * pairs, square + pairs)


def _direct_solve(key: int) -> int:
    """What decoding does under the preconditioner "auto": (H + H^T) / 2 + ridge, LU, two triangles, and the residual.

    Two thirds of K^3 to leading order: elimination divides a column and updates what is below and right of its pivot.
    """
    system = 2 * key**2 + key
    factors = key * (key - 1) // 2 + key * (key - 1) * (2 * key - 1) // 3
    return system + factors + 2 * key**2 - key + 2 * key**2 + key + 2 * key


def _mesa_rls(size: Sizes) -> Cost:
    """Sherman-Morrison's update of the inverse, and the read-out through it."""
    square, pairs, key = size.key**2, size.key * size.value, size.key
    gain = 2 * square + 2 * key + 3
    update = gain + 2 * square + key + 2 * pairs + key
    return Cost(update, 2 * square + 2 * pairs, square + pairs)


PER_HEAD: dict[str, Callable[[Sizes], Cost]] = {
    "attention": lambda size: _attention(size.position, size),
    "mamba2": _mamba2,
    "gla": _gla,
    "deltanet": _deltanet,
    "gated_deltanet": _gated_deltanet,
    "mlstm": _mlstm,
    "longhorn": _longhorn,
    "mesa": _mesa,
    "mesa_rls": _mesa_rls,
}
"""The mixers with heads that have a cost each."""


def head_cost(mixer: str, size: Sizes) -> Cost:
    """The cost of one head of a mixer; a ValueError where nobody has written its formula down."""
    if mixer in PER_HEAD:
        return PER_HEAD[mixer](size)
    known = getattr(mixer_class(mixer), "operations", None)
    if known is None:
        raise ValueError(
            f"mixers: no formula for the cost of a head of {mixer!r}, only of {', '.join(PER_HEAD)}; "
            "its class can say it in `operations`"
        )
    return Cost(*known(size.key, size.value))


def layer_cost(
    config: ModelConfig, mixer: str, position: int, steps: int | None = None, *, direct: bool = False
) -> Cost:
    """The cost of one layer with this mixer at the token in this `position`, counted from one.

    `steps` is how many steps mesa's solver takes; None for the most that it may take. With `direct` it solves directly,
    as it does while decoding under the preconditioner "auto".
    """
    check_in_range("position", position, low=1)
    if mixer == "hawk":
        # h <- a h + sqrt(1 - a^2) x for each channel; the output is the state.
        channels = hawk_state_size(config)
        return Cost(5 * channels, 0, channels)
    steps = config.inference_solver.max_steps if steps is None else steps
    size = Sizes(config.key_size, config.head_value_size, position, None if direct else steps)
    if mixer == "sliding_window":
        cost = _attention(min(position, config.window), size)
        # The token itself is looked at, but need not be kept for longer than window - 1 further tokens.
        kept = min(position, config.window - 1) * (size.key + size.value)
        return cost._replace(state=kept).times(config.heads)
    return head_cost(mixer, size).times(config.heads)


def rule_cost(config: ModelConfig, position: int, steps: int | None = None, *, direct: bool = False) -> Cost:
    """The cost of the rules of all layers of a model."""
    names = [config.mixer_of(layer) for layer in range(config.layers)]
    layers = [layer_cost(config, name, position, steps, direct=direct) for name in names]
    return Cost(*(sum(column) for column in zip(*layers, strict=True)))


def weight_operations(config: ModelConfig) -> int:
    """Operations that a token takes in everything that multiplies it by weights: projections, convolutions, logits."""
    with torch.device("meta"):
        model = LanguageModel(config)
    kinds = (nn.Linear, ShortConvolution, BlockLinear, nn.Embedding)
    weights = [module.weight for module in model.modules() if isinstance(module, kinds)]
    return sum(2 * weight.numel() for weight in weights)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """One row of the table: a token of a model at a given position."""

    mixers: str
    """The pattern of mixers."""
    position: int
    """The token's place, counted from one."""
    steps: int
    """Solver steps that mesa takes."""
    parameters: int
    """Parameters of the model."""
    layer_update: float
    """Operations of the state update, mean over the layers."""
    layer_output: float
    """Operations of the output, mean over the layers."""
    layer_output_direct: float
    """The same where mesa solves directly, as it does while decoding unless it is told otherwise."""
    layer_state: float
    """Numbers in the state of the rule, mean over the layers."""
    state: int
    """The same of the whole model."""
    rule: int
    """Operations of the rules of the whole model."""
    weights: int
    """Operations of projections, convolutions and logits."""

    @property
    def total(self) -> int:
        """Operations of rules and weights."""
        return self.rule + self.weights

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "total": self.total}


def model_cost(config: ModelConfig, position: int, steps: int | None = None) -> ModelCost:
    """What one token costs, from the config alone."""
    rule = rule_cost(config, position, steps)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in LanguageModel(config).parameters())
    return ModelCost(
        mixers="-".join(config.mixers),
        position=position,
        steps=config.inference_solver.max_steps if steps is None else steps,
        parameters=parameters,
        layer_update=rule.update / config.layers,
        layer_output=rule.output / config.layers,
        layer_output_direct=rule_cost(config, position, direct=True).output / config.layers,
        layer_state=rule.state / config.layers,
        state=rule.state,
        rule=rule.update + rule.output,
        weights=weight_operations(config),
    )
