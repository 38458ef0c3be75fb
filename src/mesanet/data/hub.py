"""Data sets of the hub, streamed by the library `datasets`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mesanet.data.documents import MEBIBYTE, Block, check_length, name_columns, texts_block
from mesanet.data.tokenizer import encode_utf8
from mesanet.errors import UserError
from mesanet.optional import import_optional


class HubSource:
    """One split of a data set of the hub, or of a folder laid out like one, read as it streams in."""

    size: int | None = None

    def __init__(self, name: str, text_column: str, *, config: str | None, split: str, revision: str | None) -> None:
        self.name = name
        self._column = text_column
        self._config, self._split, self._revision = config, split, revision

    def identity(self) -> dict[str, Any]:
        """Say what the source is: everything that names it, and the very version, of which a branch has many."""
        return {"hub": self.name, "config": self._config, "split": self._split, "revision": self._commit}

    @cached_property
    def _commit(self) -> str | None:
        """The commit that the revision is now; None for a folder, which has none."""
        if Path(self.name).is_dir():
            return self._revision
        hub = import_optional("huggingface_hub", "data")
        try:
            found: str | None = hub.HfApi().dataset_info(self.name, revision=self._revision).sha
        except Exception as error:
            # As below: of a missing data set, a dropped connection and being offline each library says it in its way.
            raise self._unreadable(error) from error
        return found

    def blocks(self, start: Any) -> Iterator[Block]:
        """Give the documents in the data set's order. A position is [documents before, the library's own state]."""
        first, state = start or (0, None)
        stream = self._open()
        if state is not None:
            stream.load_state_dict(state)
        waiting: list[bytes] = []
        size, number = 0, first
        for row in self._rows(stream):
            text = encode_utf8(self._text(row, number))
            check_length(len(text), f"{self.name}, document {number}")
            waiting.append(text)
            number, size = number + 1, size + len(text)
            if size >= MEBIBYTE:
                yield texts_block(waiting, self.name, [first, state], first)
                waiting, size, first, state = [], 0, number, stream.state_dict()
        if waiting:
            yield texts_block(waiting, self.name, [first, state], first)

    def _open(self) -> Any:
        datasets = import_optional("datasets", "data")
        datasets.disable_progress_bars()
        # What goes wrong is said once, below, and not after every attempt.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        try:
            return datasets.load_dataset(
                self.name, self._config, split=self._split, revision=self._commit, streaming=True
            )
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UserError:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return UserError(f"the data set {self.name!r} can't be read{offline}: {_reason(error)}")

    def _rows(self, stream: Any) -> Iterator[Mapping[str, Any]]:
        """Give the rows, and tell a connection that drops on the way in one sentence."""
        rows = iter(stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                # Every library below has errors of its own for a connection; none of them is ours to tell apart.
                raise UserError(
                    f"reading the data set {self.name!r} broke off: {_reason(error)}; what is finished is kept: "
                    "run the same command to go on"
                ) from error
            yield row

    def _text(self, row: Mapping[str, Any], number: int) -> str:
        place = f"{self.name}, document {number}"
        if self._column not in row:
            columns = name_columns(row)
            raise UserError(f"{place}: no column {self._column!r}, only {columns}; choose one with --text-column")
        text = row[self._column]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise UserError(f"{place}: the column {self._column!r} must hold a string, got {type(text).__name__}")
        return text


def _reason(error: Exception) -> str:
    """The first line of an error, which says what happened; the libraries' run over many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
