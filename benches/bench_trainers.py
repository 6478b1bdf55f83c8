"""How much sharing is left on each rank when a trainer has handed out the samples: `make bench-trainers`.

A rank can share only what lies on it. Each way below hands the samples of a real batch to 2, 4, 8 and 16 ranks; each
rank then packs its own within a budget, and the table has raw tokens over packed ones.

    verl                 its default: equally many samples a rank, balanced by length (Karmarkar and Karp)
    verl, in order       trainer.balance_batch=False: the batch cut into equal parts as it was generated
    TRL                  the same parts, each shuffled, then cut into micro-batches of 8 samples that know nothing of
                         each other
    TRL, keep_groups     the micro-batches of treepack's mixin, in the order of their prompts (one optimizer step a
                         generation, TRL's default)
    whole groups         all samples of a prompt on one rank, groups balanced by length
    ranks=               treepack.pack(samples, ranks=k) over all of them

Where verl can be imported, its own partition has to be the one computed here, or nothing is printed.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import console, environment, load
from rich.table import Table

import treepack

SETS = [("qwen_math_n8", 8192), ("tau_airline_traj", 16384), ("swe_gemini_comb", 16384)]
RANKS = (2, 4, 8, 16)
MICRO_BATCH = 8
Samples = list[dict[str, Any]]
#: For each rank the groups of samples that are packed together.
Parts = list[list[list[int]]]


def workload(lengths: Sequence[int]) -> list[int]:
    """verl's estimate of the cost of a sample: dense layers of 4,096 wide plus attention."""
    return [24576 * length + length**2 for length in lengths]


def differencing(sizes: Sequence[int], parts: int, equal: bool) -> list[list[int]]:
    """Karmarkar and Karp: partial partitions, of which the two with the largest spread are joined, the fullest part of
    one with the emptiest of the other, until one is left. `equal`: every part gets the same number of items."""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    step = parts if equal else 1
    heap: list[Any] = []

    def push(partition: list[tuple[int, int, list[int]]]) -> None:
        """Partial partitions as (load, number of items, items) of each part, the fullest first; ties as in verl."""
        partition.sort(reverse=True)
        load, number, items = partition[0]
        heapq.heappush(heap, (partition[-1][0] - load, -load, -number, [-i for i in items], partition))

    for at in range(0, len(order), step):
        first = [(sizes[i], 1, [i]) for i in order[at : at + step]]
        push(first + [(0, 0, []) for _ in range(parts - len(first))])
    while len(heap) > 1:
        (*_, one), (*_, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        push([(a + b, m + n, x + y) for (a, m, x), (b, n, y) in pairs])
    return [sorted(items) for _, _, items in heap[0][-1]]


def cut(order: Sequence[int], ranks: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.asarray(order), ranks)]


def verl(samples: Samples, ranks: int, budget: int) -> Parts:
    return [[part] for part in differencing(workload(_lengths(samples)), ranks, equal=True)]


def in_order(samples: Samples, ranks: int, budget: int) -> Parts:
    return [[part] for part in cut(range(len(samples)), ranks)]


def micro_batches(part: list[int]) -> list[list[int]]:
    return [part[at : at + MICRO_BATCH] for at in range(0, len(part), MICRO_BATCH)]


def trl(samples: Samples, ranks: int, budget: int) -> Parts:
    random = np.random.default_rng(0)
    return [micro_batches(random.permutation(part).tolist()) for part in cut(range(len(samples)), ranks)]


def keep_groups(samples: Samples, ranks: int, budget: int) -> Parts:
    return [micro_batches(part) for part in cut(range(len(samples)), ranks)]


def whole_groups(samples: Samples, ranks: int, budget: int) -> Parts:
    members: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample["group_id"], []).append(i)
    groups = list(members.values())
    if len(groups) < ranks:
        return []
    work = workload(_lengths(samples))
    sizes = [sum(work[i] for i in group) for group in groups]
    return [[[i for g in part for i in groups[g]]] for part in differencing(sizes, ranks, equal=False)]


def by_ranks(samples: Samples, ranks: int, budget: int) -> Parts:
    packed = treepack.pack(samples, max_tokens=budget, ranks=ranks)
    return [[tree.sample_index.tolist() for tree in packed.for_rank(rank)] for rank in range(ranks)]


WAYS: dict[str, Callable[[Samples, int, int], Parts]] = {
    "verl": verl,
    "verl, in order": in_order,
    "TRL": trl,
    "TRL, keep_groups": keep_groups,
    "whole groups": whole_groups,
    "ranks=": by_ranks,
}


def _lengths(samples: Samples) -> list[int]:
    return [len(sample["input_ids"]) for sample in samples]


def measured(samples: Samples, parts: Parts, budget: int) -> tuple[float, float, float, float]:
    """(ratio over all ranks, lowest and highest of a rank, packed tokens of the fullest rank over the mean)"""
    raw, packed = [], []
    for rank in parts:
        stats = [treepack.pack([samples[i] for i in some], max_tokens=budget).stats for some in rank if some]
        raw.append(sum(one.raw_tokens for one in stats))
        packed.append(sum(one.packed_tokens for one in stats))
    ratios = [a / b for a, b in zip(raw, packed, strict=True) if b]
    return sum(raw) / sum(packed), min(ratios), max(ratios), max(packed) * len(packed) / sum(packed)


def check(samples: Samples, ranks: int) -> str:
    """'' where verl's own partition has the loads of the one made here, or verl is not there; else what differs."""
    try:
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
    except ImportError:
        return ""
    sizes = workload(_lengths(samples))
    theirs = get_seqlen_balanced_partitions(sizes, k_partitions=ranks, equal_size=True)
    ours = differencing(sizes, ranks, equal=True)
    return "" if sorted(ours) == sorted(theirs) else f"{ranks} ranks: {ours[0]}, verl has {theirs[0]}"


def table_of(name: str, samples: Samples, budget: int) -> Table:
    what = "raw / packed tokens (lowest and highest rank), fullest rank / mean"
    table = Table(title=f"{name}, max_tokens {budget}: {what}")
    table.add_column("way", no_wrap=True)
    for ranks in RANKS:
        table.add_column(f"{ranks} ranks", justify="right", no_wrap=True)
    for way, hand_out in WAYS.items():
        shown = []
        for ranks in RANKS:
            some = samples[: len(samples) - len(samples) % ranks]  # verl and TRL want equally many a rank
            parts = hand_out(some, ranks, budget)
            if not parts:
                shown.append("-")
                continue
            whole, low, high, full = measured(some, parts, budget)
            shown.append(f"{whole:.2f} ({low:.2f} to {high:.2f})  {full:.2f}")
        table.add_row(way, *shown)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sets whose name contains this")
    arguments = parser.parse_args()
    sets = [(name, load(name), budget) for name, budget in SETS if arguments.only in name]
    console.print(environment())
    for name, samples, _ in sets:
        for ranks in RANKS:
            if wrong := check(samples[: len(samples) - len(samples) % ranks], ranks):
                console.print(f"WRONG, so nothing is compared: {name}, {wrong}")
                return 1
    there = "equal to verl's own" if "verl" in sys.modules else "verl is not there to compare with"
    console.print(f"partition of verl by differencing: {there}")
    for name, samples, budget in sets:
        console.print(table_of(name, samples, budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
