"""Where a tree is cut over ranks: each rank gets a range of rows with about the same work, some of them none.

    tree, number of ranks -> boundaries of the ranges, and the rows of others that each rank needs: its ancestors

In depth-first order a range of rows needs, of all rows outside it, exactly the ancestors of its first row
(docs/ranges.md). So a rank receives the keys and values of at most one sample, however many rows there are.

Costs O(N + ranks x length of a sample). Needs NumPy alone.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import PackError
from ..tree.ranges import ancestors_of

Index = npt.NDArray[np.int32]

__all__ = ["RowSplit", "check_heads", "even_edges", "row_work", "split_rows"]


class RowSplit(NamedTuple):
    """The rows of each of R ranks, in depth-first order, and what they exchange."""

    edges: Index
    """(R + 1,) int32: rank r has the rows [edges[r], edges[r + 1]); it may have none."""
    ancestors: list[Index]
    """R times (p,) int32: the ancestors of the first row of each rank, from the root down; all lie on ranks before it.
    Empty where a rank has no rows."""

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.ancestors)

    def send(self, rank: int) -> list[Index]:
        """R times int32: the rows of `rank`, counted from its first, that each rank needs, ascending."""
        start, stop = self.edges[rank], self.edges[rank + 1]
        return [rows[slice(*np.searchsorted(rows, (start, stop)))] - start for rows in self.ancestors]

    def receive(self, rank: int) -> list[int]:
        """R times: how many rows `rank` needs of each rank. In this order they are `ancestors[rank]`."""
        counts: list[int] = np.diff(np.searchsorted(self.ancestors[rank], self.edges)).tolist()
        return counts


def row_work(tree: Any) -> npt.NDArray[np.int64]:
    """(N,) int64: work of each row of a tree, by the rule that balances ranks in `pack`: the (query, key) pairs of the
    row, of which padding has none, and what a position costs beside them (docs/placement.md#ranks)."""
    host = tree.numpy()
    pairs = np.asarray(host.position_ids, np.int64) + 1
    pairs[int(host.cu_segments[-1]) :] = 0
    return pairs + _core.work(0, 1)


def split_rows(tree: Any, ranks: SupportsIndex) -> RowSplit:
    """Cut the rows of a tree, padding included, into one range for each rank, with as even work as whole rows allow.

    Every edge is the row boundary nearest to its share of the work, so no rank has more than an equal part and the work
    of one row. The same tree gives the same ranges on every rank.

    Args:
        tree: a tree on the host or on a device.
        ranks: R, 1 or more.

    Raises:
        PackError: `ranks` below 1.

    >>> import treepack
    >>> (tree,) = treepack.pack([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 5, 6]}], max_tokens=16)
    >>> split_rows(tree, 2)
    RowSplit(edges=array([0, 3, 6], dtype=int32), ancestors=[array([], dtype=int32), array([0, 1, 2], dtype=int32)])
    """
    count = index(ranks)
    if count < 1:
        raise PackError(f"ranks is {count}; allowed is 1 or more")
    done = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_work(tree))])
    shares = int(done[-1]) * np.arange(count + 1, dtype=np.int64)  # in parts of 1 / count, so that nothing is rounded
    after = np.searchsorted(done * count, shares)
    before = np.maximum(after - 1, 0)
    nearer = shares - done[before] * count < done[after] * count - shares
    edges = np.where(nearer, before, after).astype(np.int32)
    above = ancestors_of(tree.numpy(), edges[:-1])
    sizes = np.diff(edges).tolist()
    return RowSplit(edges, [rows if size else rows[:0] for rows, size in zip(above, sizes, strict=True)])


def even_edges(rows: int, ranks: int) -> Index:
    """(ranks + 1,) int32: so many rows over ranks, each about as many: where every rank attends to all rows for a part
    of the heads, they all weigh the same."""
    return (rows * np.arange(ranks + 1, dtype=np.int64) // ranks).astype(np.int32)


def check_heads(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    """ValueError where heads cannot be parted among ranks; `name`: whose they are."""
    what = f'shard="heads": {name} has'
    if heads % ranks:
        raise ValueError(
            f'{what} {heads} attention heads, which {ranks} ranks cannot part evenly; use shard="rows", which takes '
            "any number of ranks, or a mesh dimension that divides the heads"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"{what} {kv_heads} key and value heads: {ranks} ranks neither divide them nor are a multiple of them; "
            'use shard="rows", which takes any number of ranks'
        )
