"""Parquet files and folders of Hugging Face `datasets`: Arrow list columns, cut into NumPy views without a copy."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plain import plain_values
from .source import CHUNK_TOKENS, Chunk, ReadError, first_line

if TYPE_CHECKING:
    import pyarrow


class Parquet:
    """A Parquet file, decoded some rows at a time out of a memory map."""

    unit = "row"

    def __init__(self, path: Path):
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise ReadError(f"{path}: Parquet needs pyarrow: pip install 'treepack[cli]'") from None
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
        try:
            import datasets
        except ImportError:
            raise ReadError(f"{path}: a Hugging Face dataset needs: pip install datasets") from None
        self.path = path
        self.fraction = 0.0
        self.names: list[str] = []
        self.size: int | None = 0
        try:
            if not json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]:
                return  # no rows: datasets writes such a folder and cannot load it
            data = datasets.load_from_disk(str(path), keep_in_memory=False)
        except Exception as error:  # whatever a broken folder makes it raise
            raise ReadError(f"{path}: not a dataset of save_to_disk: {first_line(error)}") from None
        self._data = data.with_format("arrow")
        self.names = list(data.column_names)
        self.size = len(data)

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        data = self._data.select_columns(list(names))
        size = len(data)
        mean = max(1, data.data.nbytes // size // 4)  # bytes of a row, in tokens of four
        rows = max(1, min(samples, CHUNK_TOKENS // mean))
        for at in range(start, size, rows):
            end = min(at + rows, size)
            yield _chunk(data[at:end], range(at, end))
            self.fraction = end / size


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
    columns = {}
    for name in table.schema.names:
        column = table.column(name)
        pieces = column.chunks if hasattr(column, "chunks") else [column]
        columns[name] = [value for piece in pieces for value in _values(piece)]
    return Chunk(numbers, columns)


def _values(array: pyarrow.Array) -> list[Any]:
    """One value per row: a NumPy view for a list of numbers, else plain Python (nulls are None)."""
    import pyarrow.types as kinds

    kind = array.type
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        flat, offsets = array.values, array.offsets.to_numpy()
    elif kinds.is_fixed_size_list(kind) and array.null_count == 0:
        flat = array.flatten()
        offsets = range(0, (len(array) + 1) * kind.list_size, kind.list_size)
    else:
        return plain_values(array)
    if flat.null_count or not (kinds.is_integer(flat.type) or kinds.is_floating(flat.type)):
        return plain_values(array)  # text, booleans, lists of lists, nulls within
    values = flat.to_numpy(zero_copy_only=True)
    valid = [True] * len(array) if array.null_count == 0 else array.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if there else None for i, there in enumerate(valid)]
