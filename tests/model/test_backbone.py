"""The backbone: what the paper fixes about it, the loss, the optimiser's groups, and the mistakes that it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mesanet.bench.costs import weight_operations
from mesanet.config.model import MIXER_NAMES, ModelConfig, SolverConfig
from mesanet.mixers import MIXERS, Layout, Mixer
from mesanet.mixers.attention import Attention, SlidingWindow
from mesanet.mixers.layout import dense_layout
from mesanet.mixers.mesa import Mesa
from mesanet.model.backbone import LanguageModel


def small(*mixers: str, **changes: object) -> LanguageModel:
    settings: dict[str, object] = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "vocabulary": 61, "window": 6}
    return LanguageModel(ModelConfig(mixers=mixers, **{**settings, **changes}))  # type: ignore[arg-type]


def test_a_pattern_is_repeated_over_the_layers() -> None:
    model = small("hawk", "mesa", layers=5)
    names = [type(mixer).__name__ for mixer in model.mixers()]
    assert names == ["Hawk", "Mesa", "Hawk", "Mesa", "Hawk"]


def test_initialisation_follows_the_paper() -> None:
    """Fan-in normal weights, residual outputs scaled by 2 / N, an embedding that makes the stream's variance one."""
    model = small("gla", width=256, heads=4, key_size=64, layers=8, vocabulary=500)
    block = model.blocks[0]
    # A sample of n normal numbers has a standard deviation that is off by a factor of about 1 +- 1 / sqrt(2 n).
    for weight, expected in [
        (block.mixer.query.weight, 1 / math.sqrt(256)),
        (block.mlp.up.weight, 1 / math.sqrt(256)),
        (block.mixer.output.weight, math.sqrt(2 / 8 / 256)),
        (block.mlp.down.weight, math.sqrt(2 / 8 / 768)),
        (model.embedding.weight, 1 / math.sqrt(256)),
    ]:
        assert weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * weight.numel()))
    stream: list[Tensor] = []
    block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
    model(torch.arange(500)[:, None])
    assert stream[0].var().item() == pytest.approx(1, rel=0.02)


def test_the_ridge_starts_where_the_config_says_and_stays_above_its_bound() -> None:
    for initial, bound in ((1.0, 0.25), (50.0, 49.0)):
        mixer = small("mesa", ridge_initial=initial, ridge_lower_bound=bound).mixers()[0]
        assert isinstance(mixer, Mesa)
        torch.testing.assert_close(mixer.ridge, torch.full((2, 16), initial))
        with torch.no_grad():
            mixer.ridge_parameter.fill_(-1e9)
        torch.testing.assert_close(mixer.ridge, torch.full((2, 16), bound))


def test_the_gamma_cap_is_coupled_with_the_write_gate() -> None:
    mixer = small("mesa", dtype="float64").mixers()[0]
    x = 4 * torch.randn(3, 5, 32, dtype=torch.float64)
    layout = dense_layout(3, 5, None, None, x.device)
    assert isinstance(mixer, Mesa)
    capped = mixer.gates(x, layout)
    mixer.gamma_cap = 1.0
    free = mixer.gates(x, layout)
    assert capped.write is not None
    assert capped.log_decay is not None
    assert free.log_decay is not None
    factor = 1 - (1 - 0.9975) * capped.write**2
    torch.testing.assert_close(capped.log_decay.exp(), free.log_decay.exp() * factor)


def test_signed_gates_are_twice_the_sigmoid_minus_one() -> None:
    mixer = small("gla", gamma_range="signed", dtype="float64").mixers()[0]
    x = 4 * torch.randn(3, 5, 32, dtype=torch.float64)
    gates = mixer.gates(x, dense_layout(3, 5, None, None, x.device))  # type: ignore[operator]
    expected = 2 * torch.sigmoid(mixer.forget_gate(x)) - 1  # type: ignore[operator]
    torch.testing.assert_close(gates.sign * gates.log_decay.exp(), expected)
    assert (expected < 0).any()


def test_logits_are_capped_and_the_embedding_is_tied() -> None:
    model = small("attention")
    with torch.no_grad():
        model.embedding.weight.mul_(1000)
    logits, _ = model(torch.arange(20)[None])
    assert logits.abs().max() <= 30
    assert logits.abs().max() > 29
    assert sum(parameter.shape[0] == 61 for parameter in model.parameters()) == 1


@pytest.mark.parametrize("name", MIXERS)
def test_weight_decay_leaves_embeddings_norms_biases_and_ridge_alone(name: str) -> None:
    model = small(name)
    decayed, undecayed = (
        {id(parameter) for parameter in group["params"]} for group in model.parameter_groups(weight_decay=0.1)
    )
    names = dict(model.named_parameters())
    assert len(decayed) + len(undecayed) == len(names)
    for label, parameter in names.items():
        last = label.rsplit(".", 1)[-1]
        free = "norm" in label or "embedding" in label or last in ("bias", "ridge_parameter", "forget_parameter")
        assert (id(parameter) in undecayed) == free, label
    assert [group["weight_decay"] for group in model.parameter_groups(weight_decay=0.1)] == [0.1, 0.0]


class Averages(Mixer):
    """The mean of all tokens so far, with a layer of PyTorch's own."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.project(x.cumsum(dim=1) / counts), None


def test_layers_of_pytorch_in_a_mixer_decay_and_cost_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "averages", Averages)
    model = small("averages")
    decayed, undecayed = ({id(each) for each in group["params"]} for group in model.parameter_groups(0.1))
    for mixer in model.mixers():
        assert id(mixer.project.weight) in decayed
        assert id(mixer.project.bias) in undecayed
    mlp, projection, table = 3 * 32 * 96, 32 * 32, 61 * 32
    assert weight_operations(model.config) == 2 * (2 * (mlp + projection) + table)


def test_the_logits_of_the_last_tokens_only() -> None:
    model = small("gla")
    tokens = torch.randint(61, (2, 5))
    whole, _ = model(tokens)
    for last, expected in [(0, whole[:, :0]), (2, whole[:, 3:]), (5, whole), (7, whole)]:
        torch.testing.assert_close(model(tokens, last=last)[0], expected)
    with pytest.raises(ValueError, match="last: got -1"):
        model(tokens, last=-1)


def test_a_mask_of_integers_is_the_mask_of_truths() -> None:
    model = small("gla")
    tokens = torch.randint(61, (2, 5))
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    expected, cache = model(tokens, mask=mask.bool())
    for dtype in (torch.long, torch.uint8):
        actual, after = model(tokens, mask=mask.to(dtype))
        assert torch.equal(actual, expected)
        assert torch.equal(after.lengths, cache.lengths)
    with pytest.raises(ValueError, match="mask: got numbers from 0 to 2, expected 0 and 1"):
        model(tokens, mask=2 * mask)
    with pytest.raises(ValueError, match=r"mask: got torch\.float32, expected true and false"):
        model(tokens, mask=mask.float())


def test_activation_checkpointing_changes_no_gradient() -> None:
    model = small("mesa", "attention").train()
    tokens = torch.randint(61, (2, 20))
    gradients = []
    for enabled in (False, True):
        model.set_activation_checkpointing(enabled)
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)


def test_the_solver_can_be_changed_on_a_loaded_model() -> None:
    model = small("hawk", "mesa", layers=4, training_solver=SolverConfig(max_steps=5, tolerance=0.0))
    tokens = torch.randint(61, (2, 12))

    def steps(layers: tuple[int, ...] | None = None) -> list[list[int]]:
        with model.observe(layers) as seen:
            model(tokens)
        return [[seen_.layer, *seen_.steps.unique().tolist()] for seen_ in seen if seen_.steps is not None]

    assert steps() == [[1, 5], [3, 5]]
    model.eval()
    assert all(max(row[1:]) > 1 for row in steps())
    model.set_solver(max_steps=2, tolerance=0.0)
    model.set_solver(max_steps=1, layers=(3,))
    assert steps() == [[1, 2], [3, 1]]
    assert steps((3,)) == [[3, 1]]
    model.train()
    assert steps() == [[1, 5], [3, 5]]
    model.set_solver(max_steps=3, mode="both")
    assert steps() == [[1, 3], [3, 3]]
    with pytest.raises(ValueError, match="mode: got 'eval'"):
        model.set_solver(max_steps=3, mode="eval")


def test_a_change_of_the_solver_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="solver: the model has no mesa layer but gla"):
        small("gla").set_solver(max_steps=3)
    hybrid = small("hawk", "mesa")
    for layers in ((99,), (0,), (0, 1), (-1,), ()):
        with pytest.raises(ValueError, match=r"layers: got .*, expected some of the mesa layers, \[1\]"):
            hybrid.set_solver(max_steps=3, layers=layers)


def test_the_config_tells_the_model_as_it_stands() -> None:
    model = small("mesa", "gla", layers=4)
    model.set_solver(max_steps=3, preconditioner="none")
    model.set_solver(tolerance=0.25, mode="training")
    assert model.config.inference_solver == SolverConfig(max_steps=3, tolerance=1e-7, preconditioner=None)
    assert model.config.training_solver == SolverConfig(tolerance=0.25)
    assert model.to(torch.bfloat16).config.dtype == "bfloat16"
    common = model.config
    model.set_solver(max_steps=9, mode="both", layers=(2,))
    assert model.config == common
    model.set_solver(tolerance=0.125, mode="both")
    assert model.config.inference_solver == SolverConfig(max_steps=3, tolerance=0.125, preconditioner=None)
    assert model.config.training_solver == SolverConfig(tolerance=0.125)
    model.set_solver(max_steps=4, layers=(0, 2))
    assert model.config.inference_solver.max_steps == 4


def test_observations_are_what_the_rule_got() -> None:
    model = small("mesa").eval()
    with model.observe() as seen:
        model(torch.randint(61, (3, 8)))
    assert [observation.layer for observation in seen] == [0, 1]
    assert seen[0].queries.shape == (3, 8, 2, 16)
    torch.testing.assert_close(seen[0].keys.norm(dim=-1), torch.ones(3, 8, 2))
    assert not seen[0].keys.requires_grad
    model(torch.randint(61, (3, 8)))
    assert len(seen) == 2


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_with_queries_keys_and_values_can_be_observed(name: str) -> None:
    """Once for each call, also where activation checkpointing computes it again in the backward pass."""
    model = small(name).train()
    tokens = torch.randint(61, (3, 8))
    model.set_activation_checkpointing(True)
    with model.observe() as seen:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    if name == "hawk":
        assert seen == []
        with pytest.raises(ValueError, match=r"layers: got \[1\], expected some of those that can be observed, \[\]"):
            model.observe((1,)).__enter__()
        return
    assert [observation.layer for observation in seen] == [0, 1]
    for observation in seen:
        assert observation.queries.shape == observation.keys.shape == observation.values.shape == (3, 7, 2, 16)
        assert (observation.steps is not None) == (name == "mesa")
        assert (observation.ridge is not None) == name.startswith("mesa")
        forgets = getattr(MIXERS[name], "forgets", False)
        assert (observation.gates.log_decay is not None) == forgets
    with pytest.raises(ValueError, match=r"layers: got \[2\], expected some of those that can be observed, \[0, 1\]"):
        model.observe((0, 2)).__enter__()


@pytest.mark.parametrize("window", [1, 2, 5, 64, 100, 400])
def test_windowed_attention_is_attention_under_a_band(window: int) -> None:
    """In blocks or as one masked matrix: the same numbers, for lengths that fit the blocks and that do not."""
    config = ModelConfig(width=16, heads=2, key_size=8, layers=1, window=window)
    mixer = SlidingWindow(config, 0)
    for time in (1, 63, 128, 300):
        q, k, v = torch.randn(3, 2, time, 2, 8, dtype=torch.float64).unbind()
        output, after = mixer.attend(q, k, v, None, None)
        distance = torch.arange(time)[:, None] - torch.arange(time)
        band = (distance >= 0) & (distance < window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=band
        )
        torch.testing.assert_close(output, expected.transpose(1, 2))
        assert after.slots == window - 1
        assert after.mask().sum(dim=1).tolist() == 2 * [min(time, window - 1)]
        # Slots that hold no token are no work for what follows.
        assert after.without_empty().slots == min(time, window - 1)


def test_attention_is_the_attention_of_llama() -> None:
    """Same weights, same numbers as transformers' module with rotary positions, in float32."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    settings = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_hidden_layers=1
    )
    settings._attn_implementation = "sdpa"
    theirs = llama.LlamaAttention(settings, layer_idx=0).eval()
    ours = Attention(ModelConfig(width=64, heads=4, key_size=16, layers=1), 0)
    pairs = [(ours.query, theirs.q_proj), (ours.key, theirs.k_proj), (ours.value, theirs.v_proj)]
    for mine, other in [*pairs, (ours.output, theirs.o_proj)]:
        mine.load_state_dict(other.state_dict())
    x = torch.randn(2, 50, 64)
    positions = torch.arange(50).expand(2, 50)
    angles = llama.LlamaRotaryEmbedding(settings)(x, positions)
    expected = theirs(x, position_embeddings=angles, attention_mask=None)[0]
    actual, _ = ours(x, dense_layout(2, 50, None, None, x.device), None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_model_built_on_the_meta_device_can_be_drawn_later() -> None:
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(mixers=tuple(MIXERS), layers=len(MIXERS), width=32, heads=2, key_size=16))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    model.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    mesa = model.mixers()[list(MIXERS).index("mesa")]
    assert isinstance(mesa, Mesa)
    torch.testing.assert_close(mesa.ridge, torch.ones(2, 16))
    assert mesa.forget_gate is not None
    torch.testing.assert_close(mesa.forget_gate.bias, torch.tensor([3.0, 6.0]))


def test_mistakes_are_named() -> None:
    model = small("gla")
    tokens = torch.randint(61, (2, 5))
    _, cache = model(tokens)
    with pytest.raises(ValueError, match="did you mean 'gated_deltanet'"):
        small("gated_deltnet")
    with pytest.raises(ValueError, match=r"tokens: got torch\.float32"):
        model(torch.randn(2, 5))
    for wrong in (61, -1):
        with pytest.raises(ValueError, match=rf"tokens: got {wrong}, expected ids from 0 to 60"):
            model(torch.tensor([[3, wrong]]))
    with pytest.raises(ValueError, match=r"or vectors \[B, T, 32\]"):
        model(torch.randn(2, 5, 31))
    with pytest.raises(ValueError, match=r"mask: got shape \(2, 4\)"):
        model(tokens, mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="cache: has 2 rows, but the tokens have 1"):
        model(tokens[:1], cache)
    with pytest.raises(ValueError, match=r"cache: is of a model with 2 layers, this one has 3"):
        small("gla", layers=3)(tokens, cache)
    with pytest.raises(ValueError, match=r"cache: is of a model with the mixers gla, gla, this one has hawk, mesa"):
        small("hawk", "mesa")(tokens, cache.select(torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 3\], expected an ascending list from 0 to 5"):
        model(tokens[:1], cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="batch size 2 with cu_seqlens"):
        model(tokens, cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if not kind.signed_gates])
def test_signed_gates_are_refused_where_there_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"gamma_range: got 'signed', but {name} has no signed forget gate"):
        small(name, gamma_range="signed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixers": ("messa",)}, "mixers: got 'messa', .*did you mean 'mesa'"),
        ({"forget_bias": (0.0, math.nan)}, r"forget_bias\[1\]: got nan, expected a finite number"),
        ({"forget_bias": (-math.inf, 1.0)}, r"forget_bias\[0\]: got -inf"),
        ({"ridge_initial": 1e-30, "ridge_lower_bound": 0.0}, "ridge_initial: got 1e-30, expected a number in"),
    ],
)
def test_mistakes_are_named_before_anything_is_built(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)  # type: ignore[arg-type]


def test_a_config_takes_lists_and_refuses_mixers_that_no_layer_has() -> None:
    config = ModelConfig(mixers=["hawk", "mesa"], forget_bias=[1.0, 2.0], layers=2)  # type: ignore[arg-type]
    assert config == ModelConfig(mixers=("hawk", "mesa"), forget_bias=(1.0, 2.0), layers=2)
    assert hash(config.mixers) == hash(("hawk", "mesa"))
    with pytest.raises(ValueError, match=r"mixers: got 'mesa' \(str\), expected a list"):
        ModelConfig(mixers="mesa")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mixers: got 3 for 2 layers, which leaves gla unused"):
        small("hawk", "mesa", "gla")


def test_the_config_knows_the_names_in_the_table() -> None:
    assert tuple(MIXERS) == MIXER_NAMES


def test_a_mixer_that_is_added_at_run_time_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mixers: got 'extra'"):
        ModelConfig(mixers=("extra",))
    monkeypatch.setitem(MIXERS, "extra", MIXERS["gla"])
    assert small("extra")(torch.zeros(1, 3, dtype=torch.long))[0].shape == (1, 3, 61)


def test_the_papers_plain_method_can_be_asked_for() -> None:
    model = small("mesa").eval()
    tokens = torch.randint(0, 50, (1, 40))
    solvers = [mixer.inference_solver for mixer in model.mixers()]  # type: ignore[attr-defined]
    assert {solver.preconditioner for solver in solvers} == {"auto"}
    with model.observe() as preconditioned:
        model(tokens)
    model.set_solver(preconditioner="none")
    with model.observe() as plain:
        model(tokens)
    fewer = [seen.steps.sum() < other.steps.sum() for seen, other in zip(preconditioned, plain, strict=True)]  # type: ignore[union-attr]
    assert all(fewer)
    model.set_solver(preconditioner="auto")
    assert [mixer.inference_solver for mixer in model.mixers()] == solvers  # type: ignore[attr-defined]
