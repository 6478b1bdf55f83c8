"""The numbers of all trees: from the call's own statistics, or counted from the trees where there is only a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._core import PackError
from ..tree.packed import Packed
from ..tree.segments import sample_lengths
from ..tree.tree import PackedTree

#: What a report is about: a packing, a tree, trees, or micro-batches of `treepack.Packer` (trees of all ranks each).
Trees = Packed | PackedTree | Sequence[PackedTree] | Sequence[Sequence[PackedTree]]


@dataclass(frozen=True)
class Totals:
    samples: int
    raw_tokens: int
    packed_tokens: int
    """Positions without padding."""
    trees: int
    terms: int
    padding: int
    attention_pairs: int
    attention_pairs_alone: int
    largest_tree: int
    """Positions of the largest tree, without padding."""
    skipped: int
    """Samples that fit no tree; 0 for a list of trees, which does not know."""

    @property
    def packing_ratio(self) -> float:
        return self.raw_tokens / self.packed_tokens if self.packed_tokens else 1.0

    @property
    def fill(self) -> float:
        """Positions of the mean tree over those of the largest one; the budget itself is not kept in a packing."""
        return self.packed_tokens / (self.trees * self.largest_tree) if self.largest_tree else 1.0

    @property
    def attention_saved(self) -> float:
        """Share of the (query, key) pairs of the samples alone that the trees do not compute."""
        return 1 - self.attention_pairs / self.attention_pairs_alone if self.attention_pairs_alone else 0.0


def trees_of(packed: Trees) -> list[PackedTree]:
    """The trees with NumPy arrays.

    Raises:
        PackError: something else than a `Packed`, a tree or trees.
    """
    if isinstance(packed, PackedTree):
        packed = [packed]
    if not isinstance(packed, Sequence):
        raise PackError(f"report() takes {_TAKES}; it got {_kind(packed)}")
    trees: list[PackedTree] = []
    for place, item in enumerate(packed):
        micro_batch = item if isinstance(item, list | tuple) else [item]  # of `Packer`: the trees of all ranks
        for tree in micro_batch:
            if not isinstance(tree, PackedTree):
                raise PackError(f"report() takes {_TAKES}; item {place} is {_kind(item)}: pack the samples first")
            trees.append(tree.numpy())
    return trees


_TAKES = "what pack() returns, or a list of its trees or of the micro-batches of a Packer"


def totals_of(packed: Trees, trees: Sequence[PackedTree]) -> Totals:
    """`trees` are those of `packed`, with NumPy arrays."""
    largest = max((_positions(tree) for tree in trees), default=0)
    if isinstance(packed, Packed):
        stats = packed.stats
        return Totals(
            samples=stats.samples,
            raw_tokens=stats.raw_tokens,
            packed_tokens=stats.packed_tokens,
            trees=stats.trees,
            terms=stats.terms,
            padding=stats.padding,
            attention_pairs=stats.attention_pairs,
            attention_pairs_alone=stats.attention_pairs_alone,
            largest_tree=largest,
            skipped=stats.skipped,
        )
    lengths = [sample_lengths(tree) for tree in trees]
    positions = sum(_positions(tree) for tree in trees)
    return Totals(
        samples=sum(len(each) for each in lengths),
        raw_tokens=sum(int(each.sum()) for each in lengths),
        packed_tokens=positions,
        trees=len(trees),
        terms=sum(len(tree.term_row) for tree in trees),
        padding=sum(tree.num_tokens for tree in trees) - positions,
        attention_pairs=sum(int((tree.position_ids[: _positions(tree)] + 1).sum()) for tree in trees),
        attention_pairs_alone=sum(int((each * (each + 1) // 2).sum()) for each in lengths),
        largest_tree=largest,
        skipped=0,
    )


def _positions(tree: PackedTree) -> int:
    return int(tree.cu_segments[-1])


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
