from __future__ import annotations

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tiny import assert_same_weights, losses, metrics, start, tiny_run

from mesanet import __version__
from mesanet.config.base import from_json
from mesanet.config.training import RunConfig
from mesanet.data.dataset import open_dataset
from mesanet.data.loader import make_batches
from mesanet.errors import UserError
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import find_model, load_model
from mesanet.training.distributed import Processes
from mesanet.training.loop import Trainer
from mesanet.training.metrics import read_metrics
from mesanet.training.records import Records
from mesanet.training.run import read_result, train


def train_quietly(config: RunConfig, out: Path, resume: bool = False) -> None:
    train(config, out, resume=resume, quiet=True)


@pytest.fixture(scope="module")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("run") / "finished"
    train_quietly(tiny_run(tiny_data), out)
    return out


def test_a_run_leaves_everything_that_it_should(finished: Path, tiny_data: Path) -> None:
    assert from_json(RunConfig, (finished / "config.json").read_text()) == tiny_run(tiny_data)
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step_00000008", "step_00000012"]
    lines = metrics(finished)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 13))
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [6, 12]
    assert lines[-2]["tokens"] == 12 * 4 * 32
    assert losses(finished)[-1] < losses(finished)[0]
    model = load_model(finished / "model")
    assert_same_weights(finished / "model", finished / "checkpoints" / "step_00000012")
    assert_same_weights(finished / "model", find_model(finished))
    assert model.config == tiny_run(tiny_data).model


def test_one_seed_gives_one_run(finished: Path, tiny_data: Path, tmp_path: Path) -> None:
    train_quietly(tiny_run(tiny_data), tmp_path / "again")
    assert metrics(tmp_path / "again") == metrics(finished)
    assert_same_weights(tmp_path / "again" / "model", finished / "model")
    train_quietly(tiny_run(tiny_data, seed=1, steps=4), tmp_path / "other")
    assert losses(tmp_path / "other")[0] != losses(finished)[0]


def test_the_first_loss_is_the_mean_over_all_targets_but_bos(finished: Path, tiny_data: Path) -> None:
    """Computed here with a plain log-softmax, from the batch of step 0 and the seed's weights."""
    config = tiny_run(tiny_data)
    dataset = open_dataset(tiny_data)
    tokens, targets = map(torch.from_numpy, make_batches(dataset, config.data).batch(0))
    assert bool((tokens == dataset.bos).any()), "the batch has to hold a BOS for this test to mean something"
    assert bool((targets < 0).any())
    assert not bool((targets == dataset.bos).any())
    torch.manual_seed(config.training.seed)
    logits, _ = LanguageModel(config.model)(tokens)
    counted = targets >= 0
    each = -logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    # 128 float32 terms of about 6, each with a few roundings.
    assert losses(finished)[0] == pytest.approx(each[counted].mean().item(), abs=1e-5)


def test_the_validation_loss_is_that_of_the_held_out_text(tiny_data: Path, tmp_path: Path) -> None:
    """All of the held-out text is taken, and the mean is over its tokens whatever shape the batches have."""
    found = []
    for batch_size, accumulation in ((4, 1), (3, 1), (4, 4)):
        config = tiny_run(tiny_data, steps=1, warmup_steps=0, validation_tokens=None, accumulation=accumulation)
        alone = Processes(0, 1, torch.device("cpu"))
        changed = replace(config, data=replace(config.data, batch_size=batch_size))
        trainer = Trainer(changed, tmp_path, open_dataset(tiny_data), alone)
        trainer.step = 1
        from mesanet.training.signals import Stop

        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        with Records(tmp_path, 0, alone, tensorboard=False) as records:
            trainer._validate(records, Stop())
        found.append(metrics(tmp_path)[0])
    # Every token of the split is a target once, but for the first one of the stream, which is a BOS anyway.
    assert {line["predicted_tokens"] for line in found} == {open_dataset(tiny_data).validation.tokens}
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-6)
    assert found[0]["loss"] == pytest.approx(found[2]["loss"], abs=1e-6)
    assert found[0]["perplexity"] == pytest.approx(math.exp(found[0]["loss"]))


@pytest.mark.parametrize(
    "settings", [{"accumulation": 2}, {"accumulation": 3}, {"activation_checkpointing": True}], ids=str
)
def test_saving_memory_changes_nothing(tiny_data: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """In float64, as float32 would round differently: the whole curve is the same."""
    for name, changed in (("plain", {}), ("saving", settings)):
        config = tiny_run(tiny_data, mixers=("mesa", "gated_deltanet"), layers=2, **changed)
        train_quietly(replace(config, model=replace(config.model, dtype="float64")), tmp_path / name)
    assert losses(tmp_path / "saving") == pytest.approx(losses(tmp_path / "plain"), abs=1e-10)


def test_bfloat16_keeps_the_weights_in_float32(finished: Path, tiny_data: Path, tmp_path: Path) -> None:
    train_quietly(tiny_run(tiny_data, precision="bfloat16"), tmp_path / "run")
    assert {tensor.dtype for tensor in load_model(tmp_path / "run" / "model").state_dict().values()} == {torch.float32}
    assert losses(tmp_path / "run") != losses(finished)
    # A bfloat16 has 8 bits: single activations are wrong by up to 2^-9, and the loss of about 6 by well under 2^-5.
    assert losses(tmp_path / "run")[0] == pytest.approx(losses(finished)[0], abs=2**-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_and_the_run_goes_on_bit_for_bit(
    finished: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config = tiny_run(tiny_data)
    write = Records.write

    def write_then_signal(records: Records, record: dict[str, object]) -> None:
        write(records, record)
        if record["step"] == 5:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Records, "write", write_then_signal)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train_quietly(config, tmp_path / "run")
    assert signal.getsignal(number) is before
    assert (tmp_path / "run" / "checkpoints" / "step_00000005").is_dir()
    assert not (tmp_path / "run" / "model").exists()
    monkeypatch.undo()
    train_quietly(config, tmp_path / "run", resume=True)
    assert_same_weights(tmp_path / "run" / "model", finished / "model")
    assert metrics(tmp_path / "run") == metrics(finished)


def test_a_signal_before_the_first_step_promises_nothing(
    finished: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go = Trainer.run

    def signal_then_go(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        go(*arguments)

    monkeypatch.setattr(Trainer, "run", signal_then_go)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(tiny_data), tmp_path / "run")
    assert "stopped before the first step; go on with --resume" in capsys.readouterr().err
    assert not any((tmp_path / "run" / "checkpoints").iterdir())
    monkeypatch.undo()
    train_quietly(tiny_run(tiny_data), tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(finished)


def test_a_validation_that_was_broken_off_is_made_up_for(
    finished: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when step 6 is recorded, in front of its validation."""
    config = tiny_run(tiny_data)
    write = Records.write

    def write_then_signal(records: Records, record: dict[str, object]) -> None:
        write(records, record)
        if record["step"] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Records, "write", write_then_signal)
    with pytest.raises(KeyboardInterrupt):
        train_quietly(config, tmp_path / "run")
    assert losses(tmp_path / "run", "validation") == []
    monkeypatch.undo()
    train_quietly(config, tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(finished)


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_a_signal_after_the_last_update_leaves_too_and_no_validation_is_lost(
    finished: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It comes in front of the last validation, or behind it."""
    config = tiny_run(tiny_data)
    write = Records.write

    def write_then_signal(records: Records, record: dict[str, object]) -> None:
        write(records, record)
        if record["step"] == 12 and record["kind"] == kind:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Records, "write", write_then_signal)
    with pytest.raises(KeyboardInterrupt):
        train_quietly(config, tmp_path / "run")
    monkeypatch.undo()
    assert not (tmp_path / "run" / "model").exists(), "a run with a model is one that is finished"
    result = train(config, tmp_path / "run", resume=True, quiet=True)
    assert metrics(tmp_path / "run") == metrics(finished)
    assert result.validation_loss == losses(finished, "validation")[-1]
    assert_same_weights(tmp_path / "run" / "model", finished / "model")


def test_a_validation_of_an_earlier_step_is_not_the_result(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "metrics.jsonl", tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    result = read_result(tmp_path)
    assert (result.steps, result.loss, result.validation_loss) == (12, losses(finished)[-1], None)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_another_config_is_refused_and_nothing_is_touched(finished: Path, tiny_data: Path) -> None:
    before = snapshot(finished)
    for resume in (False, True):
        with pytest.raises(UserError, match=r"another config: training.peak_learning_rate is 0.01 there and 0.02 here"):
            train_quietly(tiny_run(tiny_data, peak_learning_rate=0.02), finished, resume)
        with pytest.raises(UserError, match=r"another config: model.mixers is \['mesa'\] there and \['gla'\] here"):
            train_quietly(tiny_run(tiny_data, mixers=("gla",)), finished, resume)
    with pytest.raises(UserError, match=r"already holds this run, which is finished; add --resume"):
        train_quietly(tiny_run(tiny_data), finished)
    assert snapshot(finished) == before


def test_a_finished_run_is_left_as_it_is(finished: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that change how it is computed, but not what, may differ."""
    before = snapshot(finished)
    facts = json.loads((finished / "run.json").read_text())
    monkeypatch.setattr("mesanet.training.run_folder.__version__", "another")
    result = train(tiny_run(tiny_data, checkpoint_interval=5, keep=9), finished, resume=True, quiet=True)
    assert result.steps == 12
    assert result.loss == losses(finished)[-1]
    assert result.validation_loss == losses(finished, "validation")[-1]
    assert snapshot(finished) == before
    assert facts["mesanet"] == __version__


def test_other_data_in_the_same_place_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    train_quietly(tiny_run(tiny_data, steps=4), tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**facts, "data": "other"}))
    with pytest.raises(UserError, match="no longer holds the data"):
        train_quietly(tiny_run(tiny_data, steps=4), tmp_path / "run", resume=True)


@pytest.mark.parametrize("content", ["[1]", "{}", "{", '{"data": 3}'])
@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_a_run_folder_with_a_damaged_file_is_refused_by_its_name(
    tiny_data: Path, tmp_path: Path, name: str, content: str
) -> None:
    run = tmp_path / "run"
    config = tiny_run(tiny_data, steps=4)
    train_quietly(config, run)
    (run / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is (damaged|not)|another config"):
        train_quietly(config, run, resume=True)
    assert (run / name).read_text() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": 256}, r"model.vocabulary: got 256, but the tokenizer of .* has 257 tokens"),
        ({"sequence_length": 10**6}, "sequence_length 1000000 is longer than the train split"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    tiny_data: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    config = tiny_run(tiny_data)
    for part in ("model", "data"):
        known = {name: value for name, value in change.items() if hasattr(getattr(config, part), name)}
        config = replace(config, **{part: replace(getattr(config, part), **known)})
    with pytest.raises(UserError, match=message):
        train_quietly(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_way_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file is a file; choose another folder with --out"):
        train_quietly(tiny_run(tiny_data), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "run.json", "tokenizer.json", "model/x", "tensorboard/x", "checkpoints/x", "checkpoints"],
)
def test_what_a_run_would_write_over_is_refused_where_no_config_says_whose_it_is(
    tiny_data: Path, tmp_path: Path, name: str, resume: bool
) -> None:
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=rf"run holds {name.partition('/')[0]}, but no config.json"):
        train_quietly(tiny_run(tiny_data), tmp_path / "run", resume)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "run" / "config.json").exists()


def test_folders_without_anything_in_them_are_not_a_run(tiny_data: Path, tmp_path: Path) -> None:
    """A lock, and a folder for checkpoints that somebody has made."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".lock").touch()
    train_quietly(tiny_run(tiny_data, steps=4), tmp_path, resume=True)
    assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\0" * 20, "Expecting value"),
        (b"\0\0\0{", "Expecting value"),
        (b"\xff\xfe{}", "codec can't decode"),
        (b'{"kind": "train"}', "it has no 'step'"),
        (b'{"kind": "train", "step": 2, "tokens": 9}', "it has no 'loss'"),
        (b'{"step": 2, "tokens": 9, "loss": 1.5}', "it has no 'kind'"),
        (b'{"kind": "train", "step": "2", "tokens": 9, "loss": 1.5}', "step is a text"),
        (b"[1]", "it is a list instead of a table"),
    ],
)
def test_a_damaged_line_of_the_metrics_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first, third = ({"kind": "train", "step": step, "tokens": 9 * step, "loss": 1.5} for step in (1, 3))
    whole = [json.dumps(record).encode() for record in (first, third)]
    path.write_bytes(b"\n".join([whole[0], line, whole[1], b'{"st']))
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line 2 is damaged: .*{problem}"):
        list(read_metrics(path))
    path.write_bytes(b"\n".join([*whole, b'{"st']))
    assert list(read_metrics(path)) == [first, third]


@pytest.mark.parametrize(("place", "cut"), [(8, False), (9, True), (10, True), (11, True)])
def test_damage_behind_the_checkpoint_is_cut_off(
    finished: Path, tiny_data: Path, tmp_path: Path, place: int, cut: bool
) -> None:
    """Lines 1 to 9 are of the steps up to 8, which the checkpoint follows; a power cut may leave zeros after them."""
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[8])["step"] == 8
    lines[place] = b"\0" * len(lines[place][1:]) + b"\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    before = (run / "metrics.jsonl").read_bytes()
    if cut:
        train_quietly(tiny_run(tiny_data), run, resume=True)
        assert metrics(run) == metrics(finished)
        assert_same_weights(run / "model", finished / "model")
    else:
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 9 is damaged"):
            train_quietly(tiny_run(tiny_data), run, resume=True)
        assert (run / "metrics.jsonl").read_bytes() == before


def test_two_processes_do_not_train_in_one_folder(tiny_data: Path, tmp_path: Path) -> None:
    from mesanet.training.run_folder import locked

    with locked(tmp_path), pytest.raises(UserError, match="another process is training in"):
        train_quietly(tiny_run(tiny_data), tmp_path)


def test_tensorboard_gets_the_same_numbers(tiny_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    process = start(train_quietly, tiny_run(tiny_data, tensorboard=True), tmp_path / "run")
    process.join()
    assert process.exitcode == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = [event.value for event in events.Scalars("train/loss")]
    # TensorBoard keeps float32.
    assert shown == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
