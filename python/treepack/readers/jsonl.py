"""JSONL: one object per line, plain, .gz or .zst. Read line by line; a line is parsed when its chunk is due."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO, cast

from .source import CHUNK_BYTES, Chunk, ReadError, first_line, kind

SUFFIXES = tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))


class JsonLines:
    """A JSONL file. Its columns are the keys of the first line; later lines must have those that are read."""

    unit = "line"

    def __init__(self, path: Path):
        self.path = path
        self.fraction = 0.0
        self.size: int | None = None  # known once the file was read to its end, or where it is empty
        self.names: list[str] = []
        self.unexpected: Mapping[str, str] = {}
        """Keys that no line may have, since the first has not (`names.unexpected`), with their canonical names."""
        with closing(self._lines()) as lines:
            first = next(lines, None)
        if first is None:
            self.size = 0
        else:
            self.names = list(self._parse(*first))

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        numbers: list[int] = []
        columns: dict[str, list[Any]] = {name: [] for name in names}
        held = count = 0
        for number, line in self._lines():
            count += 1
            if count <= start:
                continue
            row = self._parse(number, line)
            more = self.unexpected.keys() & row.keys()
            if more:
                key = min(more)
                raise ReadError(
                    f"{self.path}, line {number}: it has {key!r}, which the first line has not; give it in every line, "
                    f"or leave it out with --column {self.unexpected[key]}="
                )
            for name, values in columns.items():
                if name not in row and name not in optional:
                    raise ReadError(f"{self.path}, line {number}: no {name!r}; it has {', '.join(row) or 'no keys'}")
                values.append(row.get(name))
            numbers.append(number)
            held += len(line)
            if len(numbers) == samples or held >= CHUNK_BYTES:
                yield Chunk(numbers, columns)
                numbers, columns, held = [], {name: [] for name in names}, 0
        self.size = count
        if numbers:
            yield Chunk(numbers, columns)

    def _lines(self) -> Generator[tuple[int, bytes]]:
        """(number from 1, line) of every line that is not blank."""
        with ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            total = max(self.path.stat().st_size, 1)
            try:
                for number, line in enumerate(self._decompressed(raw), 1):
                    if not raw.closed:
                        self.fraction = raw.tell() / total
                    if not line.isspace():
                        yield number, line
            except (OSError, EOFError, zlib.error) as error:
                raise ReadError(f"{self.path}: it cannot be read: {first_line(error)}") from None
        self.fraction = 1.0

    def _decompressed(self, raw: BinaryIO) -> Iterator[bytes]:
        packed = self.path.suffix.lower()
        if packed == ".gz":
            return iter(cast(Any, gzip.GzipFile(fileobj=raw)))
        if packed == ".zst":
            try:
                import pyarrow
            except ImportError:
                raise ReadError(f"{self.path}: .zst needs pyarrow: pip install 'treepack[cli]'") from None
            return iter(io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")))
        return iter(raw)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1 and line.lstrip().startswith(b"["):
                raise ReadError(_ARRAY.format(where=where)) from None
            what = f"{error.msg} at column {error.colno}; one JSON object per line is needed"
            raise ReadError(f"{where}: not JSON: {what}") from None
        except (ValueError, RecursionError) as error:  # text that is not UTF-8, integers of thousands of digits
            raise ReadError(f"{where}: it cannot be parsed: {first_line(error)}") from None
        if isinstance(row, dict):
            return row
        if isinstance(row, list) and number == 1:
            raise ReadError(_ARRAY.format(where=where))
        raise ReadError(f"{where}: it is {kind(row)}; an object with the columns of a sample is needed")


_ARRAY = "{where}: a JSON array; one object per line is needed (jq -c '.[]' FILE > FILE.jsonl makes them)"
