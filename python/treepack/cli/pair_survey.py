"""Preference pairs, one by one -> what packing them would save, both samples of each in one tree.

There is no stream: it takes sample by sample. Memory: a window of pairs, and 8 bytes for each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..offline.options import Options
from ..offline.pairs import Pair, pack_pairs, samples_of, tokens_of
from ..packing.options import Placement
from ..tree.packed import Skipped
from ..tree.tree import HostTree
from .survey import Said, Sums, Survey, surveyed


class PairSurvey(Survey):
    """Takes pairs with `add`; the numbers of `finish` are of their samples, `skipped` counts two for a pair."""

    placements: tuple[Placement, ...] = ("shared", "first_fit")

    def __init__(
        self,
        max_tokens: int,
        window: int,
        draw: Placement | None = None,
        budgets: Sequence[int] = (),
        placement: Placement = "shared",
    ):
        super().__init__(max_tokens, None, window, draw, budgets, placement)
        self._sums = Sums()
        self._pairs = 0

    def add(self, row: Any, said: Said | None = None) -> None:
        """Take a `Pair`; `said` is of both sides."""
        sides = samples_of(row)
        pair = Pair(*map(surveyed, sides))
        self._pairs += 1
        tokens, most = tokens_of(pair), self._budget["max_tokens"]
        if tokens > most:
            reason = f"pair {self._pairs - 1}: chosen and rejected have {tokens} tokens, their common prefix once"
            self._skip(Skipped(self._pairs - 1, tokens, f"{reason}; max_tokens={most} is the most a tree may hold"))
            self._sums.skipped += 2
            return
        for sample in pair:
            self._count(sample["input_ids"])
        if self.drawing:
            self._said.append(said or {})
        self._hold(pair, pair.tokens, [side.get("group_id") for side in sides])

    def said_of(self, tree: HostTree) -> list[Said]:
        sides = zip(tree.samples["pair"].tolist(), tree.samples["chosen"].tolist(), strict=True)
        return [self._said[pair] | {"side": "chosen" if chosen else "rejected"} for pair, chosen in sides]

    def finish(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return super().finish() | {"pairs": self._pairs - self._sums.skipped // 2}

    def _all(self) -> Sums:
        return self._sums

    def _close(self) -> None:
        window: list[Any] = self._window
        self._window, self._window_tokens = [], 0
        self._windows += 1
        self._sums.add(self._share([sample for pair in window for sample in pair]))
        for placement in self.placements:
            packed, _ = pack_pairs(window, Options(**self._budget, placement=placement, pairs=True))
            for one in packed:
                self._totals[placement].add(one.stats)
            if placement == self._draw and self._windows == 1:
                self.drawn, self.drawn_samples = [tree for one in packed for tree in one], 2 * len(window)
        for budget, totals in self._budgets.items():
            options = Options(max_tokens=budget, placement=self._placed, pairs=True, overlong="skip")
            packed, skipped = pack_pairs(window, options)
            for one in packed:
                totals.add(one.stats)
            totals.skipped += 2 * skipped
