"""A data set of the hub is one version of it, from the first shard to the last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.data.conftest import config, contents

from mesanet.data import prepare
from mesanet.errors import UserError

huggingface_hub = pytest.importorskip("huggingface_hub")
datasets = pytest.importorskip("datasets")


class Stream:
    """Ten documents that come one after the other."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"text": f"text {number}"} for number in range(10)])

    def state_dict(self) -> dict[str, str]:
        return {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A hub whose `main` is `commit`, and the revisions that were asked for."""
    seen = SimpleNamespace(commit="1" * 40, loaded=[])

    def info(api: Any, name: str, *, revision: str | None = None) -> SimpleNamespace:
        assert name == "owner/set"
        return SimpleNamespace(sha=seen.commit if revision in (None, "main") else revision)

    def load(name: str, *rest: Any, revision: str | None, **more: Any) -> Stream:
        seen.loaded.append(revision)
        return Stream()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return seen


def test_what_is_read_is_the_commit_on_record(tmp_path: Path, hub: SimpleNamespace) -> None:
    prepare(config("owner/set", out=tmp_path / "out"), quiet=True)
    assert hub.loaded == [hub.commit]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [source["revision"] for source in index["sources"]] == [hub.commit]


def test_another_version_does_not_go_on_with_the_first(tmp_path: Path, hub: SimpleNamespace) -> None:
    asked, first = config("owner/set", out=tmp_path / "out"), hub.commit
    prepare(asked, quiet=True)
    before = contents(tmp_path / "out")
    hub.commit = "2" * 40
    with pytest.raises(UserError, match=rf"other sources; .* that it was begun with: --hub-revision {first}"):
        prepare(asked, quiet=True)
    prepare(config("owner/set", out=tmp_path / "out", hub_revision=first), quiet=True)
    after = contents(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    with pytest.raises(UserError, match=r"other sources; choose a new folder with --out$"):
        prepare(config("owner/set", out=tmp_path / "out", hub_split="test"), quiet=True)


def test_a_row_that_is_too_long_is_refused(
    tmp_path: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesanet.data.documents.LONGEST", 5)
    with pytest.raises(UserError, match="owner/set, document 0: longer than"):
        prepare(config("owner/set", out=tmp_path / "out"), quiet=True)


def test_a_hub_that_does_not_answer_is_one_sentence(
    tmp_path: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(UserError, match=r"^the data set 'owner/set' can't be read.*: no route$"):
        prepare(config("owner/set", out=tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()
