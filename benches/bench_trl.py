"""Rank 0's collate time under TRL's asynchronous GRPO, before and after `treepack.integrations.trl.install()`:
`make bench-trl`.

Both run in one process and in turn: medians after a warm-up. First their batches are compared byte for byte; if they
differ, nothing is timed and the exit status is 1. TRL's objects push all else out of the caches, so a turn is two calls
of each: the second finds the caches as its own first call left them, the first is shown as "cold".
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import console, environment, in_turn, spread
from rich.table import Table

from treepack import synthetic
from treepack.integrations import trl as ours

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
try:
    from trl.experimental.async_grpo import async_grpo_trainer as trainer
    from trl.experimental.async_grpo import packing
except ImportError as error:
    sys.exit(f"TRL 1.16.0 is needed (Python 3.11 and newer): {error}")

SHAPES: dict[str, Callable[..., list[dict[str, Any]]]] = {"agent": synthetic.agent, "multi_turn": synthetic.multi_turn}
Job = Callable[[type], Any]


def rollouts(shape: str, kept_sets: bool = False) -> list[dict[str, Any]]:
    return [sample | {"metrics": {"reward": 0.0}} for sample in SHAPES[shape](kept_sets=kept_sets)]


def add_and_pack(samples: list[dict[str, Any]]) -> Job:
    """One row: every sample added, then its tensors."""

    def job(row_class: type) -> Any:
        row = row_class()
        for sample in samples:
            row.add(sample)
        return row.pack()

    return job


def fixed_count(samples: list[dict[str, Any]]) -> Job:
    """`FixedCountBatcher` and `DataCollatorForRollout`, one rank, one micro-batch of all samples."""

    def job(row_class: type) -> Any:
        trainer.TreeRow = row_class
        (rows,) = trainer.FixedCountBatcher(samples, 1, len(samples))
        return collate(rows)

    return job


def token_budget(samples: list[dict[str, Any]]) -> Job:
    """`TokenBudgetBatcher` and the collator: two ranks, half of the samples each, closed by one that fits neither."""
    grouped = [sample | {"group_id": 2 * i // len(samples)} for i, sample in enumerate(samples)]
    sizes = []
    for group in (0, 1):
        row = ours.TreeRow()
        for sample in grouped:
            if sample["group_id"] == group:
                row.add(sample)
        sizes.append(max(len(row.tokens), row.trained))
    last = {name: np.resize(samples[0][name], max(sizes)) for name in ("input_ids", "old_log_probs")}
    last |= {"completion_mask": np.zeros(max(sizes), np.uint8), "advantage": 0.0, "group_id": 2, "metrics": {}}
    last["input_ids"] = last["input_ids"] + 200_000

    def job(row_class: type) -> Any:
        trainer.TreeRow = row_class
        rows = next(iter(trainer.TokenBudgetBatcher([*grouped, last], 2, max(sizes), defaultdict(list))))
        return collate(rows)

    return job


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = trainer.DataCollatorForRollout(0, len(rows))([rows])
    return batch


JOBS = {
    "add + pack of one row": add_and_pack,
    "fixed count, collated": fixed_count,
    "token budget, collated": token_budget,
}


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed turns at least (%(default)s)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)  # TRL's collator fills small tensors: a second thread costs more waiting than it saves
    theirs = packing.TreeRow
    ours.install()
    console.print(environment())
    console.print(f"medians of {repeats} to 200 turns after 2 of warm-up, torch threads: {torch.get_num_threads()}")
    jobs = {(shape, name): job(rollouts(shape)) for shape in SHAPES for name, job in JOBS.items()}
    wrong = [f"{shape}, {name}" for (shape, name), job in jobs.items() if not same(job(theirs), job(ours.TreeRow))]
    if wrong:
        console.print("WRONG: batches differ, so nothing is compared:", *wrong, sep="\n")
        return 1
    console.print("checked: every batch equals TRL's, byte for byte")
    table = Table(title="rank 0, from samples to the batch, TRL 1.16 before and after install()")
    for heading in ("shape", "what", "before ms", "", "after ms", "", "after ms, cold", "times faster"):
        table.add_column(heading, justify="left" if heading in ("shape", "what") else "right", no_wrap=True)
    for (shape, name), job in jobs.items():
        contenders = {"before": lambda job=job: job(theirs), "after": lambda job=job: job(ours.TreeRow)}
        times = in_turn(contenders, repeats, calls=(", cold", ""))
        before, after = (statistics.median(times[key]) for key in ("before", "after"))
        table.add_row(
            shape,
            name,
            f"{before:.1f}",
            spread(times["before"]),
            f"{after:.2f}",
            spread(times["after"]),
            f"{statistics.median(times['after, cold']):.2f}",
            f"{before / after:.0f}",
        )
    console.print(table)
    for shape in SHAPES:
        job = add_and_pack(rollouts(shape, kept_sets=True))
        times = in_turn({"after": lambda job=job: job(ours.TreeRow)}, repeats)["after"]
        console.print(
            f"{shape} with kept sets, which TRL has not: add + pack {statistics.median(times):.2f} ms {spread(times)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
