"""Which program of the walk visits which chunks: the forest cut in chunks and in paths, from its segments.

    chunk    at most `size` tokens of one segment
    path     segments from one that waits for its parent down to a leaf, each the parent of the next: one program
             carries the state along them in registers. At a fork the path goes on with the child that has the most
             chunks below it; every other child begins a path of its own.
    fork     a chunk at whose end paths begin: the state after it is stored for them

Paths are listed by the number of chunks above them. A program takes the next of the list, so whatever it waits for was
taken before: forward the path of its fork, backward (the list reversed) the paths that begin at its forks.

Host arrays, O(segments + chunks), made once for a forest and a chunk size and kept with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .metadata import TreeSegments

PATHS, CHUNKS = 4, 4  # columns


class Sizes(NamedTuple):
    """Chunks that a scan can be walked in."""

    tokens: tuple[int, ...]
    """Tokens of a chunk, ascending."""
    fixed: int
    """A chunk costs as much as so many tokens before its first one, as measured."""


class Walk(NamedTuple):
    """On the device; int32 but for what flash-linear-attention reads."""

    size: int
    """Tokens of a chunk."""
    tokens: int
    """Real tokens; rows of padding come after them."""
    paths: Tensor
    """(P, 4): first chunk, one past the last, the fork that it begins at or -1, and the number of paths of that fork
    that add their gradient before it."""
    chunks: Tensor
    """(C, 4): first token, tokens, its fork or -1, the number of paths that begin there. In the order of `paths`."""
    forks: int
    narrow: bool
    """Whether one path has most of the chunks, so that few run side by side."""
    cu_seqlens: Tensor
    """(S + 1,) int64: the segments as sequences."""
    chunk_indices: Tensor
    """(C, 2) int64: segment and number within it of each of `chunks`."""


def walk(tree: TreeSegments, size: int) -> Walk:
    """The walk over a forest in chunks of `size` tokens.

    Raises:
        ValueError: padding that lies between trees: the segments must be one range.
    """
    key = ("walk", size)
    if key not in tree.cache:
        paths, chunks, indices, forks = _plan(tree.starts, tree.stops, tree.segment_parent, size)
        on, chunk_indices = tree.to_device, indices.astype(np.int64)
        cu_seqlens, tokens = tree.cu_segments.astype(np.int64), tree.contiguous_tokens()
        narrow = bool(len(paths)) and 2 * int((paths[:, 1] - paths[:, 0]).max()) > len(chunks)
        tree.cache[key] = Walk(size, tokens, on(paths), on(chunks), forks, narrow, on(cu_seqlens), on(chunk_indices))
    kept: Walk = tree.cache[key]
    return kept


def chunk_size(tree: TreeSegments, sizes: Sizes) -> int:
    """Which of `sizes` a forest is walked in: smaller where segments are so short that chunks would be empty."""
    key = ("chunk size", sizes)
    if key not in tree.cache:
        lengths = tree.stops - tree.starts
        tree.cache[key] = min(
            reversed(sizes.tokens), key=lambda size: int((-(-lengths // size)).sum()) * (sizes.fixed + size)
        )
    kept: int = tree.cache[key]
    return kept


def _plan(
    starts: npt.NDArray[np.int32], stops: npt.NDArray[np.int32], parents: npt.NDArray[np.int32], size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """(paths, chunks, chunk_indices, forks) of `Walk`."""
    lengths, above = stops - starts, parents.tolist()
    counts = (-(-lengths // size)).tolist()
    segments = len(counts)
    longest, heavy = list(counts), [-1] * segments  # chunks from here to the farthest leaf, the child on that way
    for s in range(segments - 1, -1, -1):  # children come after their parent
        p = above[s]
        if p >= 0 and counts[p] + longest[s] >= longest[p]:  # >=: of equals the first, which lies next to p
            longest[p], heavy[p] = counts[p] + longest[s], s
    before = [0] * segments  # chunks above
    for s, p in enumerate(above):
        before[s] = before[p] + counts[p] if p >= 0 else 0
    heads = [s for s, p in enumerate(above) if p < 0 or heavy[p] != s]
    heads.sort(key=lambda s: (before[s], -longest[s]))

    fork_of: dict[int, int] = {}  # segment: the number of its fork
    children = [0] * segments
    for s in heads:
        if above[s] >= 0:
            fork_of.setdefault(above[s], len(fork_of))
            children[above[s]] += 1
    paths, order = [], []  # order: segments as the paths visit them
    first = 0
    waiting = list(children)  # of each fork, paths not listed yet: backward these come first
    for s in heads:
        p, last = above[s], first
        segment = s
        while segment >= 0:
            order.append(segment)
            last += counts[segment]
            segment = heavy[segment]
        if p >= 0:
            waiting[p] -= 1
        paths.append((first, last, fork_of.get(p, -1), waiting[p] if p >= 0 else 0))
        first = last

    visited = np.asarray(order, np.int64)
    n = np.asarray(counts, np.int64)[visited]
    of_chunk = np.repeat(visited, n)
    within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    chunks = np.zeros((len(of_chunk), CHUNKS), np.int32)
    chunks[:, 0] = starts[of_chunk] + within * size
    chunks[:, 1] = np.minimum(size, stops[of_chunk] - chunks[:, 0])
    last_of_segment = within == np.repeat(n, n) - 1
    forks = np.asarray([fork_of.get(s, -1) for s in range(segments)], np.int32)
    chunks[:, 2] = np.where(last_of_segment, forks[of_chunk], -1)
    chunks[:, 3] = np.where(last_of_segment, np.asarray(children, np.int32)[of_chunk], 0)
    indices = np.stack([of_chunk, within], 1).astype(np.int32)
    return np.asarray(paths, np.int32).reshape(-1, PATHS), chunks, indices, len(fork_of)
