"""NPZ: `tokens` (T,) and `offsets` (n + 1,), the columns (T, ...) per token or (n, ...) per sample.

A member is a stream, compressed or not: columns per token are read as far as the next chunk, side by side. `offsets`
and columns per sample are kept whole: O(n), never O(T). Skipping within a compressed member means decompressing what
is skipped. Kept sets, whose rows are neither, are not read from this format.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import listed
from .source import CHUNK_TOKENS, Chunk, ReadError, first_line

Array = npt.NDArray[Any]

OFFSETS = ("offsets", "cu_seqlens")
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)  # the last: encrypted


class Npz:
    """An NPZ file of flat arrays."""

    unit = "sample"

    def __init__(self, path: Path):
        self.path = path
        self.fraction = 0.0
        try:
            with zipfile.ZipFile(path) as file:
                members = [name for name in file.namelist() if name.endswith(".npy")]
                self._headers = {name.removesuffix(".npy"): _head(file, name) for name in members}
        except _BROKEN as error:
            raise ReadError(f"{path}: not an NPZ file of plain arrays: {first_line(error)}") from None
        offsets = next((name for name in OFFSETS if name in self._headers), None)
        if offsets is None:
            names = listed(self._headers) or "nothing"
            raise ReadError(f"{path}: no offsets (n + 1,) of the samples in flat tokens (T,); it has {names}")
        self.names = [name for name in self._headers if name != offsets]
        self._offsets = self._read_offsets(offsets)
        self.size: int | None = len(self._offsets) - 1

    def chunks(self, names: Sequence[str], samples: int, start: int, optional: Collection[str] = ()) -> Iterator[Chunk]:
        names = [name for name in names if name not in optional or self._rows(name) in (self._tokens, self.size)]
        flat = [name for name in names if self._per_token(name)]
        size = len(self._offsets) - 1
        with ExitStack() as stack:
            file = stack.enter_context(zipfile.ZipFile(self.path))
            streams = {name: _Stream(stack, file, self.path, name) for name in flat}
            whole = {name: self._whole(file, name) for name in names if name not in flat}
            a = start
            while a < size:
                wanted = int(self._offsets[a]) + CHUNK_TOKENS
                b = min(max(int(np.searchsorted(self._offsets, wanted, side="right")) - 1, a + 1), a + samples)
                b = min(b, size)
                ends = self._offsets[a : b + 1]
                columns = {name: values[a:b] for name, values in whole.items()}
                for name, stream in streams.items():
                    columns[name] = _cut(stream, ends)
                yield Chunk(range(a, b), columns)
                self.fraction = b / size
                a = b

    @property
    def _tokens(self) -> int:
        return int(self._offsets[-1])

    def _rows(self, name: str) -> int:
        shape, _ = self._headers[name]
        return shape[0] if shape else 0

    def _per_token(self, name: str) -> bool:
        rows, tokens = self._rows(name), self._tokens
        if rows in (tokens, self.size):
            return rows == tokens
        shape, _ = self._headers[name]
        raise ReadError(
            f"{self.path}: {name} has shape {shape}; needed is a row for each of the {tokens} tokens or {self.size} "
            "samples"
        )

    def _whole(self, file: zipfile.ZipFile, name: str) -> list[Any]:
        with ExitStack() as stack:
            values = _Stream(stack, file, self.path, name).rows(0, len(self._offsets) - 1)
        return list(values.tolist()) if values.ndim == 1 else list(values)

    def _read_offsets(self, name: str) -> npt.NDArray[np.int64]:
        shape, dtype = self._headers[name]
        if len(shape) != 1 or shape[0] == 0 or dtype.kind not in "iu":
            raise ReadError(f"{self.path}: {name} has shape {shape} and dtype {dtype}; integers (n + 1,) are needed")
        with zipfile.ZipFile(self.path) as file, ExitStack() as stack:
            offsets = _Stream(stack, file, self.path, name).rows(0, shape[0]).astype(np.int64)
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ReadError(f"{self.path}: {name} must start at 0 and never fall")
        return offsets


def _cut(stream: _Stream, ends: npt.NDArray[np.int64]) -> list[Any]:
    """The rows of each sample between these offsets."""
    values = stream.rows(int(ends[0]), int(ends[-1]))
    at = ends - ends[0]
    return [values[at[i] : at[i + 1]] for i in range(len(ends) - 1)]


class _Stream:
    """Rows of one member, read forward."""

    def __init__(self, stack: ExitStack, file: zipfile.ZipFile, path: Path, name: str):
        self._where = f"{path}, column {name}"
        self._stream = stack.enter_context(file.open(f"{name}.npy"))
        self._shape, self._dtype = _header(self._stream, name)
        self._row = prod(self._shape[1:]) * self._dtype.itemsize
        self._start = self._stream.tell()

    def rows(self, a: int, b: int) -> Array:
        wanted = self._start + a * self._row
        try:
            if wanted != self._stream.tell():
                self._stream.seek(wanted)
            data = self._stream.read((b - a) * self._row)
        except _BROKEN as error:
            raise ReadError(f"{self._where}: it cannot be read: {first_line(error)}") from None
        if len(data) < (b - a) * self._row:
            raise ReadError(f"{self._where}: it ends before row {b}")
        return np.frombuffer(data, self._dtype).reshape(b - a, *self._shape[1:])


def _head(file: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with file.open(member) as stream:
        return _header(stream, member)


def _header(stream: IO[bytes], member: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a member; the stream is then behind its header."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{member} is of .npy version {version}; allowed are {list(readers)}")
    shape, fortran, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError(f"{member} holds Python objects; plain numbers are needed")
    if fortran and len(shape) > 1:
        raise ValueError(f"{member} is in Fortran order; save it with np.ascontiguousarray")
    return shape, dtype
