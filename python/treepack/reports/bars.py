"""Segments to the bars that a page embeds: the largest ones themselves, the others merged with their neighbours.

A page holds a bounded number of bars. A segment counts as many tokens as its samples would take alone, those below it
included; the `limit` segments that count most are kept, and since a segment never counts more than the one above it,
the way up from a kept segment is kept as well. What is left under a kept segment, between two of its kept children, is
one bar: "n more segments".

O(S log S + N), no Python loop over segments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .segments import Flags, Numbers, Segments


class Bars(NamedTuple):
    """B bars, depth-first, at most 3 `limit` + 1; all (B,) int64 but `runs`."""

    parent: Numbers
    """Bar above, -1 at a root."""
    segments: Numbers
    """Segments in the bar: 1, or how many were merged."""
    tokens: Numbers
    """Positions in the bar; the bars cover all positions in order."""
    samples: Numbers
    """Samples that pass through."""
    trained: Numbers
    """Trained positions."""
    terms: Numbers
    """Loss terms of all samples whose target lies in the bar."""
    reach: Numbers
    """One past the largest depth in the bar: its depth + tokens where it is one segment."""
    runs: Numbers
    """The bars end to end in runs: n untrained tokens as n, n trained ones as -n. Of a merged bar the two sums."""
    grain: int
    """1, or the number of tokens that take the colour of their majority, so that `runs` stays short."""


def bars_of(segments: Segments, limit: int, more_runs: int) -> Bars:
    """The bars of a tree: `limit` segments are kept as they are; `runs` has at most `more_runs` beyond one for each bar
    of one segment and two for each merged one."""
    count = len(segments.start)
    kept = _kept(segments, limit)
    first = _first_segments(segments, kept)
    if not count:
        none = np.zeros(0, np.int64)
        return Bars(none, none, none, none, none, none, none, none, 1)
    merged = np.diff(first, append=count)
    parent = segments.parent[first]
    above = np.searchsorted(first, parent)
    top = kept | (segments.parent < 0) | kept[segments.parent]  # what is not on top of its bar is counted there already
    runs, grain = _runs(segments, first, merged, more_runs)
    return Bars(
        parent=np.where(parent < 0, -1, above).astype(np.int64),
        segments=merged,
        tokens=np.add.reduceat(segments.tokens, first),
        samples=np.add.reduceat(np.where(top, segments.samples, 0), first),
        trained=np.add.reduceat(segments.trained_tokens, first),
        terms=np.add.reduceat(segments.terms, first),
        reach=np.maximum.reduceat(segments.depth + segments.tokens, first),
        runs=runs,
        grain=grain,
    )


def _kept(segments: Segments, limit: int) -> Flags:
    """(S,) bool: the `limit` segments below which most sample tokens lie; a parent always before its children."""
    alone = np.concatenate([[0], np.cumsum(segments.tokens * segments.samples)])
    below = alone[segments.subtree_end] - alone[:-1]
    kept = np.zeros(len(below), bool)
    kept[np.argsort(-below, kind="stable")[:limit]] = True
    return kept


def _first_segments(segments: Segments, kept: Flags) -> Numbers:
    """(B,) int64: the first segment of each bar. Bars are ranges of segments, since those below one follow it."""
    roots = np.flatnonzero(~kept & ((segments.parent < 0) | kept[segments.parent]))
    parent = segments.parent[roots]
    joined = (parent[1:] == parent[:-1]) & (segments.subtree_end[roots[:-1]] == roots[1:])
    opens = roots[np.concatenate([np.ones(min(len(roots), 1), bool), ~joined])]
    return np.sort(np.concatenate([np.flatnonzero(kept), opens]))


def _runs(segments: Segments, first: Numbers, merged: Numbers, more: int) -> tuple[Numbers, int]:
    """`Bars.runs` and `Bars.grain`: the grain is doubled until at most `more` runs are there beyond one a bar."""
    start = segments.start[first]
    tokens = np.diff(start, append=len(segments.trained))
    single = merged == 1
    inside = np.repeat(single, tokens)  # positions of bars of one segment, end to end
    trained = segments.trained[inside]
    lengths = tokens[single]
    cuts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    place = np.arange(len(trained)) - np.repeat(cuts, lengths)  # of each position in its bar
    grain = 1
    while True:
        opens = place == 0
        opens[1:] |= trained[1:] != trained[:-1]
        if opens.sum() <= len(lengths) + more or not len(lengths):
            break
        grain *= 2
        chunks = np.flatnonzero(place % grain == 0)
        size = np.diff(chunks, append=len(trained))
        trained = np.repeat(2 * np.add.reduceat(segments.trained[inside].astype(np.int64), chunks) > size, size)
    at = np.flatnonzero(opens)
    run = np.diff(at, append=len(trained))
    run[trained[at]] *= -1
    return _with_sums(run, at, cuts, segments, start, tokens, single), grain


def _with_sums(
    run: Numbers, at: Numbers, cuts: Numbers, segments: Segments, start: Numbers, tokens: Numbers, single: Flags
) -> Numbers:
    """The runs of the bars of one segment, and between them the two sums of each merged bar."""
    total = np.concatenate([[0], np.cumsum(segments.trained)])
    trained = (total[start + tokens] - total[start])[~single]
    sums = np.stack([tokens[~single] - trained, -trained], axis=1).reshape(-1)
    owner = np.flatnonzero(single)[np.searchsorted(cuts, at, side="right") - 1]
    owners = np.concatenate([owner, np.repeat(np.flatnonzero(~single), 2)])
    runs = np.concatenate([run, sums])[np.argsort(owners, kind="stable")]
    return np.asarray(runs[runs != 0], np.int64)
