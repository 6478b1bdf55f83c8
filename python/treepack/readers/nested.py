"""A file whose rows hold several samples, as a file with a row for each: its columns are paths."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from .paths import Path, expand, parse
from .source import Chunk, ReadError, ReadWarning, Source


class Nested:
    """Rows of another source, cut into samples. Memory: a chunk of the other source.

    Numbers of samples are those of rows with the place in the row, "3, trajectory[1]". What comes before `start` is
    read again, since only reading tells how many samples a row has.
    """

    def __init__(self, source: Source, names: Sequence[str]):
        """names: the columns that there are, columns of `source` and paths."""
        self.source = source
        self.names = list(names)
        self.unit = source.unit
        self.size: int | None = None

    @property
    def path(self) -> FilePath:
        return self.source.path

    @property
    def fraction(self) -> float:
        return self.source.fraction

    def head(self, rows: int) -> list[dict[str, Any]]:
        """The first rows, whole."""
        return self.source.head(rows)

    def chunks(self, names: Sequence[str], samples: int, start: int) -> Iterator[Chunk]:
        paths = {name: self.path_of(name) for name in names}
        columns = list(dict.fromkeys(path.column for path in paths.values()))
        out, seen, without = _Filling(names), 0, []
        for chunk in self.source.chunks(columns, samples, 0):
            for at, number in enumerate(chunk.numbers):
                row = {name: values[at] for name, values in chunk.columns.items()}
                found = False
                for place, values in self._samples(row, paths, number):
                    found = True
                    seen += 1
                    if seen <= start:
                        continue
                    out.add(f"{number}{place}", values)
                    if len(out.numbers) == samples:
                        yield out.take()
                if not found:
                    without.append(number)
            if out.numbers:  # not later: the next chunk takes the place of this one
                yield out.take()
        if without:
            self._tell(without, paths)

    def path_of(self, name: str) -> Path:
        """A column as a path; that of a plain name is itself, whatever is in it."""
        return Path(name, ((name, 0),)) if name in self.source.names else parse(name)

    def _samples(
        self, row: Mapping[str, Any], paths: Mapping[str, Path], number: object
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from expand(row, paths, f"{self.path}, {self.unit} {number}")

    def _tell(self, without: list[Any], paths: Mapping[str, Path]) -> None:
        lists = ", ".join(dict.fromkeys(path.text.rsplit("[]", 1)[0] for path in paths.values() if path.lists))
        text = f"{self.path}: {len(without)} rows hold no samples, the first is {self.unit} {without[0]}: {lists} is empty"
        warnings.warn(text, ReadWarning, stacklevel=2)


class _Filling:
    """A chunk while it is filled."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._empty()

    def _empty(self) -> None:
        self.numbers: list[Any] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in self._names}

    def add(self, number: str, values: Mapping[str, Any]) -> None:
        self.numbers.append(number)
        for name, value in values.items():
            self._columns[name].append(value)

    def take(self) -> Chunk:
        chunk = Chunk(self.numbers, self._columns)
        self._empty()
        return chunk


def nested(source: Source, columns: Mapping[str, str], option: str = "") -> Nested:
    """A source with the columns of its own and the paths among these.

    Raises ReadError for a path that begins in no column of the source.
    """
    for canonical, name in columns.items():
        if name and name not in source.names:
            path = parse(name, f"--column {canonical}={name}")
            if path.column not in source.names:
                raise ReadError(
                    f"{source.path}: no column {path.column!r} to take {canonical} from by {name!r}; it has "
                    f"{', '.join(source.names)}"
                )
    inside = {parse(name).column for name in columns.values() if name and name not in source.names}
    names = [name for name in source.names if name not in inside]
    return Nested(source, [*names, *dict.fromkeys(name for name in columns.values() if name and name not in names)])
