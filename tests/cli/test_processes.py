"""Of several processes the first one speaks for all, but never for a mistake that it has not met."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from tests.training.test_distributed import free_port
from tests.training.tiny import prepare_tiny, start, tiny_run

from mesanet.cli import main
from mesanet.cli.dispatch import report_errors
from mesanet.cli.processes import is_first, only_first_speaks
from mesanet.config.base import to_json
from mesanet.errors import UserError
from mesanet.training.told import told


def raised_by(rank: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises((SystemExit, Exception)) as caught, only_first_speaks():
        raise error
    return caught.value


@pytest.mark.parametrize("error", [UserError("no room"), OSError("no room")], ids=["mistake", "system"])
def test_what_one_process_alone_has_met_is_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = raised_by("3", error, monkeypatch)
    assert isinstance(ended, SystemExit)
    assert ended.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("mesanet: process 3 on ")
    assert shown.endswith(": no room\n")


def test_what_the_first_one_says_is_not_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = raised_by("1", told(UserError("full")), monkeypatch)
    assert isinstance(ended, SystemExit)
    assert ended.code == 2
    assert isinstance(raised_by("0", told(UserError("full")), monkeypatch), UserError)
    assert isinstance(raised_by("1", ZeroDivisionError(), monkeypatch), ZeroDivisionError)
    assert capsys.readouterr().err == ""


def test_a_process_that_is_alone_speaks_whatever_its_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers set ranks for jobs of one process, too; what counts is how many there are, as in training."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert is_first()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert is_first()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not is_first()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_of_an_interrupted_run_says_so_with_its_code(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: list[str]) -> None:
        with only_first_speaks():
            raise KeyboardInterrupt

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        report_errors(interrupted, [])
    assert ended.value.code == 130


def second_process(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the second of two processes says on its way out."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "demmo"],
        ["train", "demo", "--training.step", "3"],
        ["train", "demo", "--training.device", "cpu"],
        ["compare", "demo", "--mixers", "mezza"],
        ["compare", "demo"],
        ["sweep", "demo", "--model.mixers", "gla"],
    ],
    ids=" ".join,
)
def test_a_mistyped_command_is_told_by_the_first_alone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert second_process(words, monkeypatch, capsys) == ""


def test_a_file_that_one_host_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = second_process(["train", "--config", str(tmp_path / "run.json")], monkeypatch, capsys)
    assert "process 1" in shown
    assert "run.json: no such file" in shown


def lose_data_in_the_second_process(folder: Path) -> None:
    """As on a host that has another disk."""
    rank = os.environ["RANK"]
    (folder / "elsewhere").mkdir(exist_ok=True)
    os.chdir(folder if rank == "0" else folder / "elsewhere")
    with (folder / f"{rank}.txt").open("w") as file, redirect_stderr(file), pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(folder / "run.json"), "--out", str(folder / "run")])
    assert ended.value.code == 2


@pytest.mark.timeout(120)
def test_data_that_one_host_lacks_are_named_by_its_process(tmp_path: Path) -> None:
    """The first process has its data and waits for the other; a launcher ends it, and this test does."""
    prepare_tiny(tmp_path)
    (tmp_path / "run.json").write_text(to_json(tiny_run(Path("data"), parallel="ddp")))
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        start(lose_data_in_the_second_process, tmp_path, environment={**shared, "RANK": str(rank)}) for rank in (0, 1)
    ]
    processes[1].join()
    assert processes[1].exitcode == 0
    processes[0].kill()
    processes[0].join()
    shown = (tmp_path / "1.txt").read_text()
    assert "process 1 on " in shown
    assert "data is no prepared data" in shown
