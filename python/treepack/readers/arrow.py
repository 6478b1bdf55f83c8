"""Parquet files and folders of Hugging Face `datasets`: Arrow list columns, cut into NumPy views without a copy."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .._optional import require
from ..inputs.tables import arrow_values
from .lazy import Column, is_nested
from .plain import plain_values
from .source import CHUNK_TOKENS, Chunk, ReadError, first_line


class Parquet:
    """A Parquet file, decoded some rows at a time out of a memory map."""

    unit = "row"

    def __init__(self, path: Path):
        require("pyarrow", f"{path}: Parquet", "cli")
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.path = path
        self.fraction = 0.0
        # An absolute path: pyarrow takes a relative one with a colon in it for an address.
        self._open = partial(ParquetFile, path.absolute(), memory_map=True)
        self._errors = (ArrowException, OSError, UnicodeError)
        try:
            with self._open() as file:  # only while it is read: there may be thousands of shards
                self.names: list[str] = list(file.schema_arrow.names)
                self.size: int | None = file.metadata.num_rows
        except self._errors as error:
            raise ReadError(f"{path}: not a Parquet file: {first_line(error)}") from None

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        with self._open() as file:
            yield from self._chunks(file, names, samples, start)

    def _chunks(self, file: Any, names: Sequence[str], samples: int, start: int) -> Iterator[Chunk]:
        metadata = file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        first = 0  # row groups before `start` are not touched
        at = 0
        while first < len(rows) and at + rows[first] <= start:
            at += rows[first]
            first += 1
        groups = list(range(first, len(rows)))
        try:
            rows_at_once = _rows(metadata, names, samples)
            for batch in file.iter_batches(rows_at_once, row_groups=groups, columns=list(names)):
                skip = max(start - at, 0)
                kept = batch.slice(skip)
                if kept.num_rows:
                    yield _chunk(kept, range(at + skip, at + batch.num_rows))
                at += batch.num_rows
                self.fraction = at / metadata.num_rows
        except self._errors as error:
            raise ReadError(f"{self.path}, after row {at}: it cannot be read: {first_line(error)}") from None


class Dataset:
    """A folder of `datasets.Dataset.save_to_disk`; its Arrow files are memory-mapped, never loaded."""

    unit = "row"

    def __init__(self, path: Path):
        require("pyarrow", f"{path}: a Hugging Face dataset", "cli")
        import pyarrow
        import pyarrow.ipc

        self.path = path
        self.fraction = 0.0
        self._pyarrow: Any = pyarrow
        self._errors = (pyarrow.ArrowException, OSError, ValueError)
        self.names: list[str] = []
        self.size: int | None = 0
        self._shards: list[tuple[Path, int]] = []  # with its rows
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            files = [path / Path(entry["filename"]).name for entry in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReadError(f"{path}: not a dataset of save_to_disk: {first_line(error)}") from None
        if state.get("_indices_data_files"):
            raise ReadError(f"{path}: its rows are an index into others; save it again after .flatten_indices()")
        for file in files:
            table = self._table(file)
            self.names = self.names or list(table.column_names)
            self._shards.append((file, table.num_rows))
            self.size += table.num_rows

    def _table(self, file: Path) -> Any:
        try:
            return self._pyarrow.ipc.open_stream(self._pyarrow.memory_map(str(file.absolute()))).read_all()
        except self._errors as error:
            raise ReadError(f"{self.path}: not a dataset of save_to_disk: {file.name}: {first_line(error)}") from None

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        first = 0  # rows before this shard
        for file, size in self._shards:
            if size and start < first + size:
                data = self._table(file).select(list(names))
                mean = max(1, data.nbytes // size // 4)  # bytes of a row, in tokens of four
                rows = max(1, min(samples, CHUNK_TOKENS // mean))
                for at in range(max(start - first, 0), size, rows):
                    end = min(at + rows, size)
                    yield _chunk(data.slice(at, end - at), range(first + at, first + end))
                    self.fraction = (first + end) / (self.size or 1)
            first += size


def _rows(metadata: Any, names: Sequence[str], samples: int) -> int:
    """Rows of a Parquet file that hold about CHUNK_TOKENS values of the longest column."""
    longest = 1.0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for at in range(row_group.num_columns):
            column = row_group.column(at)
            if column.path_in_schema.split(".")[0] in names and row_group.num_rows:
                longest = max(longest, column.num_values / row_group.num_rows)
    return max(1, min(samples, int(CHUNK_TOKENS / longest)))


def _chunk(table: Any, numbers: Sequence[int]) -> Chunk:
    columns: dict[str, Sequence[Any]] = {}
    for name in table.schema.names:
        column = table.column(name)
        columns[name] = Column(column) if is_nested(column.type) else arrow_values(column, other=plain_values)
    return Chunk(numbers, columns)
