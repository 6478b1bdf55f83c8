"""Placement on rollouts that the planner was not built with: `make bench-unseen`.

64 instances (tests/families.py): 32 of the seeds that the rule was written with, 32 of seeds drawn after it. Each is
packed by four textbook rules and by "shared"; the best known placement of each has no more trees than any of the four,
and the least sum of positions and trees (each at a thirty-second part of a full one) that a slow search found from all
of these (`--seconds 60` searches on; results/placement_best.json keeps what it came to).

Sizes are counted node by node from the tree of each sample. Times are of this thread's processor, so that others on
the machine count less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import concatenate, console, environment, pack_only
from placement_peers import Batch, Size, Trie, build_search, cost, peers, search, tree_of
from rich.table import Table

import treepack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import families
import rank_optimum

OLD, NEW = 1, 2
SETS = {OLD: "seeds that the rule was written with", NEW: "seeds drawn after the rule was written"}
BEST = Path(__file__).with_name("results") / "placement_best.json"
RULES = ("first fit", "falling length", "arrival order", "sorted order")
MUST_CLOSE, AIM_CLOSE, MUST_TIMES, MUST_OPTIMUM = 0.90, 0.97, 3.0, 1.05
RANKS = (2, 8, 64)


@dataclass
class Line:
    """What is known of an instance."""

    instance: families.Instance
    samples: int
    sizes: dict[str, Size]
    times: float
    """pack() in multiples of the concatenates."""

    @property
    def fewest(self) -> Size:
        """Fewest tokens and fewest trees of any textbook rule."""
        found = [self.sizes[rule] for rule in RULES]
        return Size(min(size.tokens for size in found), min(size.trees for size in found))

    @property
    def worse(self) -> bool:
        ours = self.sizes["shared"]
        return ours.tokens > self.fewest.tokens or ours.trees > self.fewest.trees

    @property
    def distance(self) -> int:
        return self.fewest.tokens - self.sizes["best known"].tokens

    @property
    def closed(self) -> int:
        return self.fewest.tokens - self.sizes["shared"].tokens


def measure(instance: families.Instance, best: dict[str, Any], arguments: argparse.Namespace) -> Line:
    """The sizes of all placements of an instance; the best known one is searched on where that is asked for."""
    batch, most = instance.batch(), instance.max_tokens
    trie = Trie.of(batch)
    placed = peers(batch, trie, most)
    sizes = {name: trie.size(found) for name, found in placed.items()}
    fewest = min(size.trees for size in sizes.values())
    placed["shared"] = tree_of(treepack.pack(batch, max_tokens=most))
    sizes["shared"] = trie.size(placed["shared"])
    known = [Size(*best[instance.name])] if instance.name in best else []
    if arguments.seconds:
        known.append(searched(instance, trie, fewest, list(placed.values()), arguments))
    known = [size for size in [*known, *sizes.values()] if size.trees <= fewest]
    sizes["best known"] = min(known, key=lambda size: (cost(size, most), size))
    best[instance.name] = list(sizes["best known"])
    return Line(instance, len(trie.leaf), sizes, times_of_concatenates(batch, most, arguments.repeats))


def searched(
    instance: families.Instance, trie: Trie, most_trees: int, starts: list[np.ndarray], arguments: argparse.Namespace
) -> Size:
    """What the slow search comes to, from these starts and from where the last search ended."""
    name = f"{instance.name.replace(', ', '-')}.npy"
    kept = Path(arguments.starts) / name if arguments.starts else None
    if kept and kept.exists():
        starts = [*starts, np.load(kept).astype(np.int64)]
    found = search(arguments.program, trie, instance.max_tokens, most_trees, starts, arguments.seconds, arguments.seed)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, found.astype(np.uint16 if found.max() < 65_536 else np.uint32))
    return trie.size(found)


def as_samples(batch: Batch) -> list[dict[str, Any]]:
    """Views of flat arrays, with log-probs and an advantage; the second half of every sample is trained."""
    ids, ends = batch["input_ids"], batch["cu_seqlens"]
    mask, log_probs = np.zeros(len(ids), np.uint8), np.full(len(ids), -0.5, np.float32)
    samples = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        mask[end - (end - start) // 2 : end] = 1
        run = slice(start, end)
        columns = {"input_ids": ids[run], "completion_mask": mask[run], "old_log_probs": log_probs[run]}
        samples.append(columns | {"advantage": 0.5})
    return samples


def times_of_concatenates(batch: Batch, max_tokens: int, repeats: int) -> float:
    samples = as_samples(batch)

    def seconds(call: Callable[[], Any]) -> float:
        start = time.thread_time()
        result = call()
        elapsed = time.thread_time() - start
        del result
        return elapsed

    turns = [
        (seconds(lambda: concatenate(samples)), seconds(lambda: pack_only(samples, max_tokens, "shared")))
        for _ in range(repeats + 1)
    ][1:]
    return statistics.median(pack for _, pack in turns) / statistics.median(copy for copy, _ in turns)


def size_table(title: str, lines: list[Line]) -> Table:
    table = Table(title=f"Tokens (trees): {title}")
    headings = ("instance, max_tokens", "samples", *RULES, '"shared"', "best known", "closed", "times")
    for heading in headings:
        table.add_column(heading, justify="left" if heading.startswith("inst") else "right", no_wrap=True)
    for line in lines:
        closed = "-" if line.distance <= 0 else f"{100 * line.closed / line.distance:.1f} %"
        sizes = [str(line.sizes[name]) for name in (*RULES, "shared", "best known")]
        worse = " WORSE" if line.worse else ""
        table.add_row(
            line.instance.name, f"{line.samples:,}", *sizes[:4], sizes[4] + worse, sizes[5], closed, f"{line.times:.2f}"
        )
    return table


def kinds_table(lines: list[Line]) -> Table:
    """Sums by kind, with trees that can be compared: the best known has no more than any rule."""
    table = Table(title="Sums by kind: tokens (trees)")
    for heading in ("kind", "instances", "best of the four rules", '"shared"', "best known", "closed"):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=True)
    for kind in [*families.KINDS, "all"]:
        found = [line for line in lines if kind in ("all", line.instance.name.split("-")[0])]
        if not found:
            continue

        def total(sizes: list[Size]) -> str:
            return str(Size(sum(size.tokens for size in sizes), sum(size.trees for size in sizes)))

        distance, closed = sum(line.distance for line in found), sum(line.closed for line in found)
        sums = [total([line.fewest for line in found])]
        sums += [total([line.sizes[name] for line in found]) for name in ("shared", "best known")]
        table.add_row(kind, str(len(found)), *sums, f"{100 * closed / distance:.1f} %" if distance else "-")
    return table


def verdict(title: str, lines: list[Line]) -> str:
    distance, closed = sum(line.distance for line in lines), sum(line.closed for line in lines)
    share = closed / distance
    met = "aim met" if share >= AIM_CLOSE else "must met" if share >= MUST_CLOSE else "MISSED"
    worse = sum(line.worse for line in lines)
    slowest = max(lines, key=lambda line: line.times)
    in_time = "met" if slowest.times <= MUST_TIMES else "MISSED"
    return (
        f"{title}: closed of the {distance:,} tokens between the best of the four rules and the best known: "
        f"{100 * share:.1f} % (must {100 * MUST_CLOSE:.0f}, aim {100 * AIM_CLOSE:.0f}): {met}; "
        f"worse than a rule in tokens or trees: {worse} of {len(lines)} (must 0)\n"
        f"pack() in multiples of the concatenates, at most: {slowest.times:.2f} ({slowest.instance.name}; "
        f"must {MUST_TIMES:g}): {in_time}"
    )


# ------------------------------------------------------------------------------------------------------------ ranks


def ranks_table(instances: list[families.Instance]) -> Table:
    """For each number of ranks: slowest over mean, tokens beyond one rank's, slowest over the bound for equal work."""
    table = Table(title="Ranks: slowest rank over the mean, extra tokens, slowest over the bound for equal work")
    table.add_column("instance, max_tokens", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    for ranks in RANKS:
        table.add_column(f"{ranks} ranks", justify="right", no_wrap=True)
    for instance in instances:
        batch = instance.batch()
        (whole,) = treepack.pack(batch, max_tokens=2**31 - 1)
        # Each position once, evenly; and no rank is done before its longest sample.
        depths = whole.position_ids + 1
        longest = int(np.diff(batch["cu_seqlens"]).max())
        least = longest * (longest + 1) // 2 + 8192 * longest
        total = int(depths.sum()) + 8192 * len(depths)
        shown = []
        for ranks in RANKS:
            packed = treepack.pack(batch, max_tokens=instance.max_tokens, ranks=ranks)
            stats = packed.stats
            extra = 100 * stats.balance_tokens / (stats.packed_tokens - stats.balance_tokens)
            over = rank_optimum.slowest(packed, ranks) / max(total / ranks, least)
            shown.append(f"{stats.imbalance:.3f}  +{extra:.1f} %  {over:.3f}")
        table.add_row(instance.name, f"{len(batch['cu_seqlens']) - 1:,}", *shown)
    return table


def optimum_line(count: int) -> str:
    """Small instances against the optimum that trying everything finds."""
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(count):
        samples, ranks, most = rank_optimum.small_instance(random)
        packed = treepack.pack([{"input_ids": ids} for ids in samples], max_tokens=most, ranks=ranks)
        least = rank_optimum.least_slowest(samples, ranks, len(packed), most)
        ratios.append(rank_optimum.slowest(packed, ranks) / least)
    met = "must met" if max(ratios) <= MUST_OPTIMUM else "MISSED"
    exact = sum(ratio < 1 + 1e-9 for ratio in ratios)
    return (
        f"{count} small instances, every placement tried: the slowest ranks' work is the optimum in {exact}, at most "
        f"{max(ratios):.3f} times it (must {MUST_OPTIMUM:g}): {met}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0, help="search each instance this long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (%(default)s)")
    parser.add_argument("--starts", help="a folder for the best known placements themselves, to go on from")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--sets", type=int, nargs="*", default=[OLD, NEW], help="seeds of the sets (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls (%(default)s)")
    arguments = parser.parse_args()
    best = json.loads(BEST.read_text()) if BEST.exists() else {}
    console.print(environment())
    drawn = {seed: [x for x in families.draw(seed) if arguments.only in x.name] for seed in arguments.sets}
    with tempfile.TemporaryDirectory() as folder:
        arguments.program = build_search(Path(folder)) if arguments.seconds else None
        for seed, instances in drawn.items():
            lines = []
            for instance in instances:
                lines.append(measure(instance, best, arguments))
                BEST.write_text(json.dumps(best, indent=0, sort_keys=True) + "\n")
            console.print(size_table(SETS.get(seed, f"seed {seed}"), lines))
            console.print(kinds_table(lines))
            console.print(verdict(SETS.get(seed, f"seed {seed}"), lines))
    # The smallest of each kind: where trees are few, balance costs most.
    for seed, instances in drawn.items():
        smallest: dict[str, families.Instance] = {}
        for instance in sorted(instances, key=lambda x: len(x.shape.samples)):
            smallest.setdefault(instance.name.split("-")[0], instance)
        console.print(f"seed {seed}")
        console.print(ranks_table(list(smallest.values())))
    console.print(optimum_line(200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
