"""What cutting a tree into ranges saves, in tokens, on real rollouts: `make bench-ranges`.

For each set and budget: what `pack()` holds within the budget, the distinct tokens, which `pack(cut=True)` holds, and
what its ranges cost: how many there are, the most ancestors whose keys one of them reads, and the most rows that wait
for their descendants at a time. Every cut is checked by the oracle (`treepack.testing`) first. Tokens are counted;
nothing is timed but the packing.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import console, environment, load
from rich.table import Table

import treepack
from treepack.testing import check_packed

SETS = (
    "qwen_math_n8", "gsm8k_4models", "game24_cot_n100", "tau_airline_traj", "tau_airline_turns", "game24_tot_tree",
    "swe_gemini_comb", "swe_gemini_turns", "swe_gemini_traj", "crosswords_tot_dfs", "lats_agent_tree",
)  # fmt: skip
BUDGETS = (16_384, 32_768)


def waiting_rows(tree: Any) -> int:
    """The most rows of other ranges that wait while one runs."""
    boundaries = tree.cu_ranges
    most = 0
    for number, where in enumerate(tree.ranges):
        ranges = np.unique(np.searchsorted(boundaries, where.ancestors, side="right") - 1)
        most = max(most, int(np.diff(boundaries)[ranges[ranges != number]].sum()))
    return most


def row(name: str, samples: list[dict[str, Any]], budget: int) -> list[str]:
    within = treepack.pack(samples, max_tokens=budget, overlong="skip")
    start = time.perf_counter()
    packed = treepack.pack(samples, max_tokens=budget, cut=True)
    milliseconds = (time.perf_counter() - start) * 1e3
    check_packed(packed, samples)
    (tree,) = packed
    fits = not within.stats.skipped
    tokens = within.stats.packed_tokens
    return [
        name,
        f"{budget:,}",
        f"{tokens:,} ({within.stats.trees})" if fits else f"{within.stats.skipped} samples too long",
        f"{tree.num_tokens:,}",
        f"{100 * (1 - tree.num_tokens / tokens):.1f} %" if fits else "",
        f"{len(tree.ranges)}",
        f"{max(len(x.ancestors) for x in tree.ranges):,}",
        f"{waiting_rows(tree):,}",
        f"{milliseconds:.0f}",
    ]


def main() -> None:
    console.print(environment())
    table = Table(title="Tokens within a budget, and cut into ranges of it")
    headings = ("within it (trees)", "distinct", "fewer", "ranges", "most ancestors", "most waiting", "pack ms")
    for heading in ("set", "budget", *headings):
        table.add_column(heading, justify="left" if heading == "set" else "right", no_wrap=True)
    for name in SETS:
        samples = [{"input_ids": x["input_ids"], "completion_mask": x["completion_mask"]} for x in load(name)]
        for budget in BUDGETS:
            table.add_row(*row(name, samples, budget))
    console.print(table)


if __name__ == "__main__":
    main()
