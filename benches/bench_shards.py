"""One tree over several ranks, counted on real rollouts: balance, rows, bytes on the wire: `make bench-shards`.

For the largest tree of each set, cut over 2 to 16 ranks. By rows: work of the slowest rank over the mean, rows whose
keys and values the ranks receive (beside ring attention over the same rows), and the most rows of keys and values that
a rank holds, its own and those received. By heads: the same balance, and the rows of keys and values in terms of rows
with all heads. Then bytes of a layer, forward and backward of all ranks, beside ring attention and Ulysses over the
same samples alone. How each is counted, `treepack/distributed/traffic.py` says; tests/distributed/ counts again by
brute force. Before anything is printed every packing is checked by the oracle (`treepack.testing`), and the ancestors
of every cut by a walk along `parent`. Nothing is timed.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from common import console, environment, load
from rich.table import Table

import treepack
from treepack import PackError
from treepack.distributed.split import RowSplit, even_edges, row_work, split_rows
from treepack.distributed.traffic import AttentionShape, heads_traffic, ring_traffic, rows_traffic, ulysses_traffic
from treepack.testing import check_packed

SETS = (
    ("tau_airline_turns", 131_072), ("swe_gemini_comb", 131_072), ("qwen_math_n8", 65_536), ("gsm8k_4models", 65_536),
    ("tau_airline_traj", 131_072), ("game24_tot_tree", 131_072), ("swe_gemini_turns", 262_144),
    ("swe_gemini_traj", 131_072),
)  # fmt: skip
RANKS = (2, 4, 8, 16)
SHAPE = AttentionShape(query_heads=32, kv_heads=8, head_dim=128)
MIB = 2**20


class Cut(NamedTuple):
    """A tree over some ranks."""

    name: str
    tree: Any
    samples_tokens: int
    """Tokens of its samples, each alone."""
    by_rows: RowSplit


def largest(name: str, budget: int) -> Any:
    samples = [{"input_ids": x["input_ids"], "completion_mask": x["completion_mask"]} for x in load(name)]
    packed = treepack.pack(samples, max_tokens=budget)
    check_packed(packed, samples)
    return max(packed, key=lambda tree: tree.num_tokens)


def check(cut: Cut) -> str:
    """'' where the ancestors of the first row of each rank are what a walk from parent to parent finds."""
    for rank, (rows, (start, stop)) in enumerate(
        zip(cut.by_rows.ancestors, pairwise(cut.by_rows.edges.tolist()), strict=True)
    ):
        walked, at = [], int(cut.tree.parent[start]) if start < stop else -1
        while at >= 0:
            walked.append(at)
            at = int(cut.tree.parent[at])
        if walked[::-1] != rows.tolist():
            return f"{cut.name}: rank {rank} of {cut.by_rows.ranks} has {len(rows)} ancestors, found {len(walked)}"
    return ""


def over_mean(parts: np.ndarray) -> str:
    return f"{parts.max() / parts.mean():.4f}"


def balance_table(cuts: list[Cut]) -> Table:
    kv = SHAPE.kv_heads
    table = Table(
        title="Balance (work of the slowest rank over the mean), and rows of K and V that pass in a layer, forward.\n"
        f"Rows by heads: as many with all {kv} K/V heads as take the memory of a rank's part",
        row_styles=["", "on grey7"],
    )
    headings = "rows|ranks|by rows:\nbalance|received\nby all|ring, the\nsame rows|share|own rows\nat most"
    headings += "|received\nat most|peak|peak over\nrows / ranks|by heads:\nbalance|\npeak"
    table.add_column("set", no_wrap=True)
    for heading in headings.split("|"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cut in cuts:
        ranks, rows = cut.by_rows.ranks, cut.tree.num_tokens
        work = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_work(cut.tree))])
        own = np.diff(cut.by_rows.edges)
        received = np.array([len(x) for x in cut.by_rows.ancestors])
        ring = (ranks - 1) * rows
        linear = row_work(cut.tree).min() - 1  # of a position beside its pairs
        attention = (work[-1] - linear * rows) / ranks  # every rank has all pairs of a part of the heads
        table.add_row(
            cut.name, f"{rows:,}", str(ranks), over_mean(np.diff(work[cut.by_rows.edges])), f"{received.sum():,}",
            f"{ring:,}", f"{100 * received.sum() / ring:.1f} %", f"{own.max():,}", f"{received.max():,}",
            f"{(own + received).max():,}", f"{(own + received).max() * ranks / rows:.2f}",
            over_mean(attention + linear * np.diff(even_edges(rows, ranks))), f"{rows * max(kv // ranks, 1) // kv:,}",
            end_section=ranks == RANKS[-1],
        )  # fmt: skip
    return table


def bytes_table(cuts: list[Cut]) -> Table:
    table = Table(
        title=f"MiB received in a layer, forward and backward of all ranks (at most by one): {SHAPE.query_heads} query "
        f"heads, {SHAPE.kv_heads} K/V heads of {SHAPE.head_dim}, bfloat16",
        row_styles=["", "on grey7"],
    )
    headings = "rows|tokens alone|ranks|by rows|by heads|ring, the\nsame rows|ring,\nsamples alone"
    headings += "|Ulysses,\nsamples alone|Ulysses alone\nover by rows|over\nby heads"
    table.add_column("set", no_wrap=True)
    for heading in headings.split("|"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cut in cuts:
        ranks = cut.by_rows.ranks
        found = [
            rows_traffic(cut.by_rows, SHAPE),
            heads_traffic(cut.tree.num_tokens, ranks, SHAPE),
            ring_traffic(cut.tree.num_tokens, ranks, SHAPE),
            ring_traffic(cut.samples_tokens, ranks, SHAPE),
            ulysses_traffic(cut.samples_tokens, ranks, SHAPE),
        ]
        shown = [f"{x.total / MIB:,.0f} ({(x.forward + x.backward).max() / MIB:,.0f})" for x in found]
        rows, heads, *_, ulysses = (x.total for x in found)
        table.add_row(
            cut.name, f"{cut.tree.num_tokens:,}", f"{cut.samples_tokens:,}", str(ranks), *shown,
            f"{ulysses / rows:,.1f}", f"{ulysses / heads:,.1f}", end_section=ranks == RANKS[-1],
        )  # fmt: skip
    return table


def main() -> int:
    cuts = []
    for name, budget in SETS:
        try:
            tree = largest(name, budget)
        except PackError as error:
            console.print(f"WRONG, so nothing is compared: {name}, {error}")
            return 1
        alone = sum(map(len, tree.path_index()))
        cuts += [Cut(name, tree, alone, split_rows(tree, r)) for r in RANKS]
    if wrong := [said for cut in cuts if (said := check(cut))]:
        console.print("WRONG, so nothing is compared:", *wrong, sep="\n")
        return 1
    console.print(environment())
    console.print("checked: every packing against the oracle, the ancestors of every cut along `parent`")
    console.print(balance_table(cuts))
    console.print(bytes_table(cuts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
