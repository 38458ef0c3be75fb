"""What every mixer in the table has to do, whatever its rule is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesanet.config.model import ModelConfig, SolverConfig
from mesanet.mixers import MIXERS, Mixer
from mesanet.mixers.layout import dense_layout
from mesanet.model.backbone import LanguageModel
from mesanet.model.cache import Cache, state_tensors

PATTERNS = [
    *((name,) for name in MIXERS),
    ("hawk", "mesa"),
    ("sliding_window", "gated_deltanet"),
    ("attention", "mesa"),
]
VOCABULARY = 61
EXACT = SolverConfig(max_steps=60, tolerance=1e-14)
"""Solves to the last digit, so that how a sequence is cut leaves no trace in the solution."""

# Logits are of order one here. A few hundred float32 operations at 6e-8 each, of which RMSNorm enlarges those on small
# outputs, stay below 1e-4; float64 has the same chain with 1e-16.
FLOAT32, FLOAT64 = 1e-4, 1e-11


def ids(pattern: tuple[str, ...]) -> str:
    return "-".join(pattern)


def build(pattern: tuple[str, ...], dtype: str = "float64", **changes: object) -> LanguageModel:
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "mixers": pattern,
        "layers": 2,
        "width": 32,
        "heads": 2,
        "key_size": 16,
        "vocabulary": VOCABULARY,
        "window": 6,
        "dtype": dtype,
        "training_solver": EXACT,
        "inference_solver": EXACT,
    }
    return LanguageModel(ModelConfig(**{**settings, **changes})).eval()  # type: ignore[arg-type]


def tokens(batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def in_pieces(model: LanguageModel, inputs: Tensor, cuts: list[int]) -> tuple[Tensor, Cache]:
    """Logits of a sequence that is fed in pieces."""
    outputs = []
    cache = None
    for begin, end in zip([0, *cuts], [*cuts, inputs.shape[1]], strict=True):
        logits, cache = model(inputs[:, begin:end], cache)
        outputs.append(logits)
    assert cache is not None
    return torch.cat(outputs, dim=1), cache


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.fixture(autouse=True)
def no_graph() -> object:
    with torch.no_grad():
        yield


def one_mixer(name: str, **changes: object) -> Mixer:
    """One layer by itself, on states of order one."""
    return build((name,), layers=1, convolve_values=True, **changes).mixers()[0]


@pytest.mark.parametrize("name", MIXERS)
def test_in_parallel_over_time_equals_one_token_at_a_time(name: str) -> None:
    """Three chunks, float64: outputs and states of the op's parallel form and of its reference, through the layer."""
    mixer = one_mixer(name)
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    layout = dense_layout(2, 150, None, torch.tensor([0, 20]), x.device)
    output, state = mixer(x, layout, None)
    mixer.backend = "reference"
    expected, expected_state = mixer(x, layout, None)
    if name in ("attention", "sliding_window", "mesa_rls"):
        # These have no second form: the reference is the same token by token, each with all that it may look at.
        outputs, expected_state = [], None
        for t in range(150):
            seen = torch.tensor([t, t - 20]).clamp_min(0)
            one = dense_layout(2, 1, seen, torch.tensor([0, int(t < 20)]), x.device)
            token, expected_state = mixer(x[:, t : t + 1], one, expected_state)
            outputs.append(token)
        expected = torch.cat(outputs, dim=1)
    close(output[0], expected[0], 1e-10)
    close(output[1, 20:], expected[1, 20:], 1e-10)
    for actual, wanted in zip(state_tensors(state), state_tensors(expected_state), strict=True):
        if name not in ("attention", "sliding_window"):
            torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", MIXERS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Of the input and of every parameter, over two chunks, along random directions."""
    mixer = one_mixer(name, width=12, heads=2, key_size=4).train()
    x = torch.randn(1, 70, 12, dtype=torch.float64, requires_grad=True)
    layout = dense_layout(1, 70, None, None, x.device)
    names, parameters = zip(*mixer.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(
            mixer, dict(zip(names, parameters, strict=True)), (x, layout, None)
        )[0]
        return output

    with torch.enable_grad():
        assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", FLOAT64), ("float32", FLOAT32)])
def test_whole_equals_pieces_equals_step_by_step(pattern: tuple[str, ...], dtype: str, tolerance: float) -> None:
    """Pieces that end inside the chunks of 64 tokens, at their ends, and that span several."""
    model = build(pattern, dtype)
    inputs = tokens(2, 150)
    whole, after_whole = model(inputs)
    close(in_pieces(model, inputs, [9, 10, 64, 140])[0], whole, tolerance)
    stepwise, after_steps = in_pieces(model, inputs, list(range(1, 150)))
    close(stepwise, whole, tolerance)
    assert torch.equal(after_steps.lengths, after_whole.lengths)
    again = tokens(2, 3, seed=2)
    close(model(again, after_steps)[0], model(again, after_whole)[0], tolerance)


@pytest.mark.parametrize("repeated", [False, True], ids=["random", "repeated"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_cached_generation_gives_the_logits_of_one_call(pattern: tuple[str, ...], repeated: bool) -> None:
    """With the solver that a model starts with: a padded prompt of several chunks in pieces, then token by token.

    A token that is repeated for long makes the stiffest systems, and states that are multiplied by the same gate over
    and over, so that rounding does not average out.
    """
    model = build(pattern, "float32", inference_solver=ModelConfig().inference_solver)
    inputs = tokens(3, 230, seed=4)
    mask = torch.ones(3, 230, dtype=torch.bool)
    mask[0, :90] = False
    mask[1, :33] = False
    if repeated:
        inputs[:, 100:] = 7
    whole, _ = model(inputs, mask=mask)
    cache = None
    for begin, end in [(0, 47), (47, 180), *((place, place + 1) for place in range(180, 230))]:
        logits, cache = model(inputs[:, begin:end], cache, mask=mask[:, begin:end])
        real = mask[:, begin:end]
        close(logits[real], whole[:, begin:end][real], FLOAT32)


@pytest.mark.parametrize("steps", [0, 3])
def test_limited_steps_hold_in_prefill_and_decoding(steps: int) -> None:
    """The plain method takes the same few steps however the tokens come; they are far from the solution."""
    model = build(("mesa",))
    inputs = tokens(2, 90)
    solved, _ = model(inputs)
    model.set_solver(max_steps=steps, tolerance=0.0, preconditioner="none")
    with model.observe() as seen:
        whole, _ = model(inputs)
        stepwise, _ = in_pieces(model, inputs, list(range(70, 90)))
    assert all((one.steps == steps).all() for one in seen)
    close(stepwise, whole, FLOAT64)
    assert (whole - solved).abs().max() > 1e-3


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_packed_equals_separate(pattern: tuple[str, ...]) -> None:
    model = build(pattern, convolve_values=True)
    first, second = tokens(1, 20, seed=3), tokens(1, 9, seed=4)
    # The sequence without tokens keeps the row of the cache that it has.
    cuts, more_cuts = torch.tensor([0, 7, 20]), torch.tensor([0, 0, 9])
    packed, cache = model(first, cu_seqlens=cuts)
    more, cache = model(second, cache, cu_seqlens=more_cuts)
    last, cache = model(tokens(2, 1, seed=5), cache)
    expected_first, alone_first = model(first[:, :7])
    expected_second, alone_second = model(first[:, 7:])
    expected_more, alone_second = model(second, alone_second)
    close(packed, torch.cat([expected_first, expected_second], dim=1), FLOAT64)
    close(more, expected_more, FLOAT64)
    close(last[:1], model(tokens(2, 1, seed=5)[:1], alone_first)[0], FLOAT64)
    close(last[1:], model(tokens(2, 1, seed=5)[1:], alone_second)[0], FLOAT64)
    assert cache.lengths.tolist() == [8, 23]


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_padding_touches_nothing(pattern: tuple[str, ...]) -> None:
    """Left padding, also in front of later pieces and as a whole piece, and padding of any other kind."""
    model = build(pattern, convolve_values=True)
    inputs = tokens(3, 16)
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[0, :5] = False
    mask[1, :9] = False
    more_mask = torch.ones(3, 4, dtype=torch.bool)
    more_mask[2, :3] = False
    more_mask[0] = False
    more = tokens(3, 4, seed=6)
    whole, cache = model(inputs, mask=mask)
    continued, cache = model(more, cache, mask=more_mask)
    last, cache = model(more[:, :1], cache)
    first, halves = model(inputs[:, :8], mask=mask[:, :8])
    second, halves = model(inputs[:, 8:], halves, mask=mask[:, 8:])
    close(torch.cat([first, second], dim=1)[mask], whole[mask], FLOAT64)
    for row in range(3):
        alone, own = model(inputs[row : row + 1, mask[row]])
        close(whole[row : row + 1, mask[row]], alone, FLOAT64)
        if more_mask[row].any():
            alone, own = model(more[row : row + 1, more_mask[row]], own)
            close(continued[row : row + 1, more_mask[row]], alone, FLOAT64)
        close(last[row : row + 1], model(more[row : row + 1, :1], own)[0], FLOAT64)
    scattered = torch.ones(3, 16, dtype=torch.bool)
    scattered[0, 12:] = False
    scattered[1, [2, 3, 8]] = False
    anywhere, cache = model(inputs, mask=scattered)
    for row in range(3):
        alone, own = model(inputs[row : row + 1, scattered[row]])
        close(anywhere[row : row + 1, scattered[row]], alone, FLOAT64)
    assert cache.lengths.tolist() == [12, 13, 16]


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_autocast_stays_close(pattern: tuple[str, ...]) -> None:
    """bfloat16 keeps 8 bits; through two blocks its rounding stays within a few percent of the logits."""
    model = build(pattern, "float32")
    inputs = tokens(4, 40)
    exact, _ = model(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, cache = model(inputs)
        stepwise, _ = model(inputs[:, :1], cache)
    assert rounded.dtype == torch.float32
    assert stepwise.isfinite().all()
    assert (rounded - exact).norm() / exact.norm() < 0.06


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_the_state_has_the_size_that_it_should(pattern: tuple[str, ...]) -> None:
    model = build(pattern, "float32")
    sizes = []
    cache = None
    for piece in (8, 8, 64):
        _, cache = model(tokens(1, piece), cache)
        sizes.append(cache.nbytes)
    if "attention" in pattern:
        layers = 2 // len(pattern)
        assert sizes[1] - sizes[0] == 8 * layers * 2 * 16 * 2 * 4  # tokens, layers, heads, key size, k and v, bytes
    else:
        assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "attention"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_state_keeps_no_prompt_in_memory(name: str, packed: bool) -> None:
    """A view into what was computed for the prompt would hold all of it."""
    model = build((name,), "float32", convolve_values=True)
    _, cache = model(tokens(1, 300), cu_seqlens=torch.tensor([0, 100, 300]) if packed else None)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for state in cache.states for tensor in state_tensors(state)}  # fmt: skip
    assert sum(held.values()) == cache.nbytes


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ("attention", "sliding_window")])
def test_recurrent_states_are_float32_under_autocast(name: str) -> None:
    model = build((name,), "float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = model(tokens(1, 8))
    _, recurrent = cache.states[0]
    assert all(tensor.dtype == torch.float32 for tensor in state_tensors(recurrent))


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_gradients_reach_every_parameter(pattern: tuple[str, ...]) -> None:
    model = build(pattern, "float32", convolve_values=True).train()
    with torch.enable_grad():
        inputs = tokens(2, 24)
        model.loss(inputs[:, :-1], inputs[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_gradients_flow_through_the_cache(pattern: tuple[str, ...]) -> None:
    """Backpropagation through pieces equals that through the whole."""
    model = build(pattern)
    inputs = tokens(2, 14)
    with torch.enable_grad():
        model(inputs)[0].square().mean().backward()
        whole = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        in_pieces(model, inputs, [5, 6])[0].square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, whole[name], atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if kind.observable])
def test_gradients_flow_through_the_cache_where_one_projection_alone_learns(name: str, part: str) -> None:
    """No piece writes into what the backward pass of an earlier one needs."""
    model = build((name,), layers=1)
    inputs = tokens(2, 14)
    weight = getattr(model.mixers()[0], part).weight
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is weight)
    with torch.enable_grad():
        (whole,) = torch.autograd.grad(model(inputs)[0].square().mean(), weight)
        (pieces,) = torch.autograd.grad(in_pieces(model, inputs, [5, 6, 7])[0].square().mean(), weight)
    torch.testing.assert_close(pieces, whole, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", MIXERS)
def test_what_is_not_a_number_stays_at_padding(name: str) -> None:
    """In the layer by itself, and in the gradients of a model that is given vectors."""
    mixer = one_mixer(name)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    layout = dense_layout(2, 9, None, torch.tensor([3, 0]), x.device)
    expected, expected_state = mixer(x, layout, None)
    x[0, :3] = torch.nan
    output, state = mixer(x, layout, None)
    assert torch.equal(output[0, 3:], expected[0, 3:])
    assert torch.equal(output[1], expected[1])
    following = dense_layout(2, 1, torch.tensor([6, 9]), None, x.device)
    assert torch.equal(mixer(x[:, 8:], following, state)[0], mixer(x[:, 8:], following, expected_state)[0])

    model = build((name,)).train()
    mask = layout.real
    assert mask is not None
    with torch.enable_grad():
        model(x, mask=mask)[0][mask].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids)
def test_a_cache_can_be_branched_and_reordered(pattern: tuple[str, ...]) -> None:
    model = build(pattern)
    _, cache = model(tokens(3, 10))
    one, two = tokens(3, 2, seed=7), tokens(3, 2, seed=8)
    expected, _ = model(two, cache)
    first, branch = model(one, cache)
    again, _ = model(two, cache)
    close(again, expected, 0)
    order = torch.tensor([2, 0, 0])
    chosen, _ = model(one[order], cache.select(order))
    close(chosen, first[order], FLOAT64)
    longer, _ = model(one, branch)
    close(longer, model(one, branch)[0], 0)


@pytest.mark.parametrize("name", MIXERS)
def test_no_tokens_and_no_rows(name: str) -> None:
    model = build((name,))
    _, cache = model(tokens(2, 5))
    nothing, after = model(tokens(2, 0), cache)
    assert nothing.shape == (2, 0, VOCABULARY)
    assert torch.equal(after.lengths, cache.lengths)
    close(model(tokens(2, 1), after)[0], model(tokens(2, 1), cache)[0], FLOAT64)
    assert model(tokens(0, 5))[0].shape == (0, 5, VOCABULARY)


@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if kind.signed_gates])
def test_signed_forget_gates(name: str) -> None:
    strong = {"ridge_initial": 50.0, "ridge_lower_bound": 49.0, "gamma_cap": 1.0, "forget_bias": (-2.0, 2.0)}
    model = build((name,), gamma_range="signed", **strong)
    inputs = tokens(2, 17)
    whole, _ = model(inputs)
    assert whole.isfinite().all()
    close(in_pieces(model, inputs, [4, 5])[0], whole, FLOAT64)
    with torch.enable_grad():
        model.loss(inputs[:, :-1], inputs[:, 1:]).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
