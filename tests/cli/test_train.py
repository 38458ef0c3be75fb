from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesanet.cli import main
from mesanet.cli.train import parse_run
from mesanet.config.base import to_json
from mesanet.config.sweep import SweepConfig
from mesanet.config.training import RunConfig, default_out
from mesanet.errors import UserError
from mesanet.training.presets import RUNS, paper, run_preset
from mesanet.training.sweep import Trial


def test_a_preset_alone_is_the_preset() -> None:
    for name in RUNS:
        options, config = parse_run([name, "--mixers", "hawk-mesa"])
        assert config == run_preset(name, "hawk-mesa")
        assert options.out is None
        assert default_out(options.preset, config) == Path("runs") / f"{name}-hawk-mesa"


def test_a_sliding_window_sees_a_part_of_the_sequence_only() -> None:
    for name in RUNS:
        run = run_preset(name, "sliding_window")
        assert run.model.window <= run.data.sequence_length // 2
        if name in ("demo", "laptop"):
            assert run.model.window == run.data.sequence_length // 4


def test_options_change_what_they_name_and_nothing_else() -> None:
    _, config = parse_run(["medium-50b", "--mixers=gla", "--training.steps", "30000", "--model.layers", "3"])
    base = paper("medium", 50, "gla")
    assert (config.training.steps, config.training.tokens) == (30000, None)
    assert config.model.layers == 3
    assert config.training.peak_learning_rate == base.training.peak_learning_rate
    assert config.data == base.data
    _, config = parse_run(["demo", "--training.tokens", "1000000"])
    assert (config.training.steps, config.training.tokens) == (None, 1_000_000)
    _, config = parse_run(["laptop", "--training.steps", "8", "--training.warmup-steps", "1"])
    assert (config.training.steps, config.training.warmup_steps) == (8, 1)


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--mixers", "gla", "--training.steps", "50", "--resume"],
        ["--mixers", "gla", "demo", "--training.steps", "50", "--resume"],
        ["--resume", "--training.steps=50", "--mixers=gla", "demo"],
    ],
)
def test_options_stand_before_or_behind_the_preset(words: list[str]) -> None:
    options, config = parse_run(words)
    base = run_preset("demo", "gla")
    assert options.resume
    assert config == replace(base, training=replace(base.training, steps=50))


def test_help_shows_the_presets_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help", "--training.tokens", "4000000000", "medium-50b", "--mixers", "hawk"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "default: 4000000000" in shown
    assert f"default: {paper('medium', 50, 'hawk').training.peak_learning_rate}" in shown


def test_a_sweep_takes_its_preset_in_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, RunConfig]] = []

    def note(config: SweepConfig, base: Callable[[str], RunConfig]) -> list[Trial]:
        seen.append((config.mixers, base("gla")))
        return [Trial(mixers="gla", learning_rate=0.1, loss=1.0, out="")]

    monkeypatch.setattr("mesanet.training.sweep.sweep", note)
    for words in (["demo", "--training.tokens", "400000"], ["--training.tokens", "400000", "demo"]):
        with pytest.raises(SystemExit) as ended:
            main(["sweep", *words])
        assert ended.value.code == 0
    assert seen[0] == seen[1]
    assert (seen[0][1].training.steps, seen[0][1].training.tokens) == (None, 400_000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--model.mixers", "gla"], "name the mixers with --mixers"),
        (["demo", "--training.peak-learning-rate", "0.1"], "name the rates with --learning-rates"),
        (["demo", "--mixers", "gla,mezza", "--out", "x"], "did you mean 'mesa'"),
        (["demo", "--mixers", ",", "--out", "x"], "mixers: got none"),
    ],
)
def test_options_that_a_sweep_would_not_heed_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_says_what_a_run_folder_says(tmp_path: Path) -> None:
    config = run_preset("demo", "gla")
    (tmp_path / "config.json").write_text(to_json(config))
    _, same = parse_run(["--config", str(tmp_path / "config.json")])
    assert same == config
    _, other = parse_run(["--config", str(tmp_path / "config.json"), "--training.seed", "3"])
    assert isinstance(other, RunConfig)
    assert other.training.seed == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a preset"),
        (["demmo"], "did you mean 'demo'"),
        (["demo", "--mixers", "mezza"], "did you mean 'mesa'"),
        (["demo", "--config", "x.json"], "name one of the two"),
        (["demo", "--training.steps", "5"], "training.warmup_steps: got"),
        (["--training.warmup-steps", "3", "demmo"], "did you mean 'demo'"),
        (["demo", "--training.step", "5"], "there is no option --training.step; did you mean --training.steps?"),
        (["demo", "--training.steps", "50", "--training.tokens", "5"], "expected exactly one of the two"),
        (["demo", "laptop"], "'laptop' is one word too many"),
        (["small-15b", "--model.mixers", "gla"], "name the mixers with --mixers"),
        (["small-15b", "--model.dtype", "float16"], "model.dtype: got 'float16'"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "can't decode"),
        (b"{", "is not valid JSON"),
        (b"[1]", "expected a table"),
        (b'{"data": {"path": 3}, "training": {"steps": 1}}', "data.path: got 3"),
    ],
)
def test_a_config_that_is_none_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"run\.json: .*{says}"):
        parse_run(["--config", str(tmp_path / "run.json")])


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises((UserError, FileNotFoundError), match=r"nothing\.json"):
        parse_run(["--config", str(tmp_path / "nothing.json")])
