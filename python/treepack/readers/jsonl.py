"""JSON files, plain, .gz or .zst: one object per line, or one array (or one object) over the whole file.

A line is parsed when its chunk is due; an array is cut into its elements a block at a time, so that of either no more
is kept than a chunk and an element.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from .._optional import require
from ..errors import listed
from .elements import elements
from .source import CHUNK_BYTES, Chunk, ReadError, first_line, kind

SUFFIXES = tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))

#: A row where it is cut out: its number, its bytes or letters, and the line or the parsed element.
Piece = tuple[int, int, Any]


def open_json(path: Path) -> JsonLines | JsonElements:
    """The rows of a file: its lines; or the elements of the array, or the objects over several lines, that it is."""
    with _open(path) as (file, _):
        start = file.read(1 << 16)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return JsonElements(path)
    line, more, _ = text.partition(b"\n")
    whole_file = path.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(".json")
    if whole_file and text.startswith(b"{") and more and not _is_json(line):
        return JsonElements(path)
    return JsonLines(path)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class _JsonRows:
    """Rows of a JSON file. Its columns are the keys of the first row; later ones must have those that are read."""

    unit: str
    #: What a user calls the first row.
    first: str

    def __init__(self, path: Path):
        self.path = path
        self.fraction = 0.0
        self.size: int | None = None  # known once the file was read to its end, or where it is empty
        self.names: list[str] = []
        self.unexpected: Mapping[str, str] = {}
        """Keys that no row may have, since the first has not (`names.unexpected`), with their canonical names."""
        with closing(self._pieces()) as pieces:
            first = next(pieces, None)
        if first is None:
            self.size = 0
        else:
            self.names = list(self._row(first))

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        numbers: list[int] = []
        columns: dict[str, list[Any]] = {name: [] for name in names}
        later: dict[str, dict[int, Any]] = {}
        known = frozenset(self.names)
        pending = count = 0
        for piece in self._pieces():
            count += 1
            if count <= start:
                continue
            number, size, _ = piece
            row = self._row(piece)
            more = self.unexpected.keys() & row.keys()
            if more:
                key = min(more)
                raise ReadError(
                    f"{self.path}, {self.unit} {number}: it has {key!r}, which {self.first} has not; give it in every "
                    f"{self.unit}, or leave it out with --column {self.unexpected[key]}="
                )
            for name, values in columns.items():
                if name not in row and name not in optional:
                    has = listed(row) or "no keys"
                    raise ReadError(f"{self.path}, {self.unit} {number}: no {name!r}; it has {has}")
                values.append(row.get(name))
            for name in row.keys() - known:
                later.setdefault(name, {})[len(numbers)] = row[name]
            numbers.append(number)
            pending += size
            if len(numbers) == samples or pending >= CHUNK_BYTES:
                yield Chunk(numbers, columns, later)
                numbers, columns, later, pending = [], {name: [] for name in names}, {}, 0
        self.size = count
        if numbers:
            yield Chunk(numbers, columns, later)

    def _pieces(self) -> Generator[Piece]:
        with _open(self.path) as (file, raw):
            total = max(self.path.stat().st_size, 1)
            for piece in self._cut(file):
                if not raw.closed:
                    self.fraction = raw.tell() / total
                yield piece
        self.fraction = 1.0

    def _cut(self, file: BinaryIO) -> Iterator[Piece]:
        raise NotImplementedError

    def _row(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _object(self, row: Any, number: int) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise ReadError(
                f"{self.path}, {self.unit} {number}: it is {kind(row)}; an object with the columns of a sample is "
                "needed"
            )
        return row


class JsonLines(_JsonRows):
    """A file with an object on each line; lines are counted from 1."""

    unit = "line"
    first = "the first line"

    def _cut(self, file: BinaryIO) -> Iterator[Piece]:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield number, len(line), line

    def _row(self, piece: Piece) -> dict[str, Any]:
        number, _, line = piece
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            what = f"{error.msg} at column {error.colno}; one JSON object per line is needed"
            raise ReadError(f"{where}: not JSON: {what}") from None
        except (ValueError, RecursionError) as error:  # text that is not UTF-8, integers of thousands of digits
            raise ReadError(f"{where}: it cannot be parsed: {first_line(error)}") from None
        return self._object(row, number)


class JsonElements(_JsonRows):
    """A file that is one array of objects, or an object over several lines (or some); elements are counted from 0."""

    unit = "element"
    first = "element 0"

    def _cut(self, file: BinaryIO) -> Iterator[Piece]:
        for number, (value, size) in enumerate(elements(file.read, str(self.path))):
            yield number, size, value

    def _row(self, piece: Piece) -> dict[str, Any]:
        return self._object(piece[2], piece[0])


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The bytes of a file without its compression, and the file itself, which says how far it was read."""
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(path.open("rb"))
            yield _decompressed(path, raw), raw
        except (OSError, EOFError, zlib.error) as error:
            raise ReadError(f"{path}: it cannot be read: {first_line(error)}") from None


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.suffix.lower() == ".zst":
        require("pyarrow", f"{path}: .zst", "cli")
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")))
    return raw
