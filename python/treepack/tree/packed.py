"""Packed: the trees of a call and its numbers; and what every sequence of trees says where it is taken for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np

from .._core import PackError
from .device import spread
from .mesh import Mesh, rank_of
from .notebook import html_of
from .ranges import cut
from .tree import HostTree, PackedTree

if TYPE_CHECKING:
    from .._core import PackedTrees
    from ..inputs.columns import Format

    Values = TypeVar("Values")


class Skipped(NamedTuple):
    """A sample that fits no tree and was left out: its index, its length, why."""

    sample: int
    tokens: int
    reason: str


@dataclass(frozen=True)
class Stats:
    """Numbers over all trees of a call. Samples that were skipped count in `skipped` alone."""

    samples: int
    raw_tokens: int
    packed_tokens: int
    """Positions without padding."""
    packing_ratio: float
    """raw_tokens / packed_tokens, at least 1."""
    trees: int
    terms: int
    kept_ids: int
    skipped: int
    padding: int
    attention_pairs: int
    """(query, key) pairs that attention computes: the sum of depth + 1."""
    attention_pairs_alone: int
    """The same with each sample run alone."""
    imbalance: float
    """Work of the slowest rank over the mean, summed over micro-batches; 1 is even."""
    balance_tokens: int
    """Positions that balancing over ranks cost."""
    dummies: int
    """Trees without a sample, which keep the number of trees of all ranks the same."""
    milliseconds: dict[str, float]
    """Host time by phase."""


class TreeSequence(Sequence[HostTree]):
    """A sequence of trees, with errors for what is easily mistaken."""

    if not TYPE_CHECKING:  # a type checker says it by itself

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name.startswith("_") or not (hasattr(PackedTree, name) or name in ("buffer", "derived")):
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            raise AttributeError(
                f"{name!r} is of a tree, and {kind} is a sequence of {len(self)}: loop over it (for tree in trees: "
                f"tree.{name}), or take the only one by (tree,) = trees"
            )

    def _index_error(self, index: object) -> IndexError:
        return IndexError(f"tree {index} is asked for; there are {len(self)}, counted from 0")


class Packed(TreeSequence):
    """The trees of one call, micro-batch by micro-batch and rank by rank within it. Trees are made when they are first
    asked for; their arrays are never copied. What is pickled holds a copy of all of them."""

    def __init__(
        self,
        core: PackedTrees,
        formats: Mapping[str, Format],
        options: Any,
        started: float,
        per_token: Sequence[str] = (),
        per_sample: Sequence[str] = (),
    ):
        self.options = options
        """How it was packed: `treepack.packing.options.PackOptions`, the options of the call by their names."""
        self.per_token, self.per_sample = tuple(per_token), tuple(per_sample)
        """What the call said of the columns of a flat batch."""
        self._core = core
        self._formats = formats
        self._trees: list[HostTree | None] = [None] * len(core)
        if getattr(options, "cut", False):
            for tree in self:
                cut(tree, options.max_tokens, options.max_ancestors)
        self._total_milliseconds = (perf_counter() - started) * 1e3

    @property
    def ranks(self) -> int:
        """Trees of a micro-batch, one for each rank."""
        return int(self.options.ranks)

    @cached_property
    def skipped(self) -> list[Skipped]:
        """Samples that fit no tree (`overlong="skip"`)."""
        return [Skipped(*skipped) for skipped in self._core.skipped()]

    @cached_property
    def stats(self) -> Stats:
        """Numbers over all trees."""
        numbers = self._core.stats()
        raw, packed = numbers["raw_tokens"], numbers["packed_tokens"]
        read = max(self._total_milliseconds - sum(numbers["milliseconds"].values()), 0.0)
        numbers["milliseconds"] = {"read": read, **numbers["milliseconds"]}
        ratio = raw / packed if packed else 1.0
        return Stats(packing_ratio=ratio, trees=len(self), skipped=len(self.skipped), **numbers)

    def __len__(self) -> int:
        return len(self._trees)

    @overload
    def __getitem__(self, index: int) -> HostTree: ...
    @overload
    def __getitem__(self, index: slice) -> list[HostTree]: ...
    def __getitem__(self, index: int | slice) -> HostTree | list[HostTree]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        try:
            tree = self._trees[index]
        except IndexError:
            raise self._index_error(index) from None
        if tree is None:
            at = range(len(self))[index]
            core = self._core
            fields = core.fields(at)
            disagreements = {name: (a, b, token) for name, a, b, token in core.disagreements(at)}
            tree = self._trees[at] = PackedTree(core.buffer(at), fields, self._formats, disagreements)
        return tree

    def __iter__(self) -> Iterator[HostTree]:
        return (self[i] for i in range(len(self)))

    def for_rank(self, rank: int | Mesh) -> list[HostTree]:
        """The trees of one rank, one for each micro-batch: the same number for every rank.

            packed = treepack.pack(samples, max_tokens=16384, ranks=mesh["dp"])
            trees = packed.for_rank(mesh["dp"])

        `rank` is a number from 0, or the mesh dimension that was packed for: then it is that of this process. Processes
        that differ in other dimensions get the same trees, which `term_log_probs(..., mesh=mesh["sp"])` runs together.
        """
        rank = rank_of(rank, self.ranks)
        if not 0 <= rank < self.ranks:
            raise PackError(f"rank is {rank}; this packing is for ranks 0 to {self.ranks - 1}")
        return self[rank :: self.ranks]

    def unpack(self, values: Iterable[Values]) -> list[Values]:
        """Values of the positions of all trees, (N, ...) for each tree in their order -> one array or tensor (L, ...)
        for each sample, in the order of the samples. Differentiable for torch. Of a skipped sample it is empty."""
        return self._in_order([tree.unpack(x) for tree, x in self._beside(values, "num_tokens", "positions")])

    def unpack_terms(self, values: Iterable[Values], *, fill: float | None = None) -> list[Values]:
        """The same of loss terms, (M, ...) for each tree: log-probs, say, whichever trees their samples came into.

            log_probs = packed.unpack_terms([treepack.term_log_probs(model, tree.to(device)) for tree in packed])

        With `fill` a row for each token of a sample, (L, ...), as in `old_log_probs`: the values at the tokens that are
        trained, and `fill` at all others.
        """
        trees = self._beside(values, "num_terms", "terms")
        return self._in_order([tree.unpack_terms(x, fill=fill) for tree, x in trees], fill)

    def _beside(self, values: Any, rows: str, what: str) -> Iterator[tuple[HostTree, Any]]:
        """Each tree with its values."""
        if hasattr(values, "ndim") or not isinstance(values, Iterable):
            kind = type(values).__name__
            raise TypeError(f"values is a {kind}; a list is needed, with the values of each of {len(self)} trees")
        listed = list(values)
        if len(listed) != len(self):
            raise PackError(f"values are of {len(listed)} trees; there are {len(self)}, and each of them has values")
        for number, (tree, one) in enumerate(zip(self, listed, strict=True)):
            shape = tuple(getattr(one, "shape", ()))
            if not shape or shape[0] != getattr(tree, rows):
                has = f"shape {shape}" if hasattr(one, "shape") else f"type {type(one).__name__}"
                raise PackError(f"tree {number}: its values have {has}; it has {getattr(tree, rows)} {what}")
            yield tree, one

    def _in_order(self, parts: list[list[Any]], fill: float | None = None) -> list[Any]:
        """What came out of each tree, by the numbers of the samples."""
        found = {
            number: part
            for tree, of_tree in zip(self, parts, strict=True)
            for number, part in zip(tree.sample_index.tolist(), of_tree, strict=True)
        }
        like = next(iter(found.values()), np.zeros(0, np.float32))
        for skipped in self.skipped:
            rows = 0 if fill is None else skipped.tokens
            found[skipped.sample] = spread(like[:0], np.zeros(0, np.int64), rows, fill or 0.0)
        return [found[number] for number in range(len(found))]

    def __getstate__(self) -> dict[str, Any]:
        # With all trees and numbers made, nothing asks for the core any more.
        return {
            "options": self.options,
            "per_token": self.per_token,
            "per_sample": self.per_sample,
            "_trees": list(self),
            "skipped": self.skipped,
            "stats": self.stats,
        }

    def _repr_html_(self) -> str:
        return html_of(self, self.stats, self.ranks)

    def __repr__(self) -> str:
        s = self.stats
        return (
            f"Packed({s.trees} trees, {s.samples} samples, {s.raw_tokens} -> {s.packed_tokens} tokens, {s.terms} terms)"
        )
