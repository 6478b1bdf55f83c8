"""What the benchmarks share: rollouts as samples, the concatenate baseline, timing in turn, what machine this is."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import treepack

PER_TOKEN = ("input_ids", "completion_mask", "old_log_probs")

# A fixed width: the output is kept in a file.
console = Console(width=200, highlight=False)


def load(name: str) -> list[dict[str, Any]]:
    """The samples of a data set under TREEPACK_DATA, with synthetic log-probs and advantages (the sets have none).

    Arrays are views of one flat array each, for `pack()` and for the concatenates alike.
    """
    with np.load(Path(os.environ["TREEPACK_DATA"]) / "data" / f"{name}.npz") as file:
        offsets, groups = file["offsets"], file["group_id"]
        tokens = file["tokens"].astype(np.int64)
        mask = file["completion_mask"]
    random = np.random.default_rng(0)
    log_probs = -random.random(len(tokens), np.float32)
    advantages = random.standard_normal(len(groups))
    return [
        {
            "input_ids": tokens[a:b],
            "completion_mask": mask[a:b],
            "old_log_probs": log_probs[a:b],
            "advantage": float(advantage),
            "group_id": int(group),
        }
        for a, b, advantage, group in zip(offsets[:-1], offsets[1:], advantages, groups, strict=True)
    ]


def concatenate(samples: list[dict[str, Any]]) -> list[np.ndarray]:
    """The baseline: one `np.concatenate` for each per-token array that `pack()` reads."""
    return [np.concatenate([sample[name] for sample in samples]) for name in PER_TOKEN]


def pack_only(samples: list[dict[str, Any]], max_tokens: int, placement: str, **options: Any) -> treepack.Packed:
    """The call alone: the trees lie in memory, and the arrays are views that are made when they are asked for."""
    return treepack.pack(samples, max_tokens=max_tokens, placement=placement, **options)


def pack(samples: list[dict[str, Any]], max_tokens: int, placement: str, **options: Any) -> treepack.Packed:
    """`treepack.pack()` until every array of every tree that a trainer reads is in hand."""
    packed = treepack.pack(samples, max_tokens=max_tokens, placement=placement, **options)
    for tree in packed:
        _ = tree.input_ids, tree.position_ids, tree.subtree_end, tree.row_position, tree.term_row, tree.term_target
        _ = tree.terms["old_log_probs"], tree.terms["advantage"]
    return packed


def in_turn(
    functions: dict[str, Callable[[], Any]],
    repeats: int,
    warm_up: int = 2,
    seconds: float = 1.0,
    calls: tuple[str, ...] = ("",),
) -> dict[str, list[float]]:
    """Milliseconds of each function, called in turn (A B A B ...); results are freed outside the clock.

    Short calls are repeated until `seconds` have passed (up to 200 times), since their times scatter most.

    Args:
        functions: contenders by name.
        repeats: turns at least, after `warm_up` that do not count.
        seconds: turns go on until they have taken this long.
        calls: a turn is one call for each of these; its times are found under the name with this added.
    """
    times: dict[str, list[float]] = {name + call: [] for name in functions for call in calls}
    end = float("inf")
    for repeat in range(warm_up + max(repeats, 200)):
        if repeat == warm_up:
            end = time.perf_counter() + seconds
        if repeat >= warm_up + repeats and time.perf_counter() > end:
            break
        for name, function in functions.items():
            for call in calls:
                start = time.perf_counter()
                result = function()
                elapsed = time.perf_counter() - start
                del result
                if repeat >= warm_up:
                    times[name + call].append(elapsed * 1e3)
    return times


def spread(times: list[float]) -> str:
    """Half the distance between the quartiles, in percent of the median."""
    low, _, high = statistics.quantiles(times, n=4)
    return f"±{50 * (high - low) / statistics.median(times):.0f} %"


def environment(**versions: str) -> str:
    """Machine, versions and commit, in two lines."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    found = {"treepack": metadata.version("treepack"), "numpy": np.__version__, "python": platform.python_version()}
    found |= {name: metadata.version(name) for name in ("trl", "torch") if _installed(name)} | versions
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{cpu}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}\n{shown}, commit {commit()}"


def commit() -> str:
    """The commit that is checked out, `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
