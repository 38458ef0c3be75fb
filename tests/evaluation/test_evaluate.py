"""The paper's metrics, computed the slow way: one forward pass for every token, loops for every sum."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mesanet.config.evaluation import EvaluationConfig, SolverOverride
from mesanet.config.model import ModelConfig
from mesanet.data.packing import PackedSequences
from mesanet.errors import UserError
from mesanet.evaluation import evaluate
from mesanet.evaluation.documents import EvaluationData
from mesanet.evaluation.windows import EndToEnd, plan_windows
from mesanet.model.backbone import LanguageModel
from mesanet.report.positions import by_position, difference, mean_so_far, positions_of

VOCABULARY, BOS = 11, 10
SIZES = (7, 23, 1, 16, 40)


def toy(mixers: tuple[str, ...] = ("mesa",), seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    config = ModelConfig(
        mixers=mixers, width=16, layers=2, heads=2, key_size=8, vocabulary=VOCABULARY, window=6, dtype="float64"
    )
    return LanguageModel(config).eval()


def toy_data() -> EvaluationData:
    random = np.random.default_rng(0)
    documents = [random.integers(0, BOS, size).astype(np.uint16) for size in SIZES]
    return EvaluationData(documents, BOS, VOCABULARY, "toy", "toy")


def config(**settings: object) -> EvaluationConfig:
    return EvaluationConfig(**{"data": Path("toy"), "length": 64, **settings})


@torch.no_grad()
def direct(model: LanguageModel, before: int, sequence: list[int]) -> list[float]:
    """log P(s_i | s_1 .. s_i-1) of every token of one sequence, each by a forward pass of its own."""
    found = []
    for i in range(len(sequence)):
        logits, _ = model(torch.tensor([[before, *sequence[:i]]]))
        found.append(float(logits[0, -1].log_softmax(-1)[sequence[i]]))
    return found


def direct_sequences(model: LanguageModel, data: EvaluationData, length: int) -> list[list[float]]:
    return [
        direct(model, tokens[start - 1] if start else BOS, tokens[start : start + length])
        for tokens in (document.tolist() for document in data.documents)
        for start in range(0, len(tokens), length)
    ]


# The direct way sums the same float64 numbers in another order; the mesa solver stops at a relative residual of 1e-7,
# and how a text is cut decides where, so its comparison takes a solver that goes on to 1e-12.
EXACT = SolverOverride(max_steps=200, tolerance=1e-12)


@pytest.mark.parametrize("length", [8, 64])
@pytest.mark.parametrize("mixers", [("mesa",), ("attention",), ("sliding_window", "gated_deltanet"), ("hawk", "mesa")])
def test_the_papers_formulas(mixers: tuple[str, ...], length: int) -> None:
    model, data = toy(mixers), toy_data()
    if "mesa" in mixers:
        model.set_solver(max_steps=EXACT.max_steps, tolerance=EXACT.tolerance)
    record = evaluate(model, data, config(length=length, piece=20))
    sequences = direct_sequences(model, data, length)
    positions = positions_of(record)
    tokens = sum(map(len, sequences))
    assert record["summary"]["tokens"] == tokens == sum(SIZES)
    nll = -sum(sum(sequence) for sequence in sequences) / tokens
    assert record["summary"]["nll"] == pytest.approx(nll, abs=1e-6)
    assert record["summary"]["perplexity"] == pytest.approx(math.exp(nll), rel=1e-6)
    for k in range(1, max(map(len, sequences)) + 1):
        long_enough = [sequence for sequence in sequences if len(sequence) >= k]
        nll_k = -sum(sequence[k - 1] for sequence in long_enough) / len(long_enough)
        assert by_position(positions)[k - 1] == pytest.approx(nll_k, abs=1e-6)
        so_far = -sum(sum(s[:k]) for s in sequences) / sum(min(len(s), k) for s in sequences)
        assert mean_so_far(positions)[k - 1] == pytest.approx(so_far, abs=1e-6)


def test_the_difference_to_another_model() -> None:
    data = toy_data()
    models = toy(("gla",)), toy(("attention",), seed=1)
    ours, base = (positions_of(evaluate(model, data, config())) for model in models)
    direct_ours, direct_base = (direct_sequences(model, data, 64) for model in models)
    for k in range(1, max(SIZES) + 1):
        pairs = [(a, b) for a, b in zip(direct_ours, direct_base, strict=True) if len(a) >= k]
        expected = -sum(a[k - 1] - b[k - 1] for a, b in pairs) / len(pairs)
        assert difference(ours, base)[k - 1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mixer", ["mesa", "attention", "hawk"])
def test_pieces_and_batches_change_nothing(mixer: str) -> None:
    model, data = toy((mixer,)), toy_data()
    if mixer == "mesa":
        model.set_solver(max_steps=EXACT.max_steps, tolerance=EXACT.tolerance)
    whole = evaluate(model, data, config(piece=1000))
    for piece in (1, 7, 24):
        cut = evaluate(model, data, config(piece=piece))
        assert cut["positions"]["count"] == whole["positions"]["count"]
        # float64 sums of about a hundred terms; the solver's answers differ by its tolerance of 1e-12.
        np.testing.assert_allclose(cut["positions"]["sum"], whole["positions"]["sum"], rtol=1e-9)
        assert cut["windows"]["document"] == whole["windows"]["document"]


def test_each_window_has_its_own_sum() -> None:
    record = evaluate(toy(("gla",)), toy_data(), config(length=8))
    windows = record["windows"]
    assert windows["document"] == [0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 4, 4]
    assert windows["start"] == [0, 0, 8, 16, 0, 0, 8, 0, 8, 16, 24, 32]
    assert windows["tokens"] == [7, 8, 8, 7, 1, 8, 8, 8, 8, 8, 8, 8]
    assert sum(windows["nll"]) == pytest.approx(sum(record["positions"]["sum"]), rel=1e-12)


def test_which_windows() -> None:
    data = toy_data()
    assert plan_windows(data, config(length=16, whole=True)).tokens.tolist() == [16] * 4
    assert plan_windows(data, config(at_least=17)).document.tolist() == [1, 4]
    some = plan_windows(data, config(length=16, max_tokens=50))
    assert int(some.tokens.sum()) == 50
    again = plan_windows(data, config(length=16, max_tokens=50))
    assert [part.tolist() for part in some] == [part.tolist() for part in again]
    with pytest.raises(UserError, match="the longest has 40 tokens"):
        plan_windows(data, config(at_least=41))
    # Whole windows are never cut: of 50 tokens there is room for three.
    assert plan_windows(data, config(length=16, whole=True, max_tokens=50)).tokens.tolist() == [16] * 3
    assert plan_windows(data, config(length=16, whole=True, max_tokens=16)).tokens.tolist() == [16]
    with pytest.raises(ValueError, match="max_tokens: got 15, fewer than a whole window of 16"):
        config(length=16, whole=True, max_tokens=15)


def test_solver_settings_are_tried_and_put_back() -> None:
    model, data = toy(), toy_data()
    before = [mixer.inference_solver for mixer in model.mixers()]
    exact = evaluate(model, data, config(), EXACT)
    none = evaluate(model, data, config(), SolverOverride(max_steps=0))
    two = evaluate(model, data, config(), SolverOverride(max_steps=2, tolerance=0.0))
    assert none["steps"]["mean"] == 0
    assert two["steps"]["mean"] == 2
    assert list(two["steps"]["by_layer_and_head"]) == ["0", "1"]
    assert two["solver"] == {"max_steps": 2, "tolerance": 0.0, "preconditioner": "auto"}
    assert 2 < exact["steps"]["mean"] <= 200
    assert none["summary"]["nll"] != exact["summary"]["nll"]
    assert [mixer.inference_solver for mixer in model.mixers()] == before
    assert all(mixer.observer is None for mixer in model.mixers())


def test_padding_is_not_counted_in_the_steps() -> None:
    model, data = toy(), toy_data()
    # The plain method takes as many steps for a token however the text is cut, where the other looks at whole chunks.
    solver = SolverOverride(tolerance=1e-3, preconditioner="none")
    together = evaluate(model, data, config(piece=1000), solver)
    apart = evaluate(model, data, config(piece=1), solver)
    assert together["summary"]["windows"] == apart["summary"]["windows"]
    # Sums of whole numbers: equal, unless a float64 residual were within its rounding of the tolerance.
    assert together["steps"] == apart["steps"]
    # Padding is BOS upon BOS, whose systems take other numbers of steps: counted, they would have moved the means.
    padding = len(SIZES) * max(SIZES) - sum(SIZES)
    assert padding > sum(SIZES)


def test_models_without_a_solver_refuse_its_options() -> None:
    with pytest.raises(UserError, match="no mesa layer"):
        evaluate(toy(("gla",)), toy_data(), config(), SolverOverride(max_steps=3))
    assert evaluate(toy(("gla",)), toy_data(), config())["steps"] is None


def test_mistakes_have_one_sentence() -> None:
    data = toy_data()
    with pytest.raises(UserError, match="vocabulary of 12"):
        evaluate(toy(), data._replace(vocabulary=12), config())
    damaged = toy(("gla",))
    with torch.no_grad():
        damaged.embedding.weight[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        evaluate(damaged, data, config())
    with pytest.raises(ValueError, match="length"):
        replace(config(), length=0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens": 30}, {"packed": True, "length": 16}, {"packed": True, "length": 8, "max_tokens": 24}],
)
def test_progress_reaches_the_total(settings: dict[str, object]) -> None:
    seen: list[tuple[int, int]] = []
    record = evaluate(
        toy(("gla",)), toy_data(), config(piece=8, **settings), tell=lambda done, total: seen.append((done, total))
    )
    done, totals = zip(*seen, strict=True)
    assert set(totals) == {done[-1]}
    assert list(done) == sorted(done)
    assert record["tokens_per_second"] == pytest.approx(record["summary"]["tokens"] / record["seconds"])


@pytest.mark.parametrize("mixer", ["mesa", "attention"])
@pytest.mark.parametrize(("length", "piece"), [(8, 64), (24, 5)])
def test_packed_windows_are_those_of_validation(mixer: str, length: int, piece: int) -> None:
    """Each window in one pass of the model, with no loss on BOS; positions count from its start."""
    model, data = toy((mixer,)), toy_data()
    record = evaluate(model, data, config(length=length, packed=True, piece=piece))
    packed = PackedSequences(EndToEnd(data.documents), BOS, length, 0, once=True)
    rows = torch.from_numpy(packed.sequences(np.arange(packed.epoch_sequences())))
    with torch.no_grad():
        logits, _ = model(rows[:, :-1])
    nll = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    counted = rows[:, 1:] != BOS
    assert not counted.all()
    positions = positions_of(record)
    np.testing.assert_array_equal(positions.counts, counted.sum(0))
    np.testing.assert_allclose(positions.sums, (nll * counted).sum(0), rtol=1e-6)
    assert record["summary"]["nll"] == pytest.approx(float(nll[counted].mean()), rel=1e-6)
    assert record["summary"]["tokens"] == sum(SIZES)
    assert record["data"]["documents"] is None
    few = evaluate(model, data, config(length=length, packed=True, max_tokens=2 * length + 1))
    assert few["summary"]["windows"] == 2


def test_packing_takes_every_document() -> None:
    with pytest.raises(ValueError, match="packed: takes documents of every length"):
        config(packed=True, whole=True)
