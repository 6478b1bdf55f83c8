"""Segments -> paths: which packed positions a sample, or the keys of a segment, consist of."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int32]


class VarlenIndex(NamedTuple):
    """Arguments of variable-length attention over the segments of a tree."""

    kv_index: Any
    """(sum of path lengths,) int64: packed positions of the keys of each segment, end to end."""
    cu_seqlens_q: Any
    """(S + 1,) int32"""
    cu_seqlens_k: Any
    """(S + 1,) int32"""
    max_seqlen_q: int
    max_seqlen_k: int


def path_index(cu_segments: Index, segment_parent: Index, last_segment: npt.NDArray[np.integer[Any]]) -> list[Index]:
    """Packed index of each token of the path that ends in each of `last_segment`, int32."""
    cuts, parents = cu_segments.tolist(), segment_parent.tolist()
    out = []
    for segment in last_segment.tolist():
        path = []
        while segment >= 0:
            path.append(np.arange(cuts[segment], cuts[segment + 1], dtype=np.int32))
            segment = parents[segment]
        out.append(np.concatenate(path[::-1]))
    return out


def sample_lengths(tree: Any) -> npt.NDArray[np.int64]:
    """(n,): tokens of each sample of a tree on the host; its last token has the largest depth."""
    last = tree.cu_segments[tree.sample_last_segment + 1] - 1
    return np.asarray(tree.position_ids[last] + 1, np.int64)


def term_tokens(tree: Any) -> list[tuple[Index, int]]:
    """For each sample of a tree on the host the tokens that its terms are of, and the number of its tokens."""
    of_terms = tree.position_ids[tree.row_position[tree.term_row]] + 1  # a term is scored at the token before
    cuts = pairwise(tree.cu_terms.tolist())
    return [
        (of_terms[start:end], tokens) for (start, end), tokens in zip(cuts, sample_lengths(tree).tolist(), strict=True)
    ]


def attention_mask(subtree_end: Index) -> npt.NDArray[np.bool_]:
    """(N, N): [q, k] is true where query q sees key k."""
    index = np.arange(len(subtree_end), dtype=np.int32)
    mask: npt.NDArray[np.bool_] = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    return mask


def varlen_index(cu_segments: Index, segment_parent: Index) -> tuple[Any, Index, Index, int, int]:
    """The fields of `VarlenIndex`."""
    segments = np.arange(len(segment_parent), dtype=np.int32)
    keys = path_index(cu_segments, segment_parent, segments)
    lengths = np.array([len(path) for path in keys], np.int64)
    cu_k = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kv_index = np.concatenate(keys or [np.zeros(0, np.int32)]).astype(np.int64)
    max_q = int(np.diff(cu_segments).max(initial=0))
    return kv_index, cu_segments.copy(), cu_k, max_q, int(lengths.max(initial=0))
