"""Parquet files as blocks of texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesanet.data.documents import MEBIBYTE, Block, check_length, name_columns
from mesanet.errors import UserError
from mesanet.optional import import_optional


def parquet_blocks(path: Path, origin: str, start: Any, column: str) -> Iterator[Block]:
    """Give the texts of one column of a file. A position is [row group, rows before in it, rows before in all]."""
    pyarrow = import_optional("pyarrow", "data")
    group, skipped, number = start or (0, 0, 0)
    try:
        with import_optional("pyarrow.parquet", "data").ParquetFile(
            path, pre_buffer=False, buffer_size=1 << 20
        ) as file:
            _check_column(file.schema_arrow, column, origin, pyarrow)
            size = path.stat().st_size
            while group < file.num_row_groups:
                row, count = 0, file.metadata.row_group(group).num_rows
                rows = _rows_at_once(file.metadata.row_group(group), column)
                for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
                    passed = min(max(skipped - row, 0), batch.num_rows)
                    row += passed
                    for payload, sizes in _pieces(batch.column(0).slice(passed), pyarrow):
                        for place, length in enumerate(sizes, start=number):
                            check_length(length, f"{origin}, document {place}")
                        progress = int(size * (group + (row + len(sizes)) / count) / file.num_row_groups)
                        yield Block("texts", payload, origin, [group, row, number], number, sizes, progress)
                        row, number = row + len(sizes), number + len(sizes)
                group, skipped = group + 1, 0
    except pyarrow.ArrowException as error:
        raise UserError(f"{origin} is not a whole parquet file: {str(error).strip().splitlines()[0]}") from error


def _rows_at_once(group: Any, column: str) -> int:
    """Return how many rows of a group hold about a mebibyte of text."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
    return int(min(max(MEBIBYTE * group.num_rows // max(size, 1), 1), 1 << 14))


def _check_column(schema: Any, column: str, origin: str, pyarrow: Any) -> None:
    if column not in schema.names:
        columns = name_columns(schema.names)
        raise UserError(f"{origin}: no column {column!r}, only {columns}; choose one with --text-column")
    if schema.names.count(column) > 1:
        raise UserError(f"{origin}: there are {schema.names.count(column)} columns {column!r}; rename all but one")
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        # Each different string is stored once, as tables of categories are.
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{origin}: the column {column!r} must hold strings, got {kind}")


def _pieces(column: Any, pyarrow: Any) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Lay the strings of a column end to end, about a mebibyte at a time, straight from Arrow's own buffers.

    Gives the bytes and the size of each string; a null is an empty text.
    """
    column = column.cast(pyarrow.large_string())
    column = column.fill_null("") if column.null_count else column
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    first = 0
    while first < len(column):
        # Up to the string with which it is a mebibyte.
        last = min(int(np.searchsorted(offsets, offsets[first] + MEBIBYTE)), len(column))
        payload = bytes(memoryview(data)[offsets[first] : offsets[last]]) if data is not None else b""
        yield payload, tuple(np.diff(offsets[first : last + 1]).tolist())
        first = last
