"""Pack rollouts, print what packing saves, and show that a transformer cannot tell the difference.

    make demo                                          bundled synthetic rollouts
    make demo ROLLOUTS=rollouts.npz BUDGET=16384       yours: tokens, offsets; completion_mask, group_id (optional)

Where torch is installed, a small random transformer (float64, CPU) runs once on the packed trees and once on each
sample alone, with torch's own causal attention. Log-probs of the loss terms and gradients must agree better than 1e-10.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any
from zipfile import BadZipFile

import numpy as np
from rich.console import Console
from rich.table import Table

import treepack
from treepack import synthetic

TOLERANCE = 1e-10


def load(path: str) -> dict[str, Any]:
    """A flat batch from `tokens` (T,), `offsets` (n+1,) and, where there, `completion_mask` (T,), `group_id` (n,)."""
    with np.load(path) as file:
        batch = {"input_ids": file["tokens"], "cu_seqlens": file["offsets"]}
        batch |= {name: file[name] for name in ("completion_mask", "group_id") if name in file}
    return batch


def stats_table(packings: Iterable[tuple[str, treepack.Packed]]) -> Table:
    """One column for each packing, one row for each figure."""
    packings = list(packings)
    table = Table(title="packed")
    table.add_column("")
    for name, _ in packings:
        table.add_column(name, justify="right")
    rows = {
        "samples": lambda s: f"{s.samples:,}",
        "skipped": lambda s: f"{s.skipped:,}",
        "raw tokens": lambda s: f"{s.raw_tokens:,}",
        "packed tokens": lambda s: f"{s.packed_tokens:,}",
        "packing ratio": lambda s: f"{s.packing_ratio:.2f}",
        "trees": lambda s: f"{s.trees:,}",
        "loss terms": lambda s: f"{s.terms:,}",
        "kept ids": lambda s: f"{s.kept_ids:,}",
        "attention pairs": lambda s: f"{s.attention_pairs:,}",
        "attention pairs alone": lambda s: f"{s.attention_pairs_alone:,}",
        "milliseconds": lambda s: f"{sum(s.milliseconds.values()):.2f}",
    }
    for label, show in rows.items():
        table.add_row(label, *(show(packed.stats) for _, packed in packings))
    return table


def parity_table(title: str, rows: list[tuple[str, float, float, float]], first: str) -> Table:
    """Rows of (name, packed, alone, largest difference)."""
    table = Table(title=title)
    table.add_column(first, no_wrap=True)
    for heading in ("packed", "alone", "difference"):
        table.add_column(heading, justify="right")
    for name, packed, alone, difference in rows:
        table.add_row(name, f"{packed:+.12f}", f"{alone:+.12f}", f"{difference:.1e}")
    return table


def pack_twice(batch: Any, call: dict[str, Any]) -> treepack.Packed:
    """As a training loop sees it: the first call of a process also starts threads and takes memory."""
    treepack.pack(batch, **call)
    return treepack.pack(batch, **call)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", metavar="FILE.npz", help="pack these instead of the synthetic rollouts")
    parser.add_argument("--max-tokens", type=int, default=65_536, help="budget of packed tokens per tree (%(default)s)")
    arguments = parser.parse_args()
    console = Console()

    batches = {"agent": synthetic.agent(), "multi-turn": synthetic.multi_turn()}
    try:
        if arguments.rollouts:
            batches = {arguments.rollouts: load(arguments.rollouts)}
        call = {"max_tokens": arguments.max_tokens, "overlong": "skip"}
        packings = [(name, pack_twice(batch, call)) for name, batch in batches.items()]
    except (OSError, EOFError, BadZipFile, KeyError, TypeError, ValueError, treepack.PackError) as error:
        where = f"{arguments.rollouts}: " if arguments.rollouts else ""
        parser.error(f"{where}{error.args[-1]}; a file has tokens (T,) and offsets (n + 1,), see docs/cli.md")
    console.print(stats_table(packings))

    if importlib.util.find_spec("torch") is None:
        console.print(
            "torch is not installed: packed and alone are not compared (.venv/bin/pip install torch, then again)"
        )
        return 0
    from parity import compare

    samples = synthetic.agent(prompt=96, answers=4, answer=24, vocab_size=256)
    samples += synthetic.multi_turn(rollouts=2, turns=4, prompt=48, thinking=20, answer=8, tool=12, vocab_size=256)
    result = compare(samples, max_tokens=512, vocab_size=256)
    console.print(
        f"\nA random transformer in float64 on {len(samples)} small samples: {result.raw_tokens} tokens alone, "
        f"{result.packed_tokens} packed into {result.trees} trees"
    )
    console.print(parity_table("log-probs of the terms", result.log_probs, "sum over sample"))
    console.print(parity_table("gradients", result.gradients, "norm of"))
    agrees = result.largest_difference < TOLERANCE
    verdict = "agree" if agrees else "DISAGREE"
    console.print(
        f"packed and alone {verdict}: largest difference {result.largest_difference:.1e}, allowed {TOLERANCE:.0e}"
    )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
