"""The table of costs: every operation of the token-by-token rules is counted, on numbers that count for themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from mesanet import presets
from mesanet.bench.costs import Cost, Sizes, head_cost, layer_cost, model_cost, rule_cost, weight_operations
from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS, HeadMixer
from mesanet.model.backbone import LanguageModel
from mesanet.model.cache import state_tensors

K, V, T, STEPS = 3, 5, 7, 2
SIZE = Sizes(key=K, value=V, position=T, steps=STEPS)


class Counter:
    """How many operations there were."""

    def __init__(self) -> None:
        self.count = 0

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


COUNTER = Counter()


class Number:
    """A number that counts what is done to it; its value does not matter."""

    def _operate(self, other: object) -> Number:
        COUNTER.count += 1
        return Number()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operate


Vector = list[Number]
Matrix = list[Vector]


def vector(size: int) -> Vector:
    return [Number() for _ in range(size)]


def matrix(rows: int, columns: int) -> Matrix:
    return [vector(columns) for _ in range(rows)]


def each(function: Callable[..., Number], *vectors: Vector) -> Vector:
    return [function(*entries) for entries in zip(*vectors, strict=True)]


def dot(left: Sequence[Number], right: Sequence[Number]) -> Number:
    total = Number()
    for a, b in zip(left, right, strict=True):
        total = total + a * b
    return total


def apply(weights: Matrix, x: Vector) -> Vector:
    """weights^T x"""
    return [dot(column, x) for column in zip(*weights, strict=True)]


def add_outer(weights: Matrix, left: Vector, right: Vector) -> Matrix:
    return [[w + a * b for w, b in zip(row, right, strict=True)] for row, a in zip(weights, left, strict=True)]


def scaled(weights: Matrix, factor: Number) -> Matrix:
    return [[w * factor for w in row] for row in weights]


def times(x: Vector, factor: Number) -> Vector:
    return [entry * factor for entry in x]


def minus(left: Vector, right: Vector) -> Vector:
    return each(lambda a, b: a - b, left, right)


def plus(left: Vector, right: Vector) -> Vector:
    return each(lambda a, b: a + b, left, right)


q, k, v, gate = vector(K), vector(K), vector(V), Number()
kv, kk = matrix(K, V), matrix(K, K)


def attention() -> tuple[int, int]:
    keys, values, total, output = matrix(T, K), matrix(T, V), Number(), vector(V)
    weights = [dot(key, q) for key in keys]
    weights = [weight - Number() for weight in weights]
    for weight in weights:
        total = total + weight
    weights = [weight / total for weight in weights]
    for weight, value in zip(weights, values, strict=True):
        output = each(lambda o, x, w=weight: o + w * x, output, value)
    return 0, COUNTER.taken()


def mamba2() -> tuple[int, int]:
    after = add_outer(scaled(kv, gate), k, v)
    return COUNTER.taken(), read(after)


def read(state: Matrix) -> int:
    apply(state, q)
    return COUNTER.taken()


def gla() -> tuple[int, int]:
    after = add_outer(scaled(kv, gate), times(k, gate), v)
    return COUNTER.taken(), read(after)


def delta(state: Matrix) -> tuple[int, int]:
    after = add_outer(state, k, times(minus(v, apply(state, k)), gate))
    return COUNTER.taken(), read(after)


def deltanet() -> tuple[int, int]:
    return delta(kv)


def gated_deltanet() -> tuple[int, int]:
    return delta(scaled(kv, gate))


def mlstm() -> tuple[int, int]:
    forget = gate + gate
    stabiliser = forget
    forget, write = forget - stabiliser, gate - stabiliser
    written = times(k, write)
    after = add_outer(scaled(kv, forget), written, v)
    normaliser = plus(times(vector(K), forget), written)
    update = COUNTER.taken()
    answer = apply(after, q)
    denominator = dot(normaliser, q) + gate
    times(answer, 1 / denominator)
    return update, COUNTER.taken()


def longhorn() -> tuple[int, int]:
    step = gate / (1 + gate * dot(k, k))
    steps, squares = times(v, step), each(lambda a: a * a, k)
    # The precision of every value channel is the head's own, so the step is one number, and so is k^2 step's factor.
    kept = [[1 - a * b for b in vector(V)] for a in squares]
    state = [each(lambda a, b: a * b, *rows) for rows in zip(kept, kv, strict=True)]
    after = add_outer(state, k, steps)
    return COUNTER.taken(), read(after)


def mesa() -> tuple[int, int]:
    written = times(k, gate)
    h, g = add_outer(scaled(kk, gate), written, k), add_outer(scaled(kv, gate), written, v)
    update = COUNTER.taken()
    ridge = vector(K)

    def product(x: Vector) -> Vector:
        return plus(apply(h, x), each(lambda a, b: a * b, ridge, x))

    x = each(lambda b, d, r: b / (d + r), q, [h[i][i] for i in range(K)], ridge)
    residual = minus(q, product(x))
    p, rho = residual, dot(residual, residual)
    for _ in range(STEPS):
        a_p = product(p)
        alpha = rho / dot(p, a_p)
        x = plus(x, times(p, alpha))
        residual = minus(residual, times(a_p, alpha))
        rho, last = dot(residual, residual), rho
        p = plus(residual, times(p, rho / last))
    apply(g, x)
    return update, COUNTER.taken()


def mesa_direct() -> tuple[int, int]:
    """As `ops/mesa_step.py` decodes under the preconditioner "auto"."""
    written = times(k, gate)
    h, g = add_outer(scaled(kk, gate), written, k), add_outer(scaled(kv, gate), written, v)
    update = COUNTER.taken()
    system = [[(h[i][j] + h[j][i]) * 0.5 for j in range(K)] for i in range(K)]
    for i in range(K):
        system[i][i] = system[i][i] + Number()
    factors = [list(row) for row in system]
    for pivot in range(K):
        for row in range(pivot + 1, K):
            factors[row][pivot] = factors[row][pivot] / factors[pivot][pivot]
            for column in range(pivot + 1, K):
                factors[row][column] = factors[row][column] - factors[row][pivot] * factors[pivot][column]
    x = list(q)
    for row in range(K):
        for column in range(row):
            x[row] = x[row] - factors[row][column] * x[column]
    for row in reversed(range(K)):
        for column in range(row + 1, K):
            x[row] = x[row] - factors[row][column] * x[column]
        x[row] = x[row] / factors[row][row]
    residual = minus(q, apply(system, x))
    dot(residual, residual)
    apply(g, x)
    return update, COUNTER.taken()


def mesa_rls() -> tuple[int, int]:
    pushed = apply(kk, k)
    gain = gate / (1 + gate * dot(k, pushed))
    inverse = [
        [w - a * b for w, b in zip(row, pushed, strict=True)] for row, a in zip(kk, times(pushed, gain), strict=True)
    ]
    after = add_outer(kv, times(k, gate), v)
    update = COUNTER.taken()
    apply(after, apply(inverse, q))
    return update, COUNTER.taken()


COUNTED = [attention, mamba2, gla, deltanet, gated_deltanet, mlstm, longhorn, mesa, mesa_rls]


@pytest.mark.parametrize("rule", COUNTED)
def test_formulas_count_the_rules(rule: Callable[[], tuple[int, int]]) -> None:
    COUNTER.taken()
    update, output = rule()
    assert head_cost(rule.__name__, SIZE)[:2] == (update, output)


def test_the_direct_solve_is_counted() -> None:
    COUNTER.taken()
    assert head_cost("mesa", SIZE._replace(steps=None))[:2] == mesa_direct()
    large = Sizes(key=1000, value=1, position=1, steps=None)
    assert head_cost("mesa", large).output == pytest.approx(2 / 3 * 1000**3, rel=0.02)
    small = presets.small("mesa")
    assert model_cost(small, 9).layer_output_direct == layer_cost(small, "mesa", 9, direct=True).output
    gla = model_cost(presets.small("gla"), 9)
    assert gla.layer_output_direct == gla.layer_output


def test_a_new_mixer_says_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    class New(HeadMixer):
        pass

    monkeypatch.setitem(MIXERS, "new", New)
    with pytest.raises(ValueError, match=r"no formula for the cost of a head of 'new'.*can say it in `operations`"):
        head_cost("new", SIZE)
    New.operations = staticmethod(lambda key, value: (key, value, key * value))
    assert head_cost("new", SIZE) == Cost(K, V, K * V)


def config(mixer: str) -> ModelConfig:
    return ModelConfig(mixers=(mixer,), layers=2, width=24, heads=2, key_size=6, value_size=4, vocabulary=19, window=5)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("length", [3, 11])
def test_state_is_what_the_cache_holds(mixer: str, length: int) -> None:
    model = LanguageModel(config(mixer)).eval()
    with torch.no_grad():
        _, cache = model(torch.randint(19, (1, length)))
    held = 0
    for state in cache.states:
        # The convolutions keep three tokens of what they read; the rule's state comes after theirs.
        rule = state if mixer in ("attention", "sliding_window") else state[1]
        held += sum(tensor.numel() for tensor in state_tensors(rule) if tensor.is_floating_point())
    expected = rule_cost(config(mixer), length).state
    if mixer == "sliding_window":
        # Its cache has room for a whole window from the start.
        expected = max(expected, rule_cost(config(mixer), 4).state)
    assert held == expected


def test_the_paper_s_orders() -> None:
    """With n = K = V, 2 n t numbers for softmax attention, n^2 for linear attention, 2 n^2 and O(k n^2) for mesa."""
    n = 128
    size = Sizes(key=n, value=n, position=1000, steps=30)
    assert head_cost("attention", size).state == 2 * n * 1000
    assert {head_cost(name, size).state for name in ("mamba2", "gla", "deltanet", "gated_deltanet")} == {n * n}
    assert head_cost("mesa", size).state == 2 * n * n
    more = size._replace(steps=31)
    assert head_cost("mesa", more).output - head_cost("mesa", size).output == pytest.approx(2 * n * n, rel=0.05)
    assert head_cost("attention", size._replace(position=2000)) == head_cost("attention", size).times(2)


def test_a_pattern_adds_its_layers() -> None:
    hybrid = presets.small("hawk-mesa")
    expected = [layer_cost(hybrid, name, 100) for name in ("hawk", "mesa")]
    assert rule_cost(hybrid, 100) == Cost(*(7 * (a + b) for a, b in zip(*expected, strict=True)))


def test_weights_cost_two_operations_each_but_norms_and_biases_none() -> None:
    small = config("gla")
    model = LanguageModel(small)
    matrices = [p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "norm" not in name]
    assert weight_operations(small) == 2 * sum(matrices)


def test_fewer_steps_cost_less() -> None:
    mesa = presets.small("mesa")
    ten, thirty = model_cost(mesa, 8192, 10), model_cost(mesa, 8192)
    assert thirty.steps == 30
    assert thirty.total > ten.total > ten.weights
    assert thirty.record()["total"] == thirty.total


@pytest.mark.parametrize("wrong", [("abacus", 1), ("mesa", 0)])
def test_mistakes_are_told(wrong: tuple[str, int]) -> None:
    with pytest.raises(ValueError, match=r"mixers|position"):
        layer_cost(config("mesa"), *wrong)
