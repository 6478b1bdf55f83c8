"""How time and memory of `treepack.pack()` grow, from 10^6 to 10^8 tokens and on hard inputs: `make bench-scaling`.

Every line is a process of its own. It packs once and takes the peak of its memory beyond the input, as a multiple of
the bytes of the arrays it gave (O(N + R + M + T) means: the multiple does not grow). Then it times concatenates and
pack in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import concatenate, console, environment, in_turn, pack, spread
from rich.table import Table

VOCABULARY = 151_000
Arrays = tuple[np.ndarray, np.ndarray]  # ids of all samples end to end, lengths of the samples


def low_sharing(tokens: int, random: np.random.Generator) -> Arrays:
    """Samples of 1,000 tokens that share their first 20."""
    ids = random.integers(0, VOCABULARY, (tokens // 1_000, 1_000))
    ids[:, :20] = np.arange(20)
    return ids.ravel(), np.full(len(ids), 1_000)


def groups_of_eight(tokens: int, random: np.random.Generator) -> Arrays:
    """Samples of 1,000 tokens, each eight of them with a prompt of 500."""
    ids = random.integers(0, VOCABULARY, (tokens // 8_000, 8, 1_000))
    ids[:, 1:, :500] = ids[:, :1, :500]
    return ids.ravel(), np.full(ids.shape[0] * 8, 1_000)


def children_of_one_node(samples: int, random: np.random.Generator) -> Arrays:
    """10 shared tokens, one of its own for each sample, 4 more."""
    ids = random.integers(0, VOCABULARY, (samples, 15))
    ids[:, :10] = np.arange(10)
    ids[:, 10] = np.arange(samples)
    return ids.ravel(), np.full(samples, 15)


def nested_prefixes(depth: int, random: np.random.Generator) -> Arrays:
    """The prefixes of one path, shortest first: depth^2 / 2 raw tokens."""
    lengths = np.arange(1, depth + 1)
    path = random.integers(0, VOCABULARY, depth)
    return np.concatenate([path[:length] for length in lengths]), lengths


def one_token_samples(samples: int, random: np.random.Generator) -> Arrays:
    return random.permutation(samples), np.ones(samples, np.int64)


def trees(samples: int, random: np.random.Generator) -> Arrays:
    """50 shared tokens and 50 of its own: with a budget of 149 every sample is a tree."""
    ids = random.integers(0, VOCABULARY, (samples, 100))
    ids[:, :50] = np.arange(50)
    ids[:, 50] = np.arange(samples)
    return ids.ravel(), np.full(samples, 100)


def binary_paths(samples: int, random: np.random.Generator) -> Arrays:
    """20 tokens, each of them 0 or 1: forks everywhere near the root."""
    return random.integers(0, 2, samples * 20), np.full(samples, 20)


@dataclass(frozen=True)
class Series:
    """One kind of input at growing sizes; the last size is compared with the first."""

    build: Callable[[int, np.random.Generator], Arrays]
    sizes: tuple[int, ...]
    max_tokens: int
    hard: bool = True
    must_grow: float = 2.0
    """How much the time of a token may grow from the first size to the last, at most."""


SERIES = {
    "low sharing": Series(low_sharing, (10**6, 10**7, 10**8), 16_384, hard=False),
    "groups of 8": Series(groups_of_eight, (10**6, 10**7, 10**8), 16_384, hard=False),
    "children of one node": Series(children_of_one_node, (10**4, 10**5), 1 << 23),
    "nested prefixes": Series(nested_prefixes, (3_162, 10**4), 1 << 24),
    "one-token samples": Series(one_token_samples, (10**4, 10**5), 1 << 20),
    "trees": Series(trees, (10**4, 10**5), 149),
    "binary paths": Series(binary_paths, (20_000, 80_000), 1_024, must_grow=1.25),
}
COUNTS = ("samples", "raw tokens", "N", "trees")
TIMES = ("pack ms", "", "ns/token", "concat ns/token", "ratio")
MEMORY = ("arrays MB", "peak MB", "multiple")


def samples_of(ids: np.ndarray, lengths: np.ndarray) -> list[dict[str, Any]]:
    """Views of flat arrays; the second half of every sample is trained."""
    ends = np.cumsum(lengths)
    mask = np.zeros(len(ids), np.uint8)
    log_probs = np.full(len(ids), -0.5, np.float32)
    samples = []
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        mask[end - length // 2 : end] = 1
        run = slice(end - length, end)
        columns = {"input_ids": ids[run], "completion_mask": mask[run], "old_log_probs": log_probs[run]}
        samples.append(columns | {"advantage": 0.5, "group_id": number // 8})
    return samples


def reset_peak() -> None:
    """Let the peak start again from what is resident now (Linux; elsewhere building the input may hide it)."""
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5")


def peak() -> int:
    """Largest resident size in bytes since `reset_peak`."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(series: Series, size: int, repeats: int, placement: str) -> dict[str, Any]:
    """One line of the table, as plain numbers."""
    samples = samples_of(*series.build(size, np.random.default_rng(0)))
    pack(samples[:2], series.max_tokens, placement)  # imports and first-use costs are no memory of the packing
    before = psutil.Process().memory_info().rss
    reset_peak()
    packed = pack(samples, series.max_tokens, placement)
    beyond = peak() - before
    given = sum(tree.buffer.nbytes for tree in packed)
    stats = packed.stats
    del packed
    times = in_turn(
        {"concat": lambda: concatenate(samples), "pack": lambda: pack(samples, series.max_tokens, placement)},
        repeats,
        1,
    )
    return {
        "samples": stats.samples,
        "raw": stats.raw_tokens,
        "packed": stats.packed_tokens,
        "trees": stats.trees,
        "given": given,
        "beyond": beyond,
        "concat": statistics.median(times["concat"]),
        "pack": statistics.median(times["pack"]),
        "spread": spread(times["pack"]),
    }


def in_own_process(name: str, size: int, repeats: int, placement: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--line", name, str(size), "--repeats", str(repeats), "--placement", placement]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def growth(lines: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    """How a figure changed from the first size to the last."""
    return value(lines[-1]) / value(lines[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each contender at least (%(default)s)")
    parser.add_argument("--largest", type=float, default=1e8, help="leave out token counts above this (%(default)g)")
    parser.add_argument("--only", default="", help="series whose name contains this")
    parser.add_argument("--placement", default="first_fit", help="as for pack() (%(default)s)")
    parser.add_argument("--line", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.line:
        name, size = arguments.line
        print(json.dumps(measure(SERIES[name], int(size), arguments.repeats, arguments.placement)))
        return 0

    console.print(environment())
    console.print(
        f"medians of {arguments.repeats} to 200 calls in turn after 1 of warm-up; ± half the distance of the quartiles"
    )
    table = Table(title="ns per raw token, and peak memory beyond the input as a multiple of the arrays given")
    for heading in ("input", *COUNTS, *TIMES, *MEMORY):
        table.add_column(heading, justify="left" if heading == "input" else "right", no_wrap=True)
    verdicts = []
    for name, series in SERIES.items():
        if arguments.only not in name:
            continue
        lines = []
        for size in series.sizes:
            if not series.hard and size > arguments.largest:
                continue
            line = in_own_process(name, size, arguments.repeats, arguments.placement)
            lines.append(line)
            table.add_row(
                name,
                *(f"{line[count]:,}" for count in ("samples", "raw", "packed", "trees")),
                f"{line['pack']:.2f}",
                line["spread"],
                f"{line['pack'] * 1e6 / line['raw']:.2f}",
                f"{line['concat'] * 1e6 / line['raw']:.2f}",
                f"{line['pack'] / line['concat']:.2f}",
                f"{line['given'] / 1e6:.1f}",
                f"{line['beyond'] / 1e6:.1f}",
                f"{line['beyond'] / line['given']:.2f}",
            )
        per_token = growth(lines, lambda line: line["pack"] / line["raw"])
        ratio = growth(lines, lambda line: line["pack"] / line["concat"])
        raw = growth(lines, lambda line: line["raw"])
        met = "must met" if per_token <= series.must_grow else "MISSED"
        verdicts.append(
            f"{name}: {raw:.0f}x the tokens, {raw * per_token:.1f}x the time; ns per token x{per_token:.2f} "
            f"(must: at most x{series.must_grow:g}: {met}), ratio to the concatenates x{ratio:.2f}"
        )
        table.add_section()
    console.print(table)
    console.print(*verdicts, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
