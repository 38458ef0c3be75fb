"""The language model: residual blocks of mixer and MLP between a tied embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mesanet.config.model import ModelConfig
from mesanet.mixers import Mixer, Observation, mixer_class
from mesanet.mixers.layers import RMSNorm
from mesanet.mixers.layout import Layout, dense_layout, packed_layout
from mesanet.mixers.mesa import Mesa, config_of
from mesanet.model.cache import Cache
from mesanet.model.layers import SwiGLU, soft_cap
from mesanet.model.loss import IGNORED, checked_targets, chunked_loss

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


SOLVERS = ("training_solver", "inference_solver")
"""What a mesa layer solves with, in the config and in the layer."""


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.width, epsilon=config.norm_epsilon)
        self.mixer: Mixer = mixer_class(config.mixer_of(layer))(config, layer)
        self.mlp_norm = RMSNorm(config.width, epsilon=config.norm_epsilon)
        self.mlp = SwiGLU(config.width, config.mlp_width, output_gain=2 / config.layers)

    def forward(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """Mix over time, then transform each token, both beside the residual stream."""
        mixed, state = self.mixer(self.mixer_norm(x), layout, state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class LanguageModel(nn.Module):
    """A decoder-only language model with the mixers that its config names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        for name in config.mixers:
            mixer_class(name)
        self._built_from = config
        self.checkpoint_activations = False
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon)
        self._draw_embedding()
        self.to(DTYPES[config.dtype])

    @property
    def config(self) -> ModelConfig:
        """What the model is made of as it stands: after a change of dtype, of the vocabulary, of all layers' solver."""
        changes: dict[str, Any] = {"vocabulary": self.embedding.weight.shape[0]}
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in self.parameters()))
        names = [name for name, known in DTYPES.items() if known == dtype]
        if names:
            changes["dtype"] = names[0]
        layers = [mixer for mixer in self.mixers() if isinstance(mixer, Mesa)]
        for attribute in SOLVERS:
            solvers = {getattr(mixer, attribute) for mixer in layers}
            if len(solvers) == 1:
                changes[attribute] = config_of(solvers.pop())
        return replace(self._built_from, **changes)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, as after building the model on the meta device and `to_empty`."""
        modules = [module for module in self.modules() if module is not self and module is not self.embedding]
        # Inner modules first: a mixer has the last word on the biases of its gates.
        for module in reversed(modules):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        self._draw_embedding()

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last: int | None = None,
    ) -> tuple[Tensor, Cache]:
        """Logits [B, T, vocabulary] of the next token after each of `tokens` [B, T], and the cache to go on with.

        `mask` [B, T] is false, or 0, for padding, wherever it stands. `cu_seqlens` [S + 1] says where sequences that
        are packed into one row begin and end; the cache then has a row for each. `last` asks for the logits of the
        last so many tokens only, or of all where there are fewer.
        """
        if last is not None and last < 0:
            raise ValueError(f"last: got {last}, expected a number of tokens, which is never negative")
        hidden, cache = self.hidden(tokens, cache, mask=mask, cu_seqlens=cu_seqlens)
        if last is not None:
            hidden = hidden[:, max(0, hidden.shape[1] - last) :]
        return self.logits(hidden), cache

    def hidden(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        streams: list[Tensor] | None = None,
    ) -> tuple[Tensor, Cache]:
        """The normalised residual stream [B, T, D] that the logits are made of, and the cache to go on with.

        In place of ids, `tokens` may be vectors [B, T, D] like the rows of the embedding. A list of `streams` receives
        the residual stream before each block.
        """
        self._check(tokens, cache, mask, cu_seqlens)
        mask = None if mask is None else mask.bool()
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        order = None
        padding = None
        if mask is not None and not bool(mask.all()):
            # Real tokens keep their order and move to the right end; causal layers can't tell the difference.
            if tokens.is_floating_point():
                # Not a number at padding would reach the gradients of all weights, as zero times itself.
                x = x.masked_fill(~mask[..., None], 0)
            order = mask.to(torch.uint8).argsort(dim=1, stable=True)
            x = x.gather(1, order[..., None].expand_as(x))
            padding = mask.shape[1] - mask.sum(1)
        x, cache = self._run(x, cache, padding, cu_seqlens, streams)
        if order is not None:
            places = order.argsort(dim=1)[..., None]
            x = x.gather(1, places.expand_as(x))
            if streams is not None:
                streams[:] = [stream.gather(1, places.expand_as(stream)) for stream in streams]
        return x, cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits, float32 or wider."""
        return soft_cap(nn.functional.linear(hidden, self.embedding.weight), self._built_from.logits_cap)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mean negative log likelihood of the targets [B, T] that count; never holds all logits at once.

        Those below zero do not, nor those of tokens that are padding by `mask`: a target belongs to the token that it
        comes after. Where padding follows a real token, the target of that token has to be below zero.
        """
        return self.losses(tokens, targets, cache=cache, mask=mask, cu_seqlens=cu_seqlens)[0]

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Cache]:
        """The mean loss, the loss of each token [B, T] (without a gradient, zero where ignored), and the cache."""
        if targets.shape != tokens.shape[:2]:
            raise ValueError(
                f"targets: got shape {tuple(targets.shape)}, expected that of tokens, {tuple(tokens.shape[:2])}"
            )
        targets = checked_targets(targets, self.embedding.weight.shape[0])
        hidden, cache = self.hidden(tokens, cache, mask=mask, cu_seqlens=cu_seqlens)
        if mask is not None:
            targets = targets.masked_fill(~mask.bool(), IGNORED)
        mean, each = chunked_loss(hidden, self.embedding.weight, targets, self._built_from.logits_cap)
        return mean, each, cache

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: matrices decay; embeddings, norms, the ridge and all vectors, such as biases, do not."""
        decayed, undecayed = [], []
        for module in self.modules():
            kept = getattr(module, "undecayed", ())
            for name, parameter in module.named_parameters(recurse=False):
                if name in kept or module is self.embedding or parameter.dim() < 2:
                    undecayed.append(parameter)
                else:
                    decayed.append(parameter)
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]

    def set_solver(
        self,
        *,
        max_steps: int | None = None,
        tolerance: float | None = None,
        preconditioner: Literal["auto", "none"] | None = None,
        mode: str = "inference",
        layers: tuple[int, ...] | None = None,
    ) -> None:
        """Change how the mesa layers solve, of a loaded model too; `mode` is "inference", "training" or "both".

        What is None stays as it is; the preconditioner "none" is the paper's plain method. A change of all mesa layers
        is part of `config` and is saved; one of some `layers` only is not. Under the preconditioner "auto" a token that
        comes alone is solved for directly, without steps.
        """
        if mode not in ("inference", "training", "both"):
            raise ValueError(f"mode: got {mode!r}, expected inference, training or both")
        changes: dict[str, Any] = {
            name: value for name, value in (("max_steps", max_steps), ("tolerance", tolerance)) if value is not None
        }
        if preconditioner is not None:
            changes["preconditioner"] = None if preconditioner == "none" else preconditioner
        if not changes:
            return
        mesa = {layer: mixer for layer, mixer in enumerate(self.mixers()) if isinstance(mixer, Mesa)}
        if not mesa:
            raise ValueError(f"solver: the model has no mesa layer but {', '.join(self._built_from.mixers)}")
        strangers = sorted(set(layers or ()) - mesa.keys())
        if strangers or layers == ():
            raise ValueError(f"layers: got {strangers or layers}, expected some of the mesa layers, {list(mesa)}")
        # What the layers have in common, which `config` goes on to tell once they differ.
        self._built_from = self.config
        for attribute in SOLVERS:
            if mode not in ("both", attribute.removesuffix("_solver")):
                continue
            for mixer in mesa.values() if layers is None else [mesa[layer] for layer in layers]:
                setattr(mixer, attribute, replace(getattr(mixer, attribute), **changes))
            if layers is None:
                common = replace(getattr(self._built_from, attribute), **changes)
                self._built_from = replace(self._built_from, **{attribute: common})

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Keep only each block's input for the backward pass, and compute the rest again."""
        self.checkpoint_activations = enabled

    def mixers(self) -> list[Mixer]:
        """The mixer of every layer."""
        return [block.mixer for block in self.blocks]  # type: ignore[misc]

    @contextmanager
    def observe(self, layers: tuple[int, ...] | None = None) -> Iterator[list[Observation]]:
        """Collect what the mixers' rules get, and the solver steps of mesa, for the calls inside the block.

        Hawk, which has no queries, keys and values, tells nothing. What activation checkpointing computes again in the
        backward pass is not observed again.
        """
        mixers = self.mixers()
        told = [layer for layer, mixer in enumerate(mixers) if mixer.observable]
        strangers = sorted(set(layers or ()) - set(told))
        if strangers:
            raise ValueError(f"layers: got {strangers}, expected some of those that can be observed, {told}")
        seen: list[Observation] = []
        watched = [mixers[layer] for layer in told if layers is None or layer in layers]
        before = [mixer.observer for mixer in watched]
        for mixer in watched:
            mixer.observer = seen.append
        try:
            yield seen
        finally:
            for mixer, observer in zip(watched, before, strict=True):
                mixer.observer = observer

    def _run(
        self,
        x: Tensor,
        cache: Cache | None,
        padding: Tensor | None,
        cu_seqlens: Tensor | None,
        streams: list[Tensor] | None,
    ) -> tuple[Tensor, Cache]:
        """The blocks, for the embedded real tokens [B, T, D] that stand at the right end."""
        batch, time = x.shape[:2]
        lengths = None if cache is None else cache.lengths
        if cu_seqlens is None:
            layout = dense_layout(batch, time, lengths, padding, x.device)
            fresh = torch.full((batch,), time, device=x.device)
            fresh = fresh if padding is None else fresh - padding
        else:
            layout = packed_layout(time, lengths, cu_seqlens, x.device)
            assert layout.cu_seqlens is not None
            fresh = layout.cu_seqlens.diff()
        x = x * math.sqrt(self._built_from.width)
        states = []
        for layer, block in enumerate(self.blocks):
            state = None if cache is None else cache.states[layer]
            if streams is not None:
                streams.append(x)
            if self.checkpoint_activations and self.training and torch.is_grad_enabled():
                x, state = checkpoint(
                    block,
                    x,
                    layout,
                    state,
                    use_reentrant=False,
                    context_fn=partial(_observed_once, block.mixer),  # type: ignore[arg-type]
                )
            else:
                x, state = block(x, layout, state)
            states.append(state)
        after = Cache(
            states=tuple(states),
            mixers=self._mixer_names(),
            lengths=fresh if lengths is None else lengths + fresh,
        )
        return self.norm(x), after

    def _mixer_names(self) -> tuple[str, ...]:
        """The mixer of every layer."""
        return tuple(self._built_from.mixer_of(layer) for layer in range(len(self.blocks)))

    def _draw_embedding(self) -> None:
        """Fan-in: the input is scaled by sqrt(D), so that the residual stream starts at variance one."""
        nn.init.normal_(self.embedding.weight, std=math.sqrt(1 / self.config.width))

    def _check(self, tokens: Tensor, cache: Cache | None, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        width = self._built_from.width
        vectors = tokens.is_floating_point() and tokens.dim() == 3 and tokens.shape[2] == width
        if not vectors and (tokens.dim() != 2 or tokens.is_floating_point()):
            came = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"tokens: got {came}, expected integer ids [B, T], or vectors [B, T, {width}]")
        # On a CPU only: elsewhere it would make the processor wait for the device, and the lookup itself complains.
        if not vectors and tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high, vocabulary = int(tokens.min()), int(tokens.max()), self.embedding.weight.shape[0]
            if low < 0 or high >= vocabulary:
                wrong = low if low < 0 else high
                raise ValueError(f"tokens: got {wrong}, expected ids from 0 to {vocabulary - 1}, the vocabulary")
        rows = tokens.shape[0]
        if mask is not None:
            _check_mask(mask, tokens)
        if cu_seqlens is not None:
            if mask is not None:
                raise ValueError("mask: packed sequences (cu_seqlens) have no padding, so give only one of the two")
            if tokens.shape[0] != 1:
                raise ValueError(f"tokens: got batch size {tokens.shape[0]} with cu_seqlens, expected 1")
            bounds = cu_seqlens.tolist()
            if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens.shape[1] or sorted(bounds) != bounds:
                raise ValueError(f"cu_seqlens: got {bounds}, expected an ascending list from 0 to {tokens.shape[1]}")
            rows = len(bounds) - 1
        if cache is not None and cache.rows != rows:
            raise ValueError(f"cache: has {cache.rows} rows, but the tokens have {rows}")
        if cache is not None and len(cache.states) != len(self.blocks):
            raise ValueError(f"cache: is of a model with {len(cache.states)} layers, this one has {len(self.blocks)}")
        if cache is not None and cache.mixers != self._mixer_names():
            theirs, ours = (", ".join(names) for names in (cache.mixers, self._mixer_names()))
            raise ValueError(f"cache: is of a model with the mixers {theirs}, this one has {ours}")


def _check_mask(mask: Tensor, tokens: Tensor) -> None:
    """Refuse what does not say true or false of every token."""
    if mask.shape != tokens.shape[:2]:
        raise ValueError(f"mask: got shape {tuple(mask.shape)}, expected that of tokens, {tuple(tokens.shape[:2])}")
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"mask: got {mask.dtype}, expected true and false, or 1 and 0 as integers")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"mask: got numbers from {int(mask.min())} to {int(mask.max())}, expected 0 and 1")


def _observed_once(mixer: Mixer) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts in which a checkpointed block is computed for the first time, and again."""
    return nullcontext(), _unobserved(mixer)


@contextmanager
def _unobserved(mixer: Mixer) -> Iterator[None]:
    """Nobody looks at this mixer."""
    observer, mixer.observer = mixer.observer, None
    try:
        yield
    finally:
        mixer.observer = observer
