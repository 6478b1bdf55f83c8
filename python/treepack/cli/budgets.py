"""Several budgets for one tree -> a row of numbers for each, and which of them is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..tree.packed import Stats

#: The knee: the smallest budget with which all samples fit and at most this many times the fewest tokens are packed.
KNEE = 1.05


@dataclass
class Totals:
    """Sums over the trees of one way to pack."""

    packed_tokens: int = 0
    trees: int = 0
    attention_pairs: int = 0

    def add(self, stats: Stats) -> None:
        self.packed_tokens += stats.packed_tokens
        self.trees += stats.trees
        self.attention_pairs += stats.attention_pairs


@dataclass
class Budget(Totals):
    """Sums over the trees of one budget out of several."""

    raw_tokens: int = 0
    skipped: int = 0

    def add(self, stats: Stats) -> None:
        super().add(stats)
        self.raw_tokens += stats.raw_tokens
        self.skipped += stats.skipped


def budget_rows(budgets: Mapping[int, Budget], raw_tokens: int, without_budget: int) -> list[dict[str, Any]] | None:
    """A row for each budget, ready for JSON; None where there is one alone. `raw_tokens` and `without_budget` are those
    of all samples, as they are and in one tree."""
    if len(budgets) < 2:
        return None
    rows: list[dict[str, Any]] = []
    for budget, totals in sorted(budgets.items()):
        packed = totals.packed_tokens
        whole = totals.raw_tokens == raw_tokens
        rows.append(
            {
                "max_tokens": budget,
                "packed_tokens": packed,
                "packing_ratio": totals.raw_tokens / packed if packed else 1.0,
                "trees": totals.trees,
                "fill": packed / (totals.trees * budget) if packed else None,
                "cutting_saves": packed - without_budget if whole else None,
                "skipped": totals.skipped,
                "knee": False,
            }
        )
    whole_rows = [row for row in rows if row["cutting_saves"] is not None and row["packed_tokens"]]
    fewest = min((row["packed_tokens"] for row in whole_rows), default=0)
    for row in whole_rows:
        if row["packed_tokens"] <= KNEE * fewest:
            row["knee"] = True
            break
    return rows
