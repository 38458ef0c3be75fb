"""Parquet files as blocks of texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesanet.data.documents import MEBIBYTE, Block, name_columns
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
                row, rows = 0, _rows_at_once(file.metadata.row_group(group), column)
                for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
                    before, row = row, row + batch.num_rows
                    if row <= skipped:
                        continue
                    assert before >= skipped, "a position lies between two batches"
                    progress = int(size * (group + row / file.metadata.row_group(group).num_rows) / file.num_row_groups)
                    yield _block(batch.column(0), origin, [group, before, number], number, progress, pyarrow)
                    number += batch.num_rows
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
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        # Each different string is stored once, as tables of categories are.
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{origin}: the column {column!r} must hold strings, got {kind}")


def _block(column: Any, origin: str, position: Any, first: int, progress: int, pyarrow: Any) -> Block:
    """Lay the strings of a column end to end, straight from Arrow's own buffers; a null is an empty text."""
    column = column.cast(pyarrow.large_string())
    column = column.fill_null("") if column.null_count else column
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    payload = bytes(memoryview(data)[offsets[0] : offsets[-1]]) if data is not None else b""
    return Block("texts", payload, origin, position, first, tuple(np.diff(offsets).tolist()), progress)
