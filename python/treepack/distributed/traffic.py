"""What attention over several ranks costs on the wire: bytes that each rank receives in one layer, counted.

    rows      keys and values of the ancestors of a rank's first row; their gradients go back
    heads     queries, keys and values of all other rows, for a part of the heads; the outputs of own rows come back
    ring      keys and values of all other rows, block by block (samples alone)
    Ulysses   as heads (samples alone)

The first two are treepack's, the others what trainers run on plain sequences, where a shared token is there once for
each sample. One forward and one backward; gradient checkpointing runs a forward again within the backward, and pays
for it again. What the rest of a layer exchanges (gradients of weights, FSDP's gathers) is not in here.

Costs O(ranks x ancestors). Needs NumPy alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .split import RowSplit, check_heads, even_edges

Counts = npt.NDArray[np.int64]

__all__ = ["AttentionShape", "Traffic", "heads_traffic", "ring_traffic", "rows_traffic", "ulysses_traffic"]


class AttentionShape(NamedTuple):
    """The heads of a layer."""

    query_heads: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int = 2
    """2 for bfloat16."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of a row."""
        return 2 * self.kv_heads * self.head_dim * self.bytes_per_value


class Traffic(NamedTuple):
    """Bytes that each of R ranks receives in a layer, (R,) int64 each."""

    forward: Counts
    backward: Counts

    @property
    def total(self) -> int:
        """Of all ranks, forward and backward."""
        return int(self.forward.sum() + self.backward.sum())


def rows_traffic(split: RowSplit, shape: AttentionShape) -> Traffic:
    """`shard="rows"`: K and V of the ancestors of a rank's first row come in; in the backward their gradients come in
    where these rows are, from each rank that read them."""
    received = np.array([len(rows) for rows in split.ancestors], np.int64)
    sent = np.array([sum(map(len, split.send(rank))) for rank in range(split.ranks)], np.int64)
    return Traffic(received * shape.kv_bytes, sent * shape.kv_bytes)


def heads_traffic(rows: int, ranks: int, shape: AttentionShape) -> Traffic:
    """`shard="heads"` for a tree of so many rows: two all-to-alls. To attention each rank receives Q, K and V of all
    rows that it has not, for its part of the heads; from attention the outputs of its rows, for all other heads. The
    backward does the reverse.

    Raises:
        ValueError: heads that the ranks cannot part.
    """
    return _by_heads(rows, ranks, shape)


def ulysses_traffic(tokens: int, ranks: int, shape: AttentionShape) -> Traffic:
    """Ulysses over samples alone, of so many tokens in all, cut evenly: the two all-to-alls of `heads_traffic` (Jacobs
    et al. 2023, arXiv 2309.14509; K and V heads repeated where there are fewer than ranks)."""
    return _by_heads(tokens, ranks, shape)


def ring_traffic(tokens: int, ranks: int, shape: AttentionShape) -> Traffic:
    """Ring attention over samples alone, of so many tokens in all, cut evenly (Liu et al. 2023, arXiv 2310.01889):
    R - 1 times each rank passes a block of K and V on to the next, so it receives those of all other rows;
    a causal mask saves work and no block. In the backward K and V go round again, and with them their gradients, which
    take one more step to come home: those of all rows."""
    others = (tokens - np.diff(even_edges(tokens, ranks)).astype(np.int64)) * shape.kv_bytes
    gradients = tokens * shape.kv_bytes if ranks > 1 else 0
    return Traffic(others, others + gradients)


def _by_heads(rows: int, ranks: int, shape: AttentionShape) -> Traffic:
    """The all-to-alls of ranks that have about as many of these rows each."""
    check_heads("the layer", shape.query_heads, shape.kv_heads, ranks)
    one = shape.head_dim * shape.bytes_per_value
    queries = shape.query_heads // ranks
    inward = queries + 2 * max(shape.kv_heads // ranks, 1)  # Q, K and V heads of a rank
    own = np.diff(even_edges(rows, ranks)).astype(np.int64)
    others, away = rows - own, own * (ranks - 1)
    return Traffic((others * inward + away * queries) * one, (others * queries + away * inward) * one)
