"""What the formats have in common: a source gives chunks of columns, in file order, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import escaped

#: A chunk ends after about this many tokens (JSONL: bytes), so that long samples do not fill the memory.
CHUNK_TOKENS = 1 << 20
CHUNK_BYTES = 8 << 20


class ReadError(ValueError):
    """A file that cannot be read as rollouts; says which file, line or row and column, what it has, what is allowed.

    One line, whatever the names of files and columns hold: what is not printable is escaped.
    """

    def __init__(self, text: str):
        super().__init__(escaped(text))


class ReadWarning(UserWarning):
    """Something about a file that is read, and is likely not what was meant."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def kind(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


@dataclass(frozen=True)
class Chunk:
    """Samples next to each other in one file: `columns[name][i]` is the value of sample i (a NumPy view, list, scalar,
    text, None), `numbers[i]` its line or row in the file, "3, steps[1]" where a row holds several samples."""

    numbers: Sequence[int | str]
    columns: Mapping[str, Sequence[Any]]
    more: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Columns that the first row of the file has not, name -> i -> value."""


class Source(Protocol):
    """One file of one format."""

    path: Path
    #: What a number of `Chunk.numbers` counts: "line" (from 1) or "row" (from 0).
    unit: str
    #: Columns of the file.
    names: list[str]
    #: Samples, or None where only reading tells.
    size: int | None
    #: How much of the file has been read, 0 to 1.
    fraction: float

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        """Chunks of at most `samples` samples from number `start` on, of these columns. An `optional` one that a row
        lacks is None there; one that cannot be read at all is left out."""
        ...
