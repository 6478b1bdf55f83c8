"""The compiled part of treepack. Use `treepack.pack`; these functions expect what `treepack.inputs` makes ready."""

from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["PackError", "PackStream", "PackedTrees", "columns", "first_unready", "pack"]

_Format = tuple[str, np.dtype[Any], list[int]]

class PackError(ValueError):
    """Input that cannot be packed; says which sample, what it has, what is allowed."""

def columns(samples: list[Any], optional: list[str]) -> dict[Any, list[Any]]:
    """Turn a list of dicts into one list per column. Every sample must have the columns of the first, but for the
    `optional` ones, which are None where a sample lacks them and absent where all do."""

def first_unready(values: list[Any], dtype: np.dtype[Any], tail: list[int], start: int) -> int:
    """Index of the first value at or after `start` that is not a C-contiguous, aligned array of exactly this dtype
    with shape (any, *tail); the length if there is none."""

def pack(columns: Any, keywords: dict[str, Any]) -> PackedTrees:
    """Pack `inputs.Inputs` under the keywords of `options.keywords`. Releases the GIL."""

@final
class PackStream:
    """Packs samples one by one."""

    def __new__(cls, keywords: dict[str, Any]) -> PackStream: ...
    def set_formats(
        self,
        ids: _Format,
        mask: _Format | None,
        kept: tuple[_Format, _Format] | None,
        tokens: list[_Format],
        scalars: list[tuple[_Format, bool]],
        identity: int | None,
    ) -> None:
        """Tell `add` what ready columns look like: (name, dtype, row shape) of ids, mask, kept ids and counts, per-token
        and per-sample columns, and which per-token column is the identity."""

    def add(self, sample: Any) -> tuple[PackedTrees | None, tuple[int, int, str] | None] | None:
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
