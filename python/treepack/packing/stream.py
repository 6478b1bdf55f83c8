"""Packer: an endless queue of samples in, micro-batches of one tree per rank out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from time import perf_counter
from typing import Any, Literal, SupportsIndex

import numpy as np

from .._core import PackStream, work
from ..errors import PackError, PackTypeError, Where
from ..inputs import column_checks
from ..inputs.columns import GROUP, Format, Inputs
from ..inputs.convert import Array, plain
from ..inputs.lookalikes import Suspect
from ..inputs.reader import Reader
from ..tree.mesh import Mesh, number_of
from ..tree.packed import Packed, Skipped, Stats
from ..tree.tree import HostTree
from .options import PackOptions

MicroBatch = tuple[HostTree, ...]
_ALL_OR_NONE = "give it in every sample or in none"


class Packer:
    """Packs samples as they arrive, for trainers that never see a whole batch.

        packer = treepack.Packer(max_tokens=16384, ranks=8)
        for sample in queue:
            for trees in packer.add(sample):    # a tuple of one tree per rank
                train(trees)
        for trees in packer.flush():
            train(trees)

    A sample goes into the tree of the open micro-batch, of those in which it fits, with which it shares the most tokens
    (ties: least attention work, then lowest rank). Where none fits, the micro-batch closes; never while a rank is
    empty, since an empty tree takes every sample. Arrays are copied, so the caller may reuse them. `sample_index`,
    `position_source` and `term_source` count within the closed micro-batch. Keywords are those of `treepack.pack`; all
    samples have the columns and dtypes of the first: where that has 1, 0.5 is refused later, so give it 1.0. Not to be
    used from two threads at once.
    """

    def __init__(
        self,
        max_tokens: SupportsIndex,
        *,
        max_terms: SupportsIndex | None = None,
        max_kept: SupportsIndex | None = None,
        vocab_size: SupportsIndex | None = None,
        branching: Literal["token", "label"] = "token",
        order: Literal["largest_first", "first_seen"] = "largest_first",
        overlong: Literal["raise", "skip"] = "raise",
        pad_to_multiple_of: SupportsIndex | None = None,
        ranks: SupportsIndex | Mesh = 1,
    ):
        ranks = number_of(ranks)
        self._options = PackOptions.of(locals())
        self.ranks = self._options.ranks
        self.skipped: list[Skipped] = []
        """Samples that fit no tree (`overlong="skip"`), by their number among all samples so far."""
        self.stats = _no_stats()
        """Numbers over all micro-batches closed so far, and over all skipped samples."""
        self._stream = PackStream(self._options.for_rust())
        self._reader = Reader()
        self._like: Inputs | None = None  # the first sample, whose columns all others have
        self._suspects: dict[str, Suspect] | None = None  # columns that no sample has cleared so far
        self._groups: dict[Any, int] = {}
        self._count = 0  # samples taken or skipped so far

    def add(self, sample: Mapping[str, Any]) -> list[MicroBatch]:
        """Take one sample; return the micro-batches that it closed, 0 or 1 of them.

        Raises PackError or TypeError as `treepack.pack` does; the packer is then as before the call.
        """
        borrowed = self._reader.borrow(sample, self._stream.add)
        closed, skipped = self._add_unready(sample) if borrowed is None else borrowed[0]
        self._count += 1
        if skipped is not None:
            self.skipped.append(Skipped(*skipped))
            self.stats = _sum(self.stats, skipped=1)
        return [] if closed is None else [self._take(closed)]

    def flush(self) -> list[MicroBatch]:
        """Close the open micro-batch and return it; an empty list if nothing is open. Trees are split where a rank
        would be empty; what cannot be split is filled up with dummies."""
        closed = self._stream.flush()
        return [] if closed is None else [self._take(closed)]

    def __repr__(self) -> str:
        done = f"skipped={len(self.skipped)}, micro_batches={self.stats.trees // self.ranks}"
        return f"Packer(max_tokens={self._options.max_tokens}, ranks={self.ranks}, samples={self._count}, {done})"

    def _add_unready(self, sample: Any) -> Any:
        """Add a sample that needs conversion, or the first one, which says what the columns are."""
        if not isinstance(sample, Mapping):
            kind = type(sample).__name__
            text = f"it is a {kind}; a sample is a dict of columns with input_ids"
            raise PackTypeError(text, sample=self._count)
        sample = dict(sample)
        known = len(self._groups)
        if GROUP in sample:
            sample[GROUP] = self._group(sample[GROUP])
        try:
            columns = self._read(sample)
            if self._like is not None:
                _match(columns, self._like, self._count)
            suspects = column_checks.check(columns, self._count, self._suspects)
            added = self._stream.add_columns(columns)
        except Exception:
            for group in list(self._groups)[known:]:
                del self._groups[group]
            raise
        if self._like is None:
            self._like = columns
        if self._suspects != {} and not suspects and not column_checks.has_second_mask(self._like):
            self._reader.learn(self._like)
        self._suspects = suspects
        return added

    def _read(self, sample: dict[str, Any]) -> Inputs:
        """The columns of one sample, with the number that the sample has in the stream in its errors."""
        try:
            return self._reader.read([sample])
        except (PackError, PackTypeError) as error:
            error.shift(self._count)
            raise

    def _group(self, group: Any) -> Any:
        """Integers stay, other values are numbered in order of first appearance; a stream has one of the two, or 0 and
        "a" would be one group."""
        where = Where(GROUP, self._count)
        group = plain(group, where)
        integer = type(group) is int and -(2**63) <= group < 2**63
        if self._like is not None and integer == bool(self._groups):
            kind, others = ("an integer", "others") if integer else ("no integer", "integers")
            raise where.error(
                f"is {group!r}, {kind}; the first sample of the stream has {others}: a stream has one kind"
            )
        if integer:
            return group
        try:
            return self._groups.setdefault(group, len(self._groups))
        except TypeError:
            raise where.type_error(f"is a {type(group).__name__}; it must be hashable") from None

    def _take(self, closed: Any) -> MicroBatch:
        formats = self._like.formats if self._like is not None else {}
        packed = Packed(closed, formats, self._options, perf_counter())
        self.stats = _sum(self.stats, packed.stats)
        return tuple(packed)


def _match(columns: Inputs, like: Inputs, number: int) -> None:
    """Bring columns into the order, dtypes and row shapes of the stream, or say what differs."""
    first = "the first sample of the stream"
    it = Where("it", number)
    if (columns.mask is None) != (like.mask is None):
        has, other = ("no", "one") if columns.mask is None else ("a", "none")
        raise it.error(f"has {has} completion_mask; {first} has {other}: {_ALL_OR_NONE}")
    if columns.kept is not None and like.kept is None:
        raise it.error(
            f"has kept sets; {first} has none: give that one sampling_mask = [], and sampling_mask_counts with 0 for "
            "each token"
        )
    if columns.kept is None and like.kept is not None:
        tokens = len(columns.ids[0])
        columns.kept = ([np.zeros(0, np.int32)], [np.zeros(tokens, np.int32)])
    for name in columns.formats:
        if name not in like.formats:
            raise it.error(f"has a column {name!r}; {first} has none: {_ALL_OR_NONE}")
    tokens_by_name = {name: values for name, _, values in columns.token_columns}
    scalars_by_name = {name: values for name, _, values, _ in columns.sample_columns}
    formats = dict(columns.formats)
    columns.token_columns.clear()
    columns.sample_columns.clear()
    for name, wanted in like.formats.items():
        per_token = any(name == column for column, _, _ in like.token_columns)
        if name not in formats:
            raise it.error(f"has no column {name!r}; {first} has one: {_ALL_OR_NONE}")
        where = Where(name, number)
        values = (tokens_by_name if per_token else scalars_by_name).get(name)
        if values is None:
            has, other = ("a number", "an array (per token)") if per_token else ("an array", "a number (per sample)")
            raise where.error(f"is {has}; {first} has {other} there")
        _check_format(formats[name], wanted, where, first)
        if per_token:
            columns.add_tokens(name, [_cast(values[0], wanted[0], where)], wanted)
        else:
            columns.add_scalars(name, _cast(values, wanted[0], where))


def _check_format(has: Format, wanted: Format, where: Where, first: str) -> None:
    if has[1] != wanted[1]:
        raise where.error(f"has rows of shape {has[1]}; {first} has {wanted[1]}")
    if not np.can_cast(has[0], wanted[0], "same_kind"):
        floats = has[0].kind == "f" and wanted[0].kind in "iub"
        hint = ": give floats from the first sample on, say 1.0 instead of 1" if floats else ""
        raise where.type_error(f"has dtype {has[0]}; {first} has {wanted[0]}, and a stream keeps that{hint}")


def _cast(array: Array, dtype: np.dtype[Any], where: Where) -> Array:
    """Integers must keep their values; floats may lose precision, as a stream has one dtype."""
    out = np.ascontiguousarray(array, dtype)
    if dtype.kind in "iub" and not np.array_equal(out, array):
        raise where.error(f"holds a value that {dtype}, the dtype of the first sample of the stream, cannot hold")
    return out


def _no_stats() -> Stats:
    return Stats(
        samples=0,
        raw_tokens=0,
        packed_tokens=0,
        packing_ratio=1.0,
        trees=0,
        terms=0,
        kept_ids=0,
        skipped=0,
        padding=0,
        attention_pairs=0,
        attention_pairs_alone=0,
        imbalance=1.0,
        balance_tokens=0,
        dummies=0,
        milliseconds={},
    )


def _sum(before: Stats, new: Stats | None = None, skipped: int = 0) -> Stats:
    """Both together. The imbalance is the mean, weighed by work, as it is within one packing."""
    if new is None:
        new = _no_stats()
    numbers: dict[str, Any] = {}
    for field in fields(Stats):
        a, b = getattr(before, field.name), getattr(new, field.name)
        if field.name == "milliseconds":
            numbers[field.name] = {phase: a.get(phase, 0.0) + b.get(phase, 0.0) for phase in {**a, **b}}
        else:
            numbers[field.name] = a + b
    numbers["skipped"] += skipped
    raw, packed = numbers["raw_tokens"], numbers["packed_tokens"]
    numbers["packing_ratio"] = raw / packed if packed else 1.0
    works = [work(stats.attention_pairs, stats.packed_tokens) for stats in (before, new)]
    weighed = before.imbalance * works[0] + new.imbalance * works[1]
    numbers["imbalance"] = weighed / sum(works) if sum(works) else 1.0
    return Stats(**numbers)
