"""`mesanet bench model` from the command line to the record and the figure, on sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mesanet.bench.costs import model_cost
from mesanet.bench.model import Decoder, ModelBenchmark, build_models, run_model_benchmark, shared_parameters
from mesanet.cli import main
from mesanet.mixers import MIXERS
from mesanet.model.parameters import count_parameters

SMALL = ["--preset", "mad", "--repeats", "2", "--tokens", "3"]


def bench(*words: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "model", *words])
    return caught.value.code


def test_record_tables_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--batch", "1", "2", "--lengths", "24", str(2**40), "--context", "16", "40"]
    words = [*SMALL, *lengths, "--mixers", "mesa", "hawk-mesa", "--max-steps", "4", "--out", str(tmp_path)]
    assert bench(*words) == 0
    record = json.loads((tmp_path / "model.json").read_text())
    names = ["attention", "mesa", "hawk-mesa"]
    places = [(row["batch"], row["length"]) for row in record["training"] if "skipped" not in row]
    assert places == [(1, 24), (2, 24)]
    assert [row["length"] for row in record["training"] if "memory" in row.get("skipped", "")] == [2**40, 2**40]
    assert [(row["batch"], row["length"]) for row in record["generation"]] == [(1, 16), (1, 40), (2, 16), (2, 40)]
    for row in (*(row for row in record["training"] if "skipped" not in row), *record["generation"]):
        assert list(row["tokens_per_second"]) == names
        tokens = row["batch"] * (3 if row in record["generation"] else row["length"])
        for name in names:
            assert len(row["seconds"][name]) == 2
            assert row["tokens_per_second"][name] == pytest.approx(tokens / min(row["seconds"][name]))
        assert row["to_attention"]["attention"] == 1
    for row in record["generation"]:
        assert [len(row["solver_steps_by_layer"][name]) for name in ("mesa", "hawk-mesa")] == [2, 1]
    assert {(row["mixers"], row["position"]) for row in record["costs"]} == {(n, t) for n in names for t in (16, 40)}
    assert all(row["steps"] == 4 for row in record["costs"])
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for text in ("Training step", "Generation", "Cost of a token", "skipped"):
        assert text in shown


def test_costs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No lengths: nothing is built or timed, however large the model."""
    options = ModelBenchmark(preset="large", lengths=(), context=(), mixers=("mesa",), out=tmp_path)
    assert run_model_benchmark(options)["costs"] == [
        model_cost(options.config(name), 2048).record() for name in ("attention", "mesa")
    ]
    assert "Cost of a token" in capsys.readouterr().out
    assert not (tmp_path / "model.png").exists()


def test_the_sizes_of_the_preset_can_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"width": 32, "layers": 3, "heads": 2, "key_size": 4, "vocabulary": 40}
    words = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    lengths = ["--lengths", "8", "--context"]
    assert bench(*SMALL, *words, *lengths, "--mixers", "mesa", "--out", str(tmp_path)) == 0
    record = json.loads((tmp_path / "model.json").read_text())
    options = ModelBenchmark(preset="mad", mixers=("mesa",), **sizes)
    for pattern in ("attention", "mesa"):
        config = options.config(pattern)
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert config.mlp_width == 96
        assert model_cost(config, 8).record() in record["costs"]
    assert list(record["training"][0]["tokens_per_second"]) == ["attention", "mesa"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "mad, width 32, layers 3, heads 2, key size 4, vocabulary 40" in shown


def test_every_mixer_but_the_sequential_one_is_measured_by_default() -> None:
    assert set(ModelBenchmark().patterns) == set(MIXERS) - {"mesa_rls"}


def test_models_share_all_but_their_mixers() -> None:
    options = ModelBenchmark(preset="mad", mixers=("mesa", "gla"))
    models = build_models(options, torch.device("cpu"))
    for name, model in models.items():
        assert sum(p.numel() for p in model.parameters()) == count_parameters(options.config(name))
        assert model.mixers()[0] is models[name].blocks[0].mixer
    mixers = sum(p.numel() for model in models.values() for mixer in model.mixers() for p in mixer.parameters())
    attention = models["attention"]
    rest = sum(p.numel() for p in attention.parameters()) - sum(
        p.numel() for mixer in attention.mixers() for p in mixer.parameters()
    )
    assert sum(p.numel() for p in shared_parameters(models)) == mixers + rest


def test_generation_is_that_of_the_model() -> None:
    """The decoder's tokens are those that the model chooses when it reads the whole text at once."""
    models = build_models(ModelBenchmark(preset="mad", mixers=("gla",)), torch.device("cpu"))
    context = torch.randint(16, (2, 20), generator=torch.Generator().manual_seed(0))
    for model in models.values():
        decoder = Decoder(model.eval(), context)
        text = torch.cat([context, decoder.tokens], dim=1)
        decoder.advance(1)
        with torch.no_grad():
            logits, _ = model(text)
        assert torch.equal(decoder.tokens[:, 0], logits[:, -1].argmax(-1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "abacus"], "preset"),
        (["--mixers", "gla", "abacus"], "abacus"),
        (["--batch", "0"], "batch[0]"),
        (["--context", "0"], "context[0]"),
        (["--max-steps", "-1"], "max_steps"),
        (["--width", "0"], "width: got 0"),
        (["--vocabulary", "-1"], "vocabulary: got -1"),
        (["--key-size", "7"], "key_size: got 7, expected an even number"),
        (["--device", "abacus"], "device"),
    ],
)
def test_bad_options_are_code_2_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert bench(*words, "--out", str(out)) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
