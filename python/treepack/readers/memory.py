"""A table in memory, read as a file is: a pandas DataFrame, a pyarrow Table, a Dataset of `datasets` or a slice of one
(a dict of columns), a list of dicts. Nothing is copied; a chunk is a slice of the columns."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..inputs.tables import columns_of
from .plain import plain_values
from .source import CHUNK_TOKENS, Chunk, ReadError


class Table:
    """The source of a table in memory."""

    unit = "row"

    def __init__(self, table: Any):
        columns = _columns(table)
        if columns is None:
            raise TypeError(
                f"what is to be read is of type {type(table).__name__}; a path is needed, or a DataFrame, a pyarrow "
                "Table, a Dataset, a dict of columns, a list of dicts"
            )
        self.path = Path(type(table).__name__)
        """What messages call it."""
        counts = {name: len(values) for name, values in columns.items()}
        if len(set(counts.values())) > 1:
            raise ReadError(f"{self.path}: the columns have different numbers of rows: {counts}")
        self.names = [name for name in columns if isinstance(name, str)]
        self.size: int | None = next(iter(counts.values()), 0)
        self.fraction = 0.0
        self._columns = columns

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        size = self.size or 0
        at = start
        while at < size:
            end, tokens = at, 0
            while end < min(size, at + samples) and tokens < CHUNK_TOKENS:
                tokens += max(
                    (len(x) for name in names if hasattr(x := self._columns[name][end], "__len__")), default=1
                )
                end += 1
            yield Chunk(range(at, end), {name: list(self._columns[name][at:end]) for name in names})
            self.fraction = end / size
            at = end

    def digest(self) -> str:
        """Changes when a value does."""
        out = _Hash()
        pickle.Pickler(out, protocol=5).dump(self._columns)
        return out.digest.hexdigest()


class _Hash:
    """A file that keeps a hash of what is written."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def _columns(table: Any) -> dict[str, list[Any]] | None:
    """The columns of a table, a value for each row."""
    if isinstance(table, Mapping):
        lists = {name: values for name, values in table.items() if not isinstance(values, str)}
        return {name: list(values) for name, values in lists.items() if hasattr(values, "__len__")}
    if type(table).__module__.partition(".")[0] == "datasets" and hasattr(table, "with_format"):
        table = table.with_format("arrow")[:]
    if isinstance(table, list) and table and all(isinstance(row, Mapping) for row in table):
        names = dict.fromkeys(name for row in table for name in row)
        return {name: [row.get(name) for row in table] for name in names}
    return columns_of(table, other=plain_values)
