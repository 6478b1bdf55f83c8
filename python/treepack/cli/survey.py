"""Samples, one by one, -> what packing them would save. Memory: a window of samples, and 8 bytes for each sample.

What a stream saves and how many samples are exact duplicates is counted over everything. Placements that look at all
samples at once, and the prefixes that there are without a budget, are counted window by window and added up: prefixes
shared between two windows count once in each.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from ..inputs.finite import targets
from ..packing import Packer, pack
from ..packing.options import Placement
from ..reports.groups import Groups
from ..tree.packed import Packed, Skipped, Stats
from ..tree.tree import HostTree
from .budgets import Budget, Totals, budget_rows

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
#: Columns that change a number of the survey; no other is read.
COLUMNS = ("completion_mask", "identity")
#: Trees of a stream that are kept to be drawn.
_DRAWN = 32
_NAMED = 5

#: Values of a sample for the page: its place in the file, and columns with one value.
Said = dict[str, Any]


def surveyed(sample: dict[str, Any]) -> dict[str, Any]:
    """The columns of a sample that change a number."""
    return {name: value for name, value in sample.items() if name == "input_ids" or name in COLUMNS}


@dataclass
class Sums:
    """What the samples of all windows have together."""

    samples: int = 0
    raw_tokens: int = 0
    terms: int = 0
    attention_pairs_alone: int = 0
    skipped: int = 0

    def add(self, stats: Stats) -> None:
        self.samples += stats.samples
        self.raw_tokens += stats.raw_tokens
        self.terms += stats.terms
        self.attention_pairs_alone += stats.attention_pairs_alone


class Survey:
    """Takes samples with `add` and gives numbers with `finish`; of preference pairs `PairSurvey`.

    Arguments:
        max_tokens, max_terms: the budget, as of `treepack.pack`; of several budgets the largest.
        window: raw tokens that are placed together.
        draw: keep trees of this placement in `drawn`: those of the first window, or the first of the stream.
        budgets: further values of max_tokens, which samples are packed with too, by `placement`.
    """

    placements: tuple[Placement, ...] = PLACEMENTS

    def __init__(
        self,
        max_tokens: int,
        max_terms: int | None,
        window: int,
        draw: Placement | None = None,
        budgets: Sequence[int] = (),
        placement: Placement = "shared",
    ):
        self.drawn: Packed | list[HostTree] = []
        self.drawn_samples = 0
        self._budget: dict[str, Any] = {"max_tokens": max_tokens, "max_terms": max_terms}
        self._stream = Packer(**self._budget, overlong="skip")
        self._totals = {name: Totals() for name in (*self.placements, "no_budget")}
        self._window: list[dict[str, Any]] = []
        self._window_size, self._window_tokens = window, 0
        self._window_groups: list[Any] = []
        self._groups = Groups()
        self._windows = 0
        self._draw = draw
        self._said: list[Said] = []
        self._placed: Placement = placement
        self._budgets = {budget: Budget() for budget in budgets}
        self._streams = {
            budget: Packer(**self._budget | {"max_tokens": budget}, overlong="skip")
            for budget in (budgets if placement == "stream" else ())
        }
        self._hashes = array("Q")
        self._longest = self._shortest_skipped = self._longest_skipped = self._prefixes = 0
        self._for_terms = self._most_terms = self._ranges = self._ancestors = 0
        self._first_skipped: list[Skipped] = []

    def add(self, sample: dict[str, Any], said: Said | None = None) -> None:
        """Take one sample; of its columns, as arrays, `input_ids` and those of COLUMNS count. `said` is what a page
        about it shows of it."""
        group = sample.get("group_id")
        sample = surveyed(sample)
        drawing = self.drawing
        if drawing:  # before the trees that the sample closes, which may be the last that are drawn
            self._said.append(said or {})
        for trees in self._stream.add(sample):
            self._show(list(trees))
        if self._stream.skipped:
            self._skip(self._stream.skipped.pop(), int(targets(sample).sum()))
            if drawing:  # a sample that is left out has no number
                self._said.pop()
            return
        self._count(sample["input_ids"])
        for packer in self._streams.values():
            packer.add(sample)
        self._hold(sample, len(sample["input_ids"]), [group])

    @property
    def drawing(self) -> bool:
        """Whether samples that are added now may be drawn."""
        room = isinstance(self.drawn, list) and len(self.drawn) < _DRAWN
        return self._draw is not None and (room if self._draw == "stream" else self._windows == 0)

    def said_of(self, tree: HostTree) -> list[Said]:
        """What was said of the samples of a drawn tree."""
        return [self._said[number] for number in tree.sample_index.tolist()]

    def _count(self, ids: Any) -> None:
        self._hashes.append(int.from_bytes(hashlib.blake2b(ids, digest_size=8).digest(), "little"))
        self._longest = max(self._longest, len(ids))

    def _hold(self, row: Any, tokens: int, groups: list[Any]) -> None:
        """Keep a row, and the group of each of its samples, until its window is full."""
        self._window.append(row)
        self._window_groups += groups
        self._window_tokens += tokens
        if self._window_tokens >= self._window_size:
            self._close()

    def finish(self) -> dict[str, Any]:
        """The numbers, ready for JSON; docs/cli.md says what each means."""
        if self._window:
            self._close()
        stats = self._all()
        for budget, packer in self._streams.items():
            packer.flush()
            self._budgets[budget].add(packer.stats)
        hashes = np.frombuffer(self._hashes, np.uint64)
        return {
            **self._budget,
            "pairs": None,
            "samples": stats.samples,
            "raw_tokens": stats.raw_tokens,
            "longest_sample": self._longest,
            "loss_terms": stats.terms,
            "exact_duplicates": len(hashes) - len(np.unique(hashes)),
            "strict_prefixes": self._prefixes,
            "attention_pairs_alone": stats.attention_pairs_alone,
            "window_tokens": self._window_size,
            "windows": self._windows,
            "groups": self._groups.finish(),
            "budgets": budget_rows(self._budgets, stats.raw_tokens, self._totals["no_budget"].packed_tokens),
            "placements": {name: self._placement(name, stats) for name in self._totals},
            "cut": {
                "packed_tokens": self._totals["no_budget"].packed_tokens,
                "ranges": self._ranges,
                "most_ancestors": self._ancestors,
            },
            "skipped": {
                "samples": stats.skipped,
                "for_terms": self._for_terms,
                "most_terms": self._most_terms,
                "shortest": self._shortest_skipped,
                "longest": self._longest_skipped,
                "first": [skipped._asdict() for skipped in self._first_skipped],
            },
        }

    def _all(self) -> Stats | Sums:
        """What all samples that fit have together."""
        for trees in self._stream.flush():
            self._show(list(trees))
        self._totals["stream"].add(self._stream.stats)
        return self._stream.stats

    def _close(self) -> None:
        """Place the samples of a window together, in each way."""
        window = self._window
        self._window, self._window_tokens = [], 0
        self._windows += 1
        self._share(window)
        for placement in ("shared", "first_fit"):
            packed = pack(window, **self._budget, placement=placement)
            self._totals[placement].add(packed.stats)
            if placement == self._draw and self._windows == 1:
                self.drawn, self.drawn_samples = packed, len(window)

        if self._placed == "stream":
            return
        for budget, totals in self._budgets.items():
            options = self._budget | {"max_tokens": budget}
            totals.add(pack(window, **options, placement=self._placed, overlong="skip").stats)

    def _share(self, samples: list[dict[str, Any]]) -> Stats:
        """What samples of a window share where no budget parts them: one tree, cut into ranges of the budget."""
        groups, self._window_groups = self._window_groups, []
        one_tree = pack(samples, max_tokens=self._budget["max_tokens"], cut=True)
        self._totals["no_budget"].add(one_tree.stats)
        for tree in one_tree:
            self._ranges += len(tree.cu_ranges) - 1
            self._ancestors = max(self._ancestors, int(tree.position_ids[tree.cu_ranges[:-1]].max()))
            # A sample ends where its last segment does: whoever goes on from there has it as a strict prefix.
            self._groups.add(tree, [groups[number] for number in tree.sample_index.tolist()])
            self._prefixes += int(np.isin(tree.sample_last_segment, tree.segment_parent).sum())
        return one_tree.stats

    def _show(self, trees: list[HostTree]) -> None:
        if self._draw == "stream" and isinstance(self.drawn, list) and len(self.drawn) < _DRAWN:
            self.drawn += trees
            self.drawn_samples += sum(len(tree.sample_index) for tree in trees)

    def _skip(self, skipped: Skipped, terms: int = 0) -> None:
        self._longest_skipped = max(self._longest_skipped, skipped.tokens)
        self._shortest_skipped = min(self._shortest_skipped or skipped.tokens, skipped.tokens)
        self._for_terms += skipped.tokens <= self._budget["max_tokens"]
        self._most_terms = max(self._most_terms, terms)
        if len(self._first_skipped) < _NAMED:
            self._first_skipped.append(skipped)

    def _placement(self, name: str, stats: Stats | Sums) -> dict[str, Any]:
        totals, raw = self._totals[name], stats.raw_tokens
        packed, pairs = totals.packed_tokens, totals.attention_pairs
        could_save = raw - self._totals["no_budget"].packed_tokens
        # A stream shares between windows as well, and what could be shared there is not known.
        kept_known = could_save > 0 and (name != "stream" or self._windows == 1)
        return {
            "packed_tokens": packed,
            "packing_ratio": raw / packed if packed else 1.0,
            "trees": totals.trees,
            "fill": packed / (totals.trees * self._budget["max_tokens"]) if name != "no_budget" and packed else None,
            "attention_pairs": pairs,
            "attention_ratio": stats.attention_pairs_alone / pairs if pairs else 1.0,
            "sharing_kept": (raw - packed) / could_save if kept_known else None,
        }
