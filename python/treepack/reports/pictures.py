"""The attention mask of a tree, and its tiles, as pictures of a bounded size.

A cell of a picture is a square of `step` x `step` pairs (or tiles) and holds the share of them that is visible. Key k
is seen by the queries `k .. subtree_end[k] - 1`: a range of the column of k, whose share in every cell is a running sum
of four differences. O(N + cells) for any tree, nothing of N x N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .segments import Numbers

if TYPE_CHECKING:
    from ..tree.tree import HostTree

TILE = 128


class Mask(NamedTuple):
    """(P, P) cells, queries down and keys to the right."""

    step: int
    """Positions along one side of a cell."""
    pairs: Numbers
    """(P, P) int64: visible (query, key) pairs in each cell."""
    shares: npt.NDArray[np.float64]
    """(P, P): the same over all pairs of the cell."""


class Tiles(NamedTuple):
    """(P, P) cells of tiles of 128 x 128, query tiles down and key tiles to the right."""

    step: int
    """Tiles along one side of a cell."""
    side: int
    """Tiles along one side of the whole mask."""
    full: int
    partial: int
    """Tiles of each kind, as the forward kernel takes them; the others are empty."""
    full_shares: npt.NDArray[np.float64]
    partial_shares: npt.NDArray[np.float64]


def mask_of(subtree_end: npt.NDArray[np.int32], pixels: int) -> Mask:
    """The mask in at most `pixels` x `pixels` cells."""
    n = len(subtree_end)
    step = max(-(-n // pixels), 1)
    cells = -(-n // step)
    key = np.arange(n)
    pairs = _ranges(key, subtree_end.astype(np.int64), key // step, step, cells).T
    return Mask(step, pairs, pairs / _areas(n, step))


def tiles_of(tree: HostTree, pixels: int) -> Tiles:
    """The tile lists of the forward kernel (see attention/tiles.py) in at most `pixels` x `pixels` cells."""
    rows, items = tree.tiles[TILE]
    rows, items = rows.astype(np.int64), items.astype(np.int64)
    count = len(rows)
    step = max(-(-count // pixels), 1)
    cells = -(-count // step)
    start, runs, _, partials = rows.T
    query = np.arange(count) // step
    run = start.repeat(runs) + 2 * _count_up(runs)
    full = _ranges(items[run], items[run + 1], query.repeat(runs), step, cells)
    alone = items[(start + 2 * runs).repeat(partials) + _count_up(partials)]
    partial = np.bincount(query.repeat(partials) * cells + alone // step, minlength=cells * cells)
    areas = _areas(count, step)
    return Tiles(
        step,
        count,
        int(rows[:, 2].sum()),
        int(rows[:, 3].sum()),
        full / areas,
        partial.reshape(cells, cells) / areas,
    )


def grey(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Shares as bytes, 0 only where the share is 0."""
    return np.ceil(shares * 255).astype(np.uint8)


def _ranges(first: Numbers, last: Numbers, row: Numbers, step: int, cells: int) -> Numbers:
    """(cells, cells) int64: how many of the numbers `first .. last - 1` lie in each cell of each row."""
    differences = np.zeros(cells * (cells + 2), np.int64)
    for edge, sign in ((first, -1), (last, 1)):
        # All numbers below `edge`: `step` in each cell before its own, the rest in its own, none after.
        at = row * (cells + 2) + edge // step
        for shift, amount in ((0, edge % step - step), (1, -(edge % step))):
            differences += sign * np.bincount(at + shift, amount, differences.size).astype(np.int64)
    return np.asarray(differences.reshape(cells, cells + 2).cumsum(axis=1)[:, :cells], np.int64)


def _count_up(counts: Numbers) -> Numbers:
    """0 .. counts[i] - 1 for each i, end to end."""
    starts = counts.cumsum() - counts
    return np.arange(counts.sum()) - starts.repeat(counts)


def _areas(n: int, step: int) -> Numbers:
    """(cells, cells): how much of `n` x `n` each cell covers; the last ones may be cut."""
    sides = np.minimum(np.arange(0, n, step) + step, n) - np.arange(0, n, step)
    return np.asarray(np.outer(sides, sides), np.int64)
