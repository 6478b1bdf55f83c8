"""The compiled part of treepack. Use `treepack.pack`; these functions expect what `treepack.inputs` makes ready."""

from typing import Any, final

import numpy as np
import numpy.typing as npt

class PackError(ValueError):
    """Input that cannot be packed; says which sample, what it has, what is allowed."""

def columns(samples: list[Any], optional: list[str]) -> dict[Any, list[Any]]:
    """Turn a list of dicts into one list per column. Every sample must have the columns of the first, but for the
    `optional` ones, which are None where a sample lacks them and absent where all do."""

def first_unready(values: list[Any], dtype: np.dtype[Any], tail: list[int], start: int) -> int:
    """Index of the first value at or after `start` that is not a C-contiguous, aligned array of exactly this dtype
    with shape (any, *tail); the length if there is none."""

def pack(
    *,
    ids: list[npt.NDArray[np.int64]] | npt.NDArray[np.int64],
    mask: list[npt.NDArray[Any]] | npt.NDArray[Any] | None,
    identity: tuple[str, int, Any] | None,
    kept: tuple[Any, Any] | None,
    token_columns: list[tuple[str, int, Any]],
    sample_columns: list[tuple[str, int, npt.NDArray[Any], bool]],
    offsets: npt.NDArray[np.int64] | None,
    kept_offsets: npt.NDArray[np.int64] | None,
    max_tokens: int,
    max_terms: int | None,
    max_kept: int | None,
    vocab_size: int | None,
    label_branching: bool,
    first_seen: bool,
    first_fit: bool,
    skip_overlong: bool,
    pad_to_multiple_of: int,
    ranks: int,
) -> PackedTrees:
    """Pack columns that are lists of arrays, or flat arrays that are cut at `offsets`. Releases the GIL."""

@final
class PackedTrees:
    """The trees of one call."""

    def __len__(self) -> int: ...
    def buffer(self, index: int) -> npt.NDArray[np.uint8]:
        """Buffer of a tree, uint8 (nbytes,), without a copy."""

    def fields(self, index: int) -> list[tuple[str, int, int]]:
        """(name, offset in bytes, rows) of each array of a tree."""

    def disagreements(self, index: int) -> list[tuple[str, int, int, int]]:
        """(column, sample, sample, token) of each per-token column on which samples that share a position disagree."""

    def stats(self) -> dict[str, Any]:
        """Numbers over all trees, and milliseconds by phase."""

    def skipped(self) -> list[tuple[int, int, str]]:
        """(sample, tokens, reason) of each sample that was left out."""
