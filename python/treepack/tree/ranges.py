"""A tree as ranges of rows: what `pack(..., cut=True)` gives a tree, so that it runs range by range.

In depth-first order a range of rows needs, beside itself, exactly the ancestors of its first row (docs/ranges.md).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import PackError
from .segments import path_index

Index = npt.NDArray[np.int32]

__all__ = ["InRanges", "Range", "ancestors_of", "cut"]


class Range(NamedTuple):
    """Rows [start, stop) of a tree, and the rows above them."""

    start: int
    stop: int
    ancestors: Index
    """(p,) int32: the ancestors of the first row, from the root down; all lie before `start`."""


class InRanges:
    """The ranges of a tree."""

    _cuts: Index | None

    @property
    def cu_ranges(self) -> Index:
        """(K + 1,) int32, NumPy on every device: boundaries of the ranges. An uncut tree is one range of all rows."""
        rows: int = self.num_tokens  # type: ignore[attr-defined]
        return np.array([0, rows], np.int32) if self._cuts is None else self._cuts

    @property
    def ranges(self) -> list[Range]:
        """The ranges in depth-first order, each with its ancestors."""
        cuts = self.cu_ranges
        above = ancestors_of(self.numpy(), cuts[:-1])  # type: ignore[attr-defined]
        return [Range(start, stop, rows) for (start, stop), rows in zip(pairwise(cuts.tolist()), above, strict=True)]


def ancestors_of(host: Any, rows: Index) -> list[Index]:
    """The rows above each of some ascending rows of a tree on the host, from the root down."""
    segments = np.searchsorted(host.cu_segments, rows, side="right") - 1
    segments = segments[segments < len(host.segment_parent)]  # rows after these are padding
    paths = path_index(host.cu_segments, host.segment_parent, segments)
    below = host.cu_segments[segments + 1] - rows[: len(segments)]
    above = [path[: len(path) - after] for path, after in zip(paths, below.tolist(), strict=True)]
    return above + [np.zeros(0, np.int32)] * (len(rows) - len(segments))


def cut(tree: Any, max_tokens: int, max_ancestors: int | None) -> None:
    """Cuts a tree on the host into ranges of at most `max_tokens` rows with at most `max_ancestors` ancestors.

    Raises:
        PackError: more rows than `max_tokens` follow each other that are deeper than `max_ancestors`.
    """
    if not tree.num_samples:
        return
    most = 2**31 - 1
    deepest = most if max_ancestors is None else min(max_ancestors, most)
    boundaries, row = _core.cut_rows(tree.cu_segments, tree.segment_parent, min(max_tokens, most), deepest)
    if boundaries is None:
        raise _too_deep(tree, row, min(max_tokens, most), deepest)
    boundaries[-1] = tree.num_tokens
    tree._cuts = boundaries


def _too_deep(tree: Any, row: Any, max_tokens: int, max_ancestors: int) -> PackError:
    """The error for the rows from `row` on, of which only the first may begin a range."""
    shallow = np.flatnonzero(tree.position_ids[row + 1 :] <= max_ancestors)
    rows = int(shallow[0]) + 1 if len(shallow) else tree.num_tokens - int(row)
    last = tree.cu_segments[tree.sample_last_segment + 1] - 1
    below = np.flatnonzero((last > row) & (last < tree.subtree_end[row]))
    tokens = _smallest(lambda tried: _can_cut(tree, tried, max_ancestors), max_tokens, tree.num_tokens)
    ancestors = _smallest(lambda tried: _can_cut(tree, max_tokens, tried), max_ancestors, tree.num_tokens)
    return PackError(
        f"{rows} rows lie below its first {max_ancestors} tokens without a row between them that has fewer ancestors, "
        f"so they are one range; max_tokens={max_tokens} is the most a range may hold, max_ancestors={max_ancestors} "
        f"the most ancestors that it may have: raise max_tokens to {tokens} or max_ancestors to {ancestors}",
        sample=int(tree.sample_index[below].min()),
        budget="max_ancestors",
        needs=ancestors,
    )


def _can_cut(tree: Any, max_tokens: int, max_ancestors: int) -> bool:
    return _core.cut_rows(tree.cu_segments, tree.segment_parent, max_tokens, max_ancestors)[0] is not None


def _smallest(works: Callable[[int], bool], fails: int, enough: int) -> int:
    """The smallest number that works, between one that does not and one that does."""
    while enough - fails > 1:
        middle = (fails + enough) // 2
        fails, enough = (fails, middle) if works(middle) else (middle, enough)
    return enough
