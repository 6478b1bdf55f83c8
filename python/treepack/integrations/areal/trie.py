"""A packed tree -> the trie that AReaL 1.0.4 reads: nodes with inclusive index ranges, sequences and ancestors.

A node is a segment of the packed tree. What AReaL asks for each sequence (`all_sequence_ids`,
`get_sequence_tree_indices`) comes from the arrays, in O(segments of its path); nodes are made when they are first asked
for. Needs NumPy alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...tree.tree import HostTree

__all__ = ["PackedTrie", "TrieNode"]

Span = tuple[int, int]


class PackedTrie:
    """The root of one micro-batch's trie. It holds no tokens; a dummy holds no sequence either.

    Attributes:
        tree: the `PackedTree` on the host, padded to the micro-batch; None for a dummy.
        tree_id: place of the micro-batch.
        num_tokens: positions without padding; 0 for a dummy.
        all_sequence_ids: rows of the batch in this tree, ascending, rows without a token left out.
    """

    is_root = True
    start_idx = end_idx = -1
    tree_indices: Span = (-1, -1)

    def __init__(self, tree_id: int, tree: HostTree | None = None, rows: npt.NDArray[np.integer[Any]] | None = None):
        """`rows` (n,): the row of the batch of each of `tree.sample_index`, ascending."""
        self.tree_id = tree_id
        self.tree = tree
        self.num_tokens = 0 if tree is None else int(tree.cu_segments[-1])
        self._segments = _Segments(tree_id, tree, [] if rows is None else rows.tolist())

    @property
    def all_sequence_ids(self) -> list[int]:
        return list(self._segments.sequence_ids)

    @property
    def sequence_ids(self) -> list[int]:
        """Empty: the sequences of a root are `all_sequence_ids`."""
        return []

    @property
    def tokens(self) -> list[int]:
        """Empty, as at every root."""
        return []

    @property
    def ancestors(self) -> list[TrieNode]:
        """Empty, as at every root."""
        return []

    @cached_property
    def nodes(self) -> list[TrieNode]:
        """All nodes in pre-order, which is the order of their positions."""
        return [TrieNode(self._segments, segment) for segment in range(len(self._segments.parents))]

    @property
    def children(self) -> dict[int, TrieNode]:
        """Top nodes by their first token."""
        return self._segments.children(-1)

    def get_all_tree_indices(self) -> list[Span]:
        """Empty: a root has no ancestors."""
        return []

    def get_sequence_tree_indices(self, seq_id: int) -> list[Span]:
        """(start, end) of each node on the path of a sequence, root first, ends inclusive; [] if it is not here."""
        segment, spans, parents = self._segments.last.get(seq_id, -1), self._segments.spans, self._segments.parents
        path = []
        while segment >= 0:
            path.append(spans[segment])
            segment = parents[segment]
        path.reverse()
        return path

    def __repr__(self) -> str:
        return f"PackedTrie({self.tree_id}, {self.num_tokens} tokens, {len(self._segments.sequence_ids)} sequences)"


class TrieNode:
    """An unbranched run of tokens that the same sequences share."""

    __slots__ = ("_segment", "_segments")
    is_root = False

    def __init__(self, segments: _Segments, segment: int):
        self._segments = segments
        self._segment = segment

    @property
    def tree_id(self) -> int:
        return self._segments.tree_id

    @property
    def start_idx(self) -> int:
        """The first position."""
        return self.tree_indices[0]

    @property
    def end_idx(self) -> int:
        """The last position."""
        return self.tree_indices[1]

    @property
    def num_tokens(self) -> int:
        start, end = self.tree_indices
        return end - start + 1

    @property
    def tree_indices(self) -> Span:
        """First and last position."""
        return self._segments.spans[self._segment]

    @property
    def tokens(self) -> list[int]:
        assert self._segments.tree is not None  # a dummy has no nodes
        tokens: list[int] = self._segments.tree.input_ids[self.start_idx : self.end_idx + 1].tolist()
        return tokens

    @property
    def sequence_ids(self) -> list[int]:
        """Rows of the batch that pass through, ascending."""
        return list(self._segments.passing[self._segment])

    @property
    def all_sequence_ids(self) -> list[int]:
        """The same."""
        return self.sequence_ids

    @property
    def ancestors(self) -> list[TrieNode]:
        """Nodes above, the top one first."""
        path = self._segments.path(self._segment)
        return [TrieNode(self._segments, segment) for segment in path[:-1]]

    @property
    def children(self) -> dict[int, TrieNode]:
        """Nodes right below by their first token."""
        return self._segments.children(self._segment)

    @property
    def nodes(self) -> list[TrieNode]:
        """Empty: only a root lists its nodes."""
        return []

    def get_all_tree_indices(self) -> list[Span]:
        """(start, end) of the ancestors and of this node, the top one first."""
        return [*(node.tree_indices for node in self.ancestors), self.tree_indices]

    def get_sequence_tree_indices(self, seq_id: int) -> list[Span]:
        """Empty: asked of a root."""
        return []

    def __repr__(self) -> str:
        return f"TrieNode({self.start_idx}..{self.end_idx}, {len(self.sequence_ids)} sequences)"

    def __eq__(self, other: object) -> bool:
        """The same segment of the same trie: nodes are made anew where they are asked for."""
        same = isinstance(other, TrieNode) and self._segments is other._segments
        return same and self._segment == other._segment  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((id(self._segments), self._segment))


class _Segments:
    """The segments of one tree as lists. Nodes refer to it and nothing here refers to nodes: no cycle keeps the memory
    of a tree until the garbage collector comes by."""

    def __init__(self, tree_id: int, tree: HostTree | None, sequence_ids: list[int]):
        self.tree_id = tree_id
        self.tree = tree
        self.sequence_ids = sequence_ids

    @cached_property
    def spans(self) -> list[Span]:
        """First and last position of each segment."""
        if self.tree is None:
            return []
        cuts = self.tree.cu_segments
        return list(zip(cuts[:-1].tolist(), (cuts[1:] - 1).tolist(), strict=True))

    @cached_property
    def parents(self) -> list[int]:
        return [] if self.tree is None else self.tree.segment_parent.tolist()

    @cached_property
    def last(self) -> dict[int, int]:
        """The segment at which each sequence ends."""
        last = [] if self.tree is None else self.tree.sample_last_segment.tolist()
        return dict(zip(self.sequence_ids, last, strict=True))

    @cached_property
    def passing(self) -> list[list[int]]:
        """Sequences of each segment."""
        found: list[list[int]] = [[] for _ in self.parents]
        for sequence, last in self.last.items():
            for segment in self.path(last):
                found[segment].append(sequence)
        return found

    @cached_property
    def below(self) -> dict[int, list[int]]:
        """Segments below each segment, below the root at -1."""
        found: dict[int, list[int]] = {}
        for segment, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(segment)
        return found

    def path(self, segment: int) -> list[int]:
        """From a top segment down to this one."""
        path, parents = [], self.parents
        while segment >= 0:
            path.append(segment)
            segment = parents[segment]
        return path[::-1]

    def children(self, segment: int) -> dict[int, TrieNode]:
        """Nodes below by their first token."""
        nodes = [TrieNode(self, child) for child in self.below.get(segment, ())]
        return {} if self.tree is None else {int(self.tree.input_ids[node.start_idx]): node for node in nodes}
