"""From a command line to its function, its message and its exit code."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesanet.cli import COMMANDS, main
from mesanet.cli.dispatch import Command, dispatch, parse, report_errors
from mesanet.errors import UserError
from mesanet.optional import import_optional


@dataclass(frozen=True, kw_only=True)
class Options:
    """Head of the help."""

    size: int = 4
    """How large."""
    names: tuple[str, ...] = ("a",)
    """Which ones."""


def mesanet(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mesanet", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment or None)


def exit_code(run: Callable[[], object]) -> object:
    with pytest.raises(SystemExit) as caught:
        run()
    return caught.value.code


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], []])
def test_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: main(words)) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and command.summary in shown for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(COMMANDS[name].module).run)
    assert exit_code(lambda: main([name, "--help"])) == 0
    assert f"mesanet {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: main(["--version"])) == 0
    assert capsys.readouterr().out.startswith("mesanet 0.")


def test_a_misspelt_command_is_one_sentence_and_code_2() -> None:
    result = mesanet("bnech", "op")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.strip().count("\n") == 0
    assert "'bnech'" in result.stderr
    assert "did you mean 'bench'?" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            ValueError("width: got -3, expected a positive number"),
            2,
            "mesanet: width: got -3, expected a positive number",
        ),
        (UserError("the folder is not empty; choose another"), 2, "the folder is not empty; choose another"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "mesanet: x.json: no such file or directory"),
        (PermissionError(13, "Permission denied", "x.json"), 2, "mesanet: x.json: permission denied"),
        (ValueError(), 2, "mesanet: ValueError"),
        (KeyboardInterrupt(), 130, "mesanet: interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: list[str]) -> None:
        raise error

    assert exit_code(lambda: report_errors(run, [])) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_traceback_is_there_for_those_who_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: list[str]) -> None:
        raise ValueError("no good")

    monkeypatch.setenv("MESANET_DEBUG", "1")
    assert exit_code(lambda: report_errors(run, [])) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    def run(_: list[str]) -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        report_errors(run, [])


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from mesanet.cli.dispatch import report_errors; report_errors(lambda _: print('x' * 10**6), [])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_words_after_the_command_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_command.py").write_text("def run(arguments):\n    raise ValueError(' '.join(arguments))\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^a --b c$"):
        dispatch(["echo", "a", "--b", "c"], {"echo": Command("echo_command", "repeat")}, program="x")


def test_parse_reads_options_into_the_dataclass() -> None:
    assert parse(Options, [], program="x") == Options()
    assert parse(Options, ["--size", "5", "--names", "b", "c"], program="x") == Options(size=5, names=("b", "c"))


def test_help_shows_docstrings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: parse(Options, ["--help"], program="mesanet example")) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("mesanet example", "Head of the help", "How large", "default: 4"))


@pytest.mark.parametrize("words", [["--sise", "5"], ["--size", "x"], ["--size"], ["stray"]])
def test_bad_options_are_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: parse(Options, words, program="mesanet example")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err != ""


def test_a_missing_extra_says_how_to_install_it() -> None:
    with pytest.raises(UserError, match=r"nonsense is needed .* pip install 'mesanet\[report\]'"):
        import_optional("nonsense.pyplot", "report")
    assert import_optional("json.decoder", "report").JSONDecodeError


def test_a_broken_package_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import something_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_missing"):
        import_optional("broken_package", "report")
