"""Preparing: what comes out depends on the documents and the options, and on nothing else."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.data.conftest import config, contents, make_texts, write_lines
from tests.data.stopping import StoppedError, stop_after

from mesanet.data import open_dataset, prepare
from mesanet.errors import UserError


def _wanted(texts: list[str]) -> list[str]:
    """Each text once, in order, without the empty one."""
    return list(dict.fromkeys(text for text in texts if text))


def _documents(folder: Path) -> dict[str, list[str]]:
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    return {
        split.name: [tokenizer.decode(split[i]) for i in range(len(split))]
        for split in (dataset.train, dataset.validation)
    }


def test_documents_come_out_once_in_order_and_split(prepared: Path, texts: list[str]) -> None:
    index = json.loads((prepared / "index.json").read_text())
    found = _documents(prepared)
    wanted = _wanted(texts)
    assert index["counts"] == {
        "documents": len(wanted),
        "duplicates": 2,
        "empty": 1,
        "bytes": sum(len(text.encode()) for text in wanted),
    }
    assert len(index["splits"]["train"]["shards"]) > 1
    for documents in found.values():
        assert documents == [text for text in wanted if text in set(documents)]
    assert sorted(found["train"] + found["validation"]) == sorted(wanted)
    # A fifth of 200 is 40, with a standard deviation of 5.7.
    assert abs(len(found["validation"]) - 40) < 6 * 5.7


def test_nothing_but_the_result_is_left(prepared: Path) -> None:
    names = {path.name for path in prepared.iterdir()} - {"verified.json"}
    index = json.loads((prepared / "index.json").read_text())
    shards = {shard["file"] for split in index["splits"].values() for shard in split["shards"]}
    assert names == shards | {"index.json", "train.documents", "validation.documents"}


def _jsonl(folder: Path, texts: list[str]) -> Path:
    return write_lines(folder / "data.jsonl", texts)


def _gz(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress(_jsonl(folder / "..", texts).read_bytes()))
    return path


def _zst(folder: Path, texts: list[str]) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path = folder / "data.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(_jsonl(folder / "..", texts).read_bytes()))
    return path


def _parquet(folder: Path, texts: list[str]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), "text": [text or None for text in texts]})
    parquet.write_table(table, folder / "data.parquet", row_group_size=37)
    return folder / "data.parquet"


def _categories(folder: Path, texts: list[str]) -> Path:
    """Parquet that holds each different string once, as a table of categories is written."""
    path = _parquet(folder, texts)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    parquet.write_table(table.set_column(1, "text", table["text"].dictionary_encode()), path, row_group_size=37)
    assert "dictionary" in str(parquet.read_schema(path).field("text").type)
    return path


def _separated(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.txt"
    path.write_text("<|endoftext|>".join(text.strip("\r\n") for text in texts), encoding="utf-8", newline="")
    return path


def _files(folder: Path, texts: list[str]) -> Path:
    for i, text in enumerate(texts):
        (folder / f"{i:05}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


def _hub(folder: Path, texts: list[str]) -> str:
    """A folder that the hub's own library streams: the same way in as for a data set by name."""
    pytest.importorskip("datasets")
    for part in range(3):
        (folder / f"train-{part}.jsonl.gz").write_bytes(
            gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts[part::3]))
        )
    return f"hub:{folder}"


@pytest.mark.parametrize("write", [_jsonl, _gz, _zst, _parquet, _categories, _separated, _files, _hub])
def test_every_format_gives_the_same_documents(tmp_path: Path, write: Callable[[Path, list[str]], Path | str]) -> None:
    texts = [text.strip("\r\n") for text in make_texts(60)]
    (tmp_path / "source").mkdir()
    options = {"separator": "<|endoftext|>"} if write is _separated else {}
    source = write(tmp_path / "source", texts)
    prepare(config(source, out=tmp_path / "out", **options), quiet=True)
    expected = _wanted(texts)
    found = _documents(tmp_path / "out")
    assert sorted(found["train"] + found["validation"]) == sorted(expected)
    if write is not _hub:
        assert found["train"] == [text for text in expected if text in set(found["train"])]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(tmp_path: Path, texts: list[str], tokenizer: str, workers: int) -> None:
    source = write_lines(tmp_path / "data.jsonl", texts)
    options = {"tokenizer": tokenizer, "shard_tokens": 1500}
    prepare(config(source, out=tmp_path / "alone", **options), quiet=True)
    prepare(config(source, out=tmp_path / "together", workers=workers, **options), quiet=True)
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")


@pytest.mark.parametrize("write", [_jsonl, _gz, _zst, _parquet, _categories, _separated, _files, _hub])
def test_stopping_at_every_block_changes_nothing(
    tmp_path: Path, write: Callable[[Path, list[str]], Path | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt gets one block further than what is on record; small blocks make that many attempts."""
    monkeypatch.setattr("mesanet.data.streams.BLOCK", 400)
    monkeypatch.setattr("mesanet.data.hub.MEBIBYTE", 400)
    monkeypatch.setattr("mesanet.data.parquet.MEBIBYTE", 400)
    (tmp_path / "source").mkdir()
    source = write(tmp_path / "source", make_texts(40))
    options = {"shard_tokens": 300, **({"separator": "<|endoftext|>"} if write is _separated else {})}
    prepare(config(source, out=tmp_path / "whole", **options), quiet=True)
    finished = False
    attempts = 0
    while not finished:
        attempts += 1
        with monkeypatch.context() as patch:
            stop_after(patch, 5)
            try:
                prepare(config(source, out=tmp_path / "stopped", **options), quiet=True)
                finished = True
            except StoppedError:
                assert attempts < 200
    assert attempts > 2
    assert contents(tmp_path / "whole") == contents(tmp_path / "stopped")


def test_the_same_command_again_changes_nothing(tmp_path: Path, prepared: Path, texts: list[str]) -> None:
    source = write_lines(tmp_path / "texts.jsonl", texts)
    shutil.copytree(prepared, tmp_path / "out")
    before = contents(tmp_path / "out")
    prepare(config(source, out=tmp_path / "out", shard_tokens=5000), quiet=True)
    after = contents(tmp_path / "out")
    # It may note which files it has looked at.
    assert after.keys() - before.keys() <= {"verified.json"}
    assert {name: after[name] for name in before if name != "verified.json"} == {
        name: before[name] for name in before if name != "verified.json"
    }


@pytest.mark.parametrize("most", [1, 1500, 4000, 10_000_000])
def test_a_limit_of_tokens_ends_with_the_document_that_reaches_it(
    tmp_path: Path, texts: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of blocks, the workers and the interruptions."""
    source = write_lines(tmp_path / "texts.jsonl", texts)
    options: dict[str, object] = {"max_tokens": most, "shard_tokens": 1000, "validation_fraction": 0.2}
    index = prepare(config(source, out=tmp_path / "whole", **options), quiet=True)
    whole = contents(tmp_path / "whole")
    found, wanted = _documents(tmp_path / "whole"), _wanted(texts)
    kept = found["train"] + found["validation"]
    sizes = np.cumsum([len(text.encode()) for text in wanted])
    count = min(int(np.searchsorted(sizes, most)) + 1, len(wanted))
    assert sorted(kept) == sorted(wanted[:count])
    assert index["counts"]["documents"] == count
    monkeypatch.setattr("mesanet.data.streams.BLOCK", 300)
    prepare(config(source, out=tmp_path / "workers", workers=2, **options), quiet=True)
    assert contents(tmp_path / "workers") == whole
    for _ in range(100):
        with monkeypatch.context() as patch, contextlib.suppress(StoppedError):
            stop_after(patch, 20)
            prepare(config(source, out=tmp_path / "stopped", **options), quiet=True)
            break
    assert contents(tmp_path / "stopped") == whole
    with pytest.raises(UserError, match="other max tokens"):
        prepare(config(source, out=tmp_path / "whole", **{**options, "max_tokens": most + 1}), quiet=True)


def test_linked_folders_are_read_but_not_round_and_round(tmp_path: Path) -> None:
    for name in ("source", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text of {name}")
    (tmp_path / "source" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "source")
    index = prepare(config(tmp_path / "source", out=tmp_path / "out", validation_fraction=0.0), quiet=True)
    assert [source["file"] for source in index["sources"]] == ["a.txt", "link/a.txt"]
    assert _documents(tmp_path / "out")["train"] == ["text of source", "text of elsewhere"]


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES])
def test_what_is_finished_needs_no_writing(
    tmp_path: Path, prepared: Path, texts: list[str], reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared, tmp_path / "out")
    source = write_lines(tmp_path / "texts.jsonl", texts)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason), str(tmp_path))

    monkeypatch.setattr("mesanet.data.folder.locked", refuse)
    index = prepare(config(source, out=tmp_path / "out", shard_tokens=5000), quiet=True)
    assert index == json.loads((prepared / "index.json").read_text())
    with pytest.raises(OSError, match=os.strerror(reason)):
        prepare(config(source, out=tmp_path / "new"), quiet=True)


def test_workers_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("numpy.py", "random.py", "mesanet.py"):
        (tmp_path / name).write_text("raise RuntimeError('not the real one')")
    write_lines(tmp_path / "texts.jsonl", ["some text", "and more"])
    words = ["data", "prepare", "texts.jsonl", "--out", "out", "--tokenizer", "bytes", "--workers", "1"]
    # As the installed command does, which has not the current folder either where it looks for modules.
    subprocess.run([sys.executable, "-P", "-m", "mesanet", *words], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer": "gpt2"}, "the tokenizer bytes"),
        ({"seed": 1}, "other seed"),
        ({"validation_fraction": 0.5, "shard_tokens": 5001}, "other shard tokens and validation fraction"),
        ({"texts": ["something else"]}, "other sources"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_preparation_is_refused_and_kept(
    tmp_path: Path,
    texts: list[str],
    change: dict[str, object],
    says: str,
    finished: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mesanet.data.streams.BLOCK", 1000)
    source = write_lines(tmp_path / "texts.jsonl", texts)
    options: dict[str, object] = {"shard_tokens": 5000}
    with monkeypatch.context() as patch:
        if not finished:
            stop_after(patch, 12)
        try:
            prepare(config(source, out=tmp_path / "out", **options), quiet=True)
        except StoppedError:
            assert not finished
    before = contents(tmp_path / "out")
    assert any(name.endswith(".tokens") for name in before)
    write_lines(source, change.get("texts", texts))  # type: ignore[arg-type]
    changed = {name: value for name, value in change.items() if name != "texts"}
    with pytest.raises(UserError, match=f"holds another preparation, with .*{says}"):
        prepare(config(source, out=tmp_path / "out", **{**options, **changed}), quiet=True)
    assert contents(tmp_path / "out") == before


def test_held_out_documents_depend_on_text_and_seed_alone(tmp_path: Path) -> None:
    texts = make_texts(100)
    held_out = {}
    for name, order, seed in (("forwards", texts, 0), ("backwards", texts[::-1], 0), ("other", texts, 1)):
        source = write_lines(tmp_path / f"{name}.jsonl", order)
        prepare(config(source, out=tmp_path / name, seed=seed), quiet=True)
        held_out[name] = set(_documents(tmp_path / name)["validation"])
    assert held_out["forwards"] == held_out["backwards"] != held_out["other"]


@pytest.mark.parametrize(("fraction", "train", "validation"), [(0.0, 61, 0), (1.0, 0, 61)])
def test_all_or_nothing_can_be_held_out(tmp_path: Path, fraction: float, train: int, validation: int) -> None:
    source = write_lines(tmp_path / "data.jsonl", [str(i) for i in range(61)])
    prepare(config(source, out=tmp_path / "out", validation_fraction=fraction), quiet=True)
    dataset = open_dataset(tmp_path / "out")
    assert (len(dataset.train), len(dataset.validation)) == (train, validation)


def test_shards_end_with_the_document_that_fills_them(prepared: Path) -> None:
    index, dataset = json.loads((prepared / "index.json").read_text()), open_dataset(prepared)
    longest = max(len(split[i]) for split in (dataset.train, dataset.validation) for i in range(len(split)))
    groups: dict[str, int] = {}
    for split in index["splits"].values():
        for shard in split["shards"]:
            number = shard["file"].partition("-")[2]
            groups[number] = groups.get(number, 0) + shard["tokens"]
    assert all(5000 <= groups[number] < 5000 + longest for number in sorted(groups)[:-1])


def test_the_standard_library(tmp_path: Path) -> None:
    index = prepare(config("python-stdlib", out=tmp_path / "out"), quiet=True)
    assert index["counts"]["bytes"] > 5_000_000
    documents = _documents(tmp_path / "out")["train"]
    assert any("class OrderedDict(dict):" in text for text in documents)
    assert any('The "with" statement is used to wrap' in text for text in documents)
    assert not any("import unittest\nfrom test" in text for text in documents)


def test_two_preparations_at_once_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    from mesanet.data.folder import Folder

    source = write_lines(tmp_path / "data.jsonl", ["a"])
    with Folder(tmp_path / "out"), pytest.raises(UserError, match="another process is preparing"):
        prepare(config(source, out=tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_null_is_an_empty_document_in_every_format(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": "one"}, {"text": None}, {"text": " \n"}, {"text": "two"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        settings = config(tmp_path / name, out=tmp_path / f"{name}.out", validation_fraction=0.0)
        counts = prepare(settings, quiet=True)["counts"]
        assert (counts["documents"], counts["empty"]) == (2, 2), name
