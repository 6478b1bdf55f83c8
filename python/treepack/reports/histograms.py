"""Trees to two histograms: how long the samples are, and how many samples share a position at each depth. O(N)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tree.segments import sample_lengths

if TYPE_CHECKING:
    from ..tree.tree import HostTree

BINS = 48


class Histogram(NamedTuple):
    """Bin i holds the whole numbers `first + i * width .. first + (i + 1) * width - 1`."""

    first: int
    width: int
    values: list[float]


def length_histogram(trees: Iterable[HostTree]) -> Histogram:
    """Samples by length."""
    lengths = np.concatenate([np.zeros(0, np.int64), *(sample_lengths(tree) for tree in trees)])
    if not len(lengths):
        return Histogram(0, 1, [])
    low, high = int(lengths.min()), int(lengths.max())
    width = nice_width(high - low + 1, BINS - 1)  # one bin more where the first one starts before `low`
    first = low // width * width
    return Histogram(first, width, np.bincount((lengths - first) // width).astype(float).tolist())


def sharing_histogram(trees: Iterable[HostTree]) -> Histogram:
    """Mean number of samples that share a packed position, by depth: sample tokens over positions in each bin."""
    alone, packed = np.zeros(0), np.zeros(0)
    for tree in trees:
        real = tree.cu_segments[-1]
        depth, samples = tree.position_ids[:real], tree.position_samples[:real]
        alone = _sum(alone, np.bincount(depth, samples).astype(float))
        packed = _sum(packed, np.bincount(depth).astype(float))
    if not len(packed):
        return Histogram(0, 1, [])
    width = nice_width(len(packed), BINS)
    cuts = np.arange(0, len(packed), width)
    return Histogram(0, width, (np.add.reduceat(alone, cuts) / np.add.reduceat(packed, cuts)).tolist())


def nice_width(span: int, bins: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... of which `bins` cover `span`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power * bins >= span:
                return digit * power
        power *= 10


def _sum(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of two arrays of which one may be shorter."""
    if len(a) < len(b):
        a, b = b, a
    out = a.copy()
    out[: len(b)] += b
    return out
