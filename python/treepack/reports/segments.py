"""A tree to the numbers of its segments, and which positions are trained: NumPy throughout, O(N + M + R log S)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..tree.tree import HostTree

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Segments(NamedTuple):
    """The S unbranched runs of a tree, depth-first; all (S,) int64 but `trained`."""

    start: Numbers
    """First position."""
    tokens: Numbers
    depth: Numbers
    """Depth of the first token."""
    parent: Numbers
    """-1 at a root."""
    subtree_end: Numbers
    """One past the last segment below: the segments below s are `s + 1 .. subtree_end[s] - 1`."""
    samples: Numbers
    """Samples that pass through."""
    trained: Flags
    """(positions without padding,): whether any sample trains the token there."""
    terms: Numbers
    """Loss terms whose target token lies in the segment, of all samples."""

    @property
    def trained_tokens(self) -> Numbers:
        """(S,) int64: trained positions of each segment."""
        total = np.concatenate([[0], np.cumsum(self.trained)])
        return np.asarray(total[self.start + self.tokens] - total[self.start], np.int64)


def segments_of(tree: HostTree) -> Segments:
    """The segments of a tree with NumPy arrays."""
    cu = tree.cu_segments.astype(np.int64)
    start = cu[:-1]
    terms = terms_at_positions(tree)
    return Segments(
        start=start,
        tokens=np.diff(cu),
        depth=tree.position_ids[start],
        parent=tree.segment_parent.astype(np.int64),
        subtree_end=np.searchsorted(start, tree.subtree_end[start]).astype(np.int64),
        samples=tree.position_samples[start].astype(np.int64),
        trained=terms > 0,
        terms=np.add.reduceat(terms, start) if len(start) else np.zeros(0, np.int64),
    )


def terms_at_positions(tree: HostTree) -> Numbers:
    """(positions without padding,) int64: of how many terms of all samples the token there is the target.

    The target of a term lies right after its row, or, where the row ends its segment, at the start of the child segment
    on the way to the last segment of the sample. Segments are in pre-order, so that child is the last child of the
    row's segment at or before the sample's last one: one binary search for each such term.
    """
    cu = tree.cu_segments.astype(np.int64)
    parents = tree.segment_parent.astype(np.int64)
    segments = len(parents)
    counts = np.zeros(cu[-1], np.int64)
    position = tree.row_position.astype(np.int64)
    segment = np.searchsorted(cu, position, side="right") - 1
    ends = position + 1 == cu[segment + 1]
    of_row = np.bincount(tree.term_row, minlength=len(position))
    counts[position[~ends] + 1] = of_row[~ends]

    keys = parents * segments + np.arange(segments)  # children of one parent lie side by side once sorted
    keys.sort()
    terms = np.flatnonzero(ends[tree.term_row])
    row, last = tree.term_row[terms], tree.sample_last_segment[tree.term_sample[terms]]
    child = keys[np.searchsorted(keys, segment[row] * segments + last, side="right") - 1] % max(segments, 1)
    counts += np.bincount(cu[child], minlength=len(counts))
    return counts
