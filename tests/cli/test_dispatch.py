"""From a command line to its function, its message and its exit code."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from tyro.conf import Positional

from mesanet.cli import COMMANDS, main
from mesanet.cli.dispatch import Command, dispatch, parse, report_errors, scan
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
        (OSError(28, "No space left on device", "/a/b"), 2, "mesanet: the disk is full at /a/b: make room and give"),
        (OSError(122, "Disk quota exceeded"), 2, "mesanet: the disk is full: make room and give the command again"),
        (OSError(30, "Read-only file system", "x"), 2, "mesanet: x: read-only file system"),
        (ConnectionResetError(104, "Connection reset by peer"), 2, "mesanet: the connection failed ([Errno 104] Conn"),
        (TimeoutError("no answer\nin 10 s"), 2, "mesanet: the connection failed (no answer in 10 s): give the command"),
        (type("ConnectError", (Exception,), {"__module__": "httpx"})("no"), 2, "mesanet: the connection failed (no)"),
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


@dataclass(frozen=True, kw_only=True)
class Detailed(Options):
    """Head of the help."""

    source: Positional[Path]
    """Where it comes from."""
    length: int | None = None
    """How long."""
    kind: Literal["round", "square"] = "round"
    """Its shape."""
    inner: Options
    """More of the same."""


HELP = "`mesanet example --help` shows all options"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--sise", "5"], "there is no option --sise; did you mean --size?"),
        (["x", "--inner.nmes", "5"], "there is no option --inner.nmes; did you mean --inner.names?"),
        (["x", "--size", "y"], f"error parsing --size: invalid literal for int() with base 10: 'y'; {HELP}"),
        (["x", "--length", "y"], f"--length: got 'y', expected {{None}}|INT; {HELP}"),
        (["x", "--size"], f"--size needs a value; {HELP}"),
        (["x", "stray"], f"'stray' is one word too many; {HELP}"),
        (["--size", "5"], f"PATH is missing; {HELP}"),
        (
            ["x", "--kind", "oval"],
            f"invalid choice 'oval' for argument '--kind'. Expected one of ('round', 'square'); {HELP}",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_bad_option_is_one_sentence_and_code_2(
    words: list[str], message: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    def run(arguments: list[str]) -> None:
        parse(Detailed, arguments, program="mesanet example")

    assert exit_code(lambda: report_errors(run, words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"mesanet: {message}\n"


def test_scan_tells_what_is_given_wherever_it_stands_and_checks_nothing_else() -> None:
    given = scan(Refusing, ["--inner.size", "5", "--help", "x", "--inner.names=c"], program="mesanet example")
    assert (given.source, given.size, given.inner.size, given.inner.names) == (Path("x"), None, 5, ("c",))
    assert scan(Refusing, [], program="mesanet example").source is None


@dataclass(frozen=True, kw_only=True)
class Refusing(Detailed):
    """A config that no values please."""

    def __post_init__(self) -> None:
        raise ValueError("no")


def test_a_missing_extra_says_how_to_install_it() -> None:
    with pytest.raises(UserError, match=r"nonsense is needed .* pip install 'mesanet\[report\]'"):
        import_optional("nonsense.pyplot", "report")
    assert import_optional("json.decoder", "report").JSONDecodeError


def test_a_broken_package_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import something_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_missing"):
        import_optional("broken_package", "report")
