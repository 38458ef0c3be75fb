"""Files that are written whole or not at all, and the locks and checksums of folders that are written into.

Every writer here writes into a temporary file in the same folder, flushes it to the disk and then renames it over the
target, so that a crash at any moment leaves either the old file or the new one, never a part of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mesanet.errors import UserError

Shape = type[Any] | dict[str, Any] | list[Any] | tuple[Any, ...] | None
"""What plain data have to hold: a type, `object` for anything; a table with these entries at least; a list of one kind
of item; one of several shapes; or null."""


def write_atomic(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Path:
    """Let `write` fill a temporary file, then put it in the place of `path`; missing folders are created.

    If `write` raises, the old file stays as it was and nothing is left behind. A link is followed, not replaced.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read; the target gets what a plain open() would have given.
        temporary.chmod(_permissions(target))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return Path(path)


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write `data` as the whole of `path`, atomically."""
    return write_atomic(path, lambda file: file.write(data))


def write_text_atomic(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` in UTF-8 as the whole of `path`, atomically."""
    return write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2) -> Path:
    """Write `value` as JSON, atomically; NaN and infinity are refused because they are not JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return write_text_atomic(path, text + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; a UserError that names the file says where it is broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{os.fspath(path)} is not valid JSON: {error}") from error


def read_record(path: str | os.PathLike[str], shape: Shape) -> Any:
    """Read a JSON file that holds at least what `shape` says, or raise a UserError that names the file."""
    value = read_json(path)
    check_shape(path, value, shape)
    return value


def check_shape(place: str | os.PathLike[str], value: Any, shape: Shape) -> None:
    """Refuse plain data that lack something, or have something else in its place; the UserError names `place`."""
    problem = _misfit(value, shape, "")
    if problem is not None:
        raise UserError(f"{os.fspath(place)} is damaged: {problem}")


def _misfit(value: Any, shape: Shape, name: str) -> str | None:
    """What does not fit, in words; None where all does."""
    here = name or "it"
    if isinstance(shape, tuple):
        return None if any(_misfit(value, each, name) is None for each in shape) else f"{here} is {_kind(value)}"
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{here} is {_kind(value)} instead of a table"
        absent = next((key for key in shape if key not in value), None)
        if absent is not None:
            return f"{here} has no {absent!r}"
        parts = ((value[key], inner, f"{name}.{key}" if name else key) for key, inner in shape.items())
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{here} is {_kind(value)} instead of a list"
        parts = ((item, shape[0], f"{name}[{number}]") for number, item in enumerate(value))
    else:
        return None if _is_a(value, shape) else f"{here} is {_kind(value)}"
    return next(filter(None, (_misfit(*part) for part in parts)), None)


def _is_a(value: Any, kind: type[Any] | None) -> bool:
    """Whether it is of this type; a whole number is a float, and true is no number."""
    if kind is None:
        return value is None
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, (int, float) if kind is float else kind)


def _kind(value: Any) -> str:
    return {"dict": "a table", "list": "a list", "str": "a text", "NoneType": "null", "bool": "true or false"}.get(
        type(value).__name__, "a number"
    )


def read_json_lines(path: str | os.PathLike[str], shape: Shape) -> Iterator[Any]:
    """Give what the lines of a file hold, but for a last line that a crash has cut off; nothing without a file.

    A UserError names the file and the line that is no JSON, or lacks something of `shape`.
    """
    if not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            place = f"{os.fspath(path)}, line {number}"
            try:
                # Left to itself, the parser would take zeros at the start for another encoding.
                value = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise UserError(f"{place} is damaged: {error}") from error
            check_shape(place, value, shape)
            yield value


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's entries to the disk, so that a rename in it survives a power cut (POSIX only)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, read a little at a time."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, busy: str, *, remove: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, or raise UserError with the text `busy` where another process holds it.

    The lock goes with the process, however that ends. With `remove` the file goes as well, before the lock does.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such locks, and goes without
        yield
        return
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(busy) from error
        # Who held it may have removed the file in between: then this lock is on a file that nobody else can find.
        if _is_same_file(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        if remove:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _permissions(target: Path) -> int:
    """The existing file's permissions, or those that a new file gets."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
