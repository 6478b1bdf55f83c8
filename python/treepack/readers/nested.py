"""A file whose rows hold several samples, as a file with a row for each: its columns are paths."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..errors import listed
from . import shapes
from .lazy import Column
from .messages import decoded
from .paths import Path, expand, is_path, parse, take
from .source import Chunk, ReadError, ReadWarning, Source


class Nested:
    """Rows of another source, cut into samples. Memory: a chunk of the other source.

    Numbers of samples are those of rows with the place in the row, "3, trajectory[1]". What comes before `start` is
    read again, since only reading tells how many samples a row has.
    """

    def __init__(self, source: Source, paths: Sequence[str], ids: str):
        """paths: the columns that there are instead of those that they begin in; `ids`: the one that messages name."""
        self.source = source
        self._ids = ids
        self.path = source.path
        inside = {parse(path).column for path in paths}
        if missing := sorted(inside.difference(source.names)):
            raise ReadError(f"{source.path}: no column {missing[0]!r}; it has {listed(source.names)}")
        self.names = [*(name for name in source.names if name not in inside), *dict.fromkeys(paths)]
        self.unit = source.unit
        self.size: int | None = None

    @property
    def fraction(self) -> float:
        return self.source.fraction

    @fraction.setter
    def fraction(self, fraction: float) -> None:
        self.source.fraction = fraction

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        paths = {name: self.path_of(name) for name in names}
        columns = list(dict.fromkeys(path.column for path in paths.values()))
        needed = {path.column for name, path in paths.items() if name not in optional}
        out, seen, without = _Filling(names), 0, []
        for chunk in self.source.chunks(columns, samples, 0, [name for name in columns if name not in needed]):
            whole = {name: taken for name, path in paths.items() if (taken := _taken(chunk, path)) is not None}
            rest = {name: path for name, path in paths.items() if name not in whole}
            needed_whole = {path.column for path in rest.values()}
            for at, number in enumerate(chunk.numbers):
                where, found = f"{self.path}, {self.unit} {number}", False
                more = {name: by_row[at] for name, by_row in chunk.more.items() if at in by_row}
                row = {name: values[at] for name, values in chunk.columns.items() if name in needed_whole}
                fields = {name: values[at] for name, values in whole.items()}
                fields |= {name: take(row, path, where) for name, path in rest.items()}
                for place, values in expand(fields, paths, where, self._ids):
                    found = True
                    seen += 1
                    if seen <= start:
                        continue
                    out.add(f"{number}{place}", values, more)
                    if len(out.numbers) == samples:
                        yield out.take()
                if not found:
                    without.append(number)
            if out.numbers:  # not later: the next chunk takes the place of this one
                yield out.take()
        self.size = seen
        if without:
            self._tell(without, paths)

    def path_of(self, name: str) -> Path:
        """A column as a path; that of a plain name is itself, whatever is in it."""
        return Path(name, ((name, 0),)) if name in self.source.names else parse(name)

    def _tell(self, without: list[Any], paths: Mapping[str, Path]) -> None:
        lists = listed(dict.fromkeys(path.text.rsplit("[]", 1)[0] for path in paths.values() if path.lists))
        text = f"{self.path}: {len(without)} rows hold no samples, the first is {self.unit} {without[0]}: {lists} is"
        warnings.warn(f"{text} empty", ReadWarning, stacklevel=2)


def _taken(chunk: Chunk, path: Path) -> list[Any] | None:
    """What a path leads to in all rows of a chunk, where the column can tell at once."""
    column = chunk.columns.get(path.column)
    return column.at(path.steps) if isinstance(column, Column) else None


class _Filling:
    """A chunk while it is filled."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._empty()

    def _empty(self) -> None:
        self.numbers: list[Any] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in self._names}
        self._more: dict[str, dict[int, Any]] = {}

    def add(self, number: str, values: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        for name, value in more.items():
            self._more.setdefault(name, {})[len(self.numbers)] = value
        self.numbers.append(number)
        for name, value in values.items():
            self._columns[name].append(value)

    def take(self) -> Chunk:
        chunk = Chunk(self.numbers, self._columns, self._more)
        self._empty()
        return chunk


def unfold(
    sources: list[Source], given: Mapping[str, str], head: Chunk, chat: bool
) -> tuple[list[Source], dict[str, str]]:
    """Files whose rows hold several samples as files with a row for each, and the columns that say so; files whose
    columns are plain as they are. `given`: canonical name -> column or path; `head`: the first rows of the first file;
    `chat`: chat messages will be read.

    Raises ReadError for a path that begins in no column, and where it is not clear which ids are meant.
    """
    first, rows = sources[0], rows_of(head)
    named = {name: column for name, column in given.items() if column and column not in first.names and is_path(column)}
    for name, column in named.items():
        path = parse(column, f"--column {name}={column}")
        if path.column not in first.names:
            raise ReadError(
                f"{first.path}: no column {path.column!r} to take {name} from by {column!r}; it has "
                f"{listed(first.names)}"
            )
    found: dict[str, str] = {}
    ids = next((named[name] for name in ("completion_ids", "input_ids") if name in named), None)
    if ids is not None:
        found = shapes.beside(shapes.leaves(rows), ids, rows)
    elif not chat and not any(given.get(name) for name in _IDS):
        found = shapes.find(rows, first.path)
    columns = found | dict(given)
    paths = [name for name in columns.values() if name and name not in first.names and is_path(name)]
    if not paths:
        return sources, dict(given)
    ids = ids or columns.get("completion_ids") or columns.get("input_ids")
    more = shapes.neighbours(rows, ids) if ids and is_path(ids) else []
    return [Nested(source, [*paths, *more], ids or paths[0]) for source in sources], columns


_IDS = ("input_ids", "prompt_ids", "completion_ids")


def rows_of(head: Chunk) -> list[dict[str, Any]]:
    """The rows of a chunk, without what they lack."""
    rows = range(len(head.numbers))
    return [{name: values[at] for name, values in head.columns.items() if values[at] is not None} for at in rows]


def chats_in(head: Chunk) -> list[str]:
    """The columns that hold chat messages in the first rows."""
    return [name for name, values in head.columns.items() if any(map(_is_chat, values))]


def _is_chat(value: Any) -> bool:
    value = decoded(value)
    first = decoded(value[0]) if isinstance(value, list) and value else None
    return isinstance(first, dict) and "role" in first
