"""Samples in file order -> units of trees: a window that was packed at once, or a micro-batch of a stream.

Where a unit ends depends on the samples before it in the unit alone, and nothing is carried from one to the next. So a
run that starts again at the first sample of a unit makes the same trees as one that was never stopped.

Memory: the samples and trees of one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import PackError, PackTypeError
from ..inputs.finite import check_log_probs
from ..packing import Packer, pack
from ..tree.packed import Packed, Stats
from ..tree.tree import HostTree
from .options import Options
from .pairs import Pair, pack_pairs

Sample = dict[str, Any]

#: Columns that are floats, although JSON may write them as 0 or 1.
FLOATS = ("advantage", "old_log_probs", "ref_log_probs", "reward")


class Unit(NamedTuple):
    """Trees, and what of the input they hold."""

    trees: list[HostTree]
    first: int
    """The row of the input at which the unit starts."""
    rows: int
    """Rows of the input: a sample each, or a pair."""
    stats: list[Stats]
    """Of the calls that made the trees."""
    skipped: int
    """Samples that fit no tree."""
    first_sample: int | None
    """Number of sample 0 of the call among all samples, where the trees are of one call."""


def units(rows: Iterable[Any], options: Options, start: int) -> Iterator[Unit]:
    """Units of `rows` (samples, or pairs of them where `options.pairs`), of which the first is row `start`.

    Raises PackError or TypeError as `treepack.pack` does, with the number of the sample among all.
    """
    if options.non_finite_log_probs == "raise":
        rows = _finite(rows, options.pairs, start)
    if options.placement == "stream":
        yield from _stream(map(as_floats, rows), options, start)
    else:
        yield from _windows(rows, options, start)


def _finite(rows: Iterable[Any], pairs: bool, start: int) -> Iterator[Any]:
    """The rows, up to the first with a NaN or infinite log-prob at a trained token."""
    for number, row in enumerate(rows, start):
        if pairs:
            check_pair(row, number)
        else:
            check_log_probs(row, number)
        yield row


def check_pair(pair: Pair, number: int) -> None:
    """`check_log_probs` of both samples of a pair."""
    for side in Pair._fields:
        check_log_probs(getattr(pair, side), number, f"pair {{}} ({side})")


def as_floats(sample: Sample) -> Sample:
    """The sample with floats in the columns that are floats."""
    for name in FLOATS:
        value: Any = sample.get(name)
        if isinstance(value, int | np.integer):
            sample[name] = float(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            sample[name] = value.astype(np.float32)
    return sample


# --- windows --------------------------------------------------------------------------------------------------------


def _windows(rows: Iterable[Any], options: Options, start: int) -> Iterator[Unit]:
    window: list[Any] = []
    pending = 0
    for row in rows:
        tokens = row.tokens if options.pairs else len(row["input_ids"])
        if window and pending + tokens > options.window:
            first, start, pending = start, start + len(window), 0
            yield _pack_window(window, options, first)
        window.append(row)
        pending += tokens
    if window:
        yield _pack_window(window, options, start)


def _pack_window(window: list[Any], options: Options, start: int) -> Unit:
    """The trees of a window. Empties it: nobody needs the samples while the next one is read."""
    count = len(window)
    if options.pairs:
        pairs = [Pair(as_floats(pair.chosen), as_floats(pair.rejected)) for pair in window]
        packed, skipped = pack_pairs(pairs, options, start)
        window.clear()
        trees = [tree for part in packed for tree in part]
        return Unit(trees, start, count, [part.stats for part in packed], 2 * skipped, None)
    try:
        one: Packed = pack([as_floats(sample) for sample in window], **options.pack_keywords())
    except (PackError, PackTypeError) as error:
        error.shift(start)
        raise
    window.clear()
    return Unit(list(one), start, count, [one.stats], len(one.skipped), start)


# --- a stream -------------------------------------------------------------------------------------------------------


def _stream(samples: Iterable[Sample], options: Options, start: int) -> Iterator[Unit]:
    """Micro-batches of `treepack.Packer`. Each has a packer of its own, so that each can be the first of a run."""
    packer, count = _packer(options), 0
    for sample in samples:
        closed = _add(packer, sample, start)
        if closed:
            # The sample that closed the micro-batch is the first of the next one.
            yield _micro_batch(packer, closed, start, count)
            start, count, packer = start + count, 0, _packer(options)
            _add(packer, sample, start)
        count += 1
    closed = packer.flush()
    if count:
        yield _micro_batch(packer, closed, start, count)


def _packer(options: Options) -> Packer:
    keywords = options.pack_keywords()
    del keywords["placement"]
    return Packer(**keywords)


def _add(packer: Packer, sample: Sample, start: int) -> list[Any]:
    try:
        return packer.add(sample)
    except (PackError, PackTypeError) as error:
        error.shift(start)
        raise


def _micro_batch(packer: Packer, closed: list[Any], start: int, count: int) -> Unit:
    trees = [tree for trees in closed for tree in trees]
    return Unit(trees, start, count, [packer.stats], len(packer.skipped), start)
