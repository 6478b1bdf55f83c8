"""The compiled part of treepack. Use `treepack.pack`; these functions expect what `treepack.inputs` makes ready."""

from typing import Any, final

import numpy as np
import numpy.typing as npt

from .errors import PackError

__all__ = [
    "ALIGN",
    "ARRAYS",
    "TILE_SIZES",
    "Formats",
    "PackError",
    "PackStream",
    "PackedTrees",
    "columns",
    "cut_rows",
    "first_unready",
    "mask_bytes",
    "pack",
    "pack_ready",
    "tile_lists",
    "token_spans",
    "work",
]

_Format = tuple[str, np.dtype[Any], list[int]]

ALIGN: int
"""Every array of a tree starts at a multiple of this many bytes."""

ARRAYS: tuple[tuple[str, str, str, str], ...]
"""(name, dtype, length, when) of the arrays of a tree in the order of their buffer. Lengths are in the letters of
docs/layout.md: "N", "S+1", ...; when there is one: "always", "label branching" or "kept sets"."""

TILE_SIZES: tuple[int, ...]
"""Tile sizes of the lists that attention reads: the forward kernels the first, those of dQ the second."""

def columns(samples: list[Any], optional: list[str]) -> dict[Any, list[Any]]:
    """Turn a list of dicts into one list per column. Every sample must have the columns of the first, but for the
    `optional` ones, which are None where a sample lacks them and absent where all do."""

def first_unready(values: list[Any], dtype: np.dtype[Any], tail: list[int], start: int) -> int:
    """Index of the first value at or after `start` that is not a C-contiguous, aligned array of exactly this dtype
    with shape (any, *tail); the length if there is none."""

def mask_bytes(
    mask: npt.NDArray[Any], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8] | None:
    """Turn a flat mask of any integer dtype, cut into samples, into (tokens of the samples,), end to end. None where a
    value is neither 0 nor 1."""

def pack(columns: Any, keywords: dict[str, Any]) -> PackedTrees:
    """Pack `inputs.Inputs` under `PackOptions.for_rust()`. Releases the GIL."""

def pack_ready(samples: list[Any], formats: Formats, keywords: dict[str, Any]) -> PackedTrees | None:
    """Pack a list of dicts whose columns are all ready; None if one is not. Releases the GIL."""

def cut_rows(
    cu_segments: npt.NDArray[np.int32], segment_parent: npt.NDArray[np.int32], max_rows: int, max_ancestors: int
) -> tuple[npt.NDArray[np.int32] | None, int | None]:
    """(boundaries of the ranges, None), or (None, row) where the rows that follow this one cannot be cut so."""

def tile_lists(
    cu_segments: npt.NDArray[np.int32], subtree_end: npt.NDArray[np.int32], tile: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(rows, items) for tiles of `tile` tokens: rows are (tiles, 4) flat, items (T,); see `attention/tiles.py`."""

def token_spans(mask: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """(starts, ends), each (B,): where the tokens of each row of an attention mask (B, S), of integers or booleans, lie
    in the flattened batch. None where a row has a hole between tokens, or a value that is neither 0 nor 1, and where
    rows have no width."""

def work(pairs: int, tokens: int) -> int:
    """Work of trees with so many (query, key) pairs and positions, by which ranks are balanced."""

@final
class Formats:
    """What the columns of ready samples look like: (name, dtype, row shape) of each."""

    def __new__(
        cls,
        ids: _Format,
        mask: _Format | None,
        kept: tuple[_Format, _Format] | None,
        tokens: list[_Format],
        scalars: list[tuple[_Format, bool]],
        identity: int | None,
    ) -> Formats: ...

@final
class PackStream:
    """Packs samples one by one."""

    def __new__(cls, keywords: dict[str, Any]) -> PackStream: ...
    def add(self, sample: Any, formats: Formats) -> tuple[PackedTrees | None, tuple[int, int, str] | None] | None:
        """Add a sample whose columns are all ready; None if they are not."""

    def add_columns(self, columns: Any) -> tuple[PackedTrees | None, tuple[int, int, str] | None]:
        """Add the one sample of an `inputs.Inputs`."""

    def flush(self) -> PackedTrees | None:
        """Close the open micro-batch; None if there is none."""

@final
class PackedTrees:
    """The trees of one call."""

    def __len__(self) -> int: ...
    def buffer(self, index: int) -> npt.NDArray[np.uint8]:
        """Buffer of a tree, uint8 (nbytes,), without a copy."""

    def fields(self, index: int) -> dict[str, tuple[int, int]]:
        """Offset in bytes and rows of each array of a tree, by name."""

    def disagreements(self, index: int) -> list[tuple[str, int, int, int]]:
        """(column, sample, sample, token) of each per-token column on which samples that share a position disagree."""

    def stats(self) -> dict[str, Any]:
        """Numbers over all trees, and milliseconds by phase."""

    def skipped(self) -> list[tuple[int, int, str]]:
        """(sample, tokens, reason) of each sample that was left out."""
