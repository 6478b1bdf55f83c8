"""`treepack.pack()` against one np.concatenate per per-token array, and against TRL's TreeRow: `make bench`.

Everything of a case runs in one process and in turn (concatenates, pack, concatenates, pack, ...; pack, TRL, ...):
medians after a warm-up. The first call is measured apart, in a process of its own. A case is first checked against the
oracle (`treepack.testing`), TRL against the same packing array for array; if a check fails, no ratio is printed and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from common import PER_TOKEN, concatenate, console, environment, in_turn, load, pack, pack_only, spread
from rich.table import Table

from treepack import PackError, synthetic
from treepack.testing import check_packed


@cache
def tree_row() -> Any:
    """TRL's class, or None where it is not installed; imported late, since that takes seconds."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.async_grpo.packing import TreeRow
    except ImportError:
        return None
    return TreeRow


@dataclass(frozen=True)
class Case:
    """A set of rollouts, its budget, and what is asked of it (multiples of the concatenates; `trl`: times faster)."""

    name: str
    max_tokens: int
    study: str
    aim: float
    must: float = 3.0
    trl: int | None = None
    packed: tuple[int, int] | None = None  # trees, tokens that first fit gives

    def samples(self, kept_sets: bool = False) -> list[dict[str, Any]]:
        if self.name == "agent":
            return synthetic.agent(kept_sets=kept_sets)
        if self.name == "multi_turn":
            return synthetic.multi_turn(kept_sets=kept_sets)
        return load(self.name)


CASES = [
    Case("qwen_math_n8", 8_192, "1.6", 2.2, packed=(33, 260_183)),
    Case("gsm8k_4models", 16_384, "1.0-1.7", 2.5, packed=(46, 739_770)),
    Case("tau_airline_traj", 16_384, "1.3", 1.6, packed=(46, 733_461)),
    Case("lats_agent_tree", 4_096, "1.0", 1.6, packed=(8, 32_353)),
    Case("swe_gemini_comb", 32_768, "0.6", 0.8, packed=(6, 184_101)),
    Case("tau_airline_turns", 32_768, "0.4", 0.6, packed=(12, 369_186)),
    Case("game24_cot_n100", 8_192, "0.6", 1.0, packed=(26, 210_659)),
    Case("game24_tot_tree", 131_072, "0.6", 1.0),
    Case("swe_gemini_turns", 131_072, "0.4", 0.5),
    Case("swe_gemini_traj", 131_072, "2.0", 2.5),
    Case("crosswords_tot_dfs", 131_072, "0.4", 0.6),
    Case("agent", 131_072, "1.0", 1.5, trl=300, packed=(1, 9_200)),
    Case("multi_turn", 131_072, "1.2", 1.6, trl=1_000, packed=(1, 61_240)),
]
PLACEMENT = "first_fit"  # the placement of the study and of the known trees and tokens
KEPT_SETS_MUST_MS = 1.0

Result = tuple[Case, Any, dict[str, list[float]], float]  # case, stats, times by contender, first call


def check(case: Case, samples: list[dict[str, Any]]) -> str:
    """'' where the packing is right, else what is wrong."""
    packed = pack(samples, case.max_tokens, PLACEMENT)
    found = (packed.stats.trees, packed.stats.packed_tokens)
    if case.packed is not None and found != case.packed:
        return f"{case.name}: trees, tokens are {found}, expected {case.packed}"
    try:
        check_packed(packed, samples)
        if case.trl and tree_row() is not None:
            check_trl(samples)
    except (AssertionError, PackError) as error:
        return f"{case.name}: {error}"
    return ""


def check_trl(samples: list[dict[str, Any]]) -> None:
    """TRL's row equals label branching in first-seen order, array for array: both did the same work."""
    (tree,) = pack(samples, 1 << 30, PLACEMENT, branching="label", order="first_seen")
    row = trl_pack(samples)
    expected = {
        "input_ids": tree.input_ids,
        "position_ids": tree.position_ids,
        "shift_labels": tree.shift_labels,
        "token_index": tree.row_position[tree.term_row],
        "segment_id": tree.term_sample,
        "old_log_probs": tree.terms["old_log_probs"],
        "advantages": tree.terms["advantage"],
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(row[name].numpy(), value, err_msg=f"TRL's {name}")


def trl_pack(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """TRL's packer on the same samples."""
    row = tree_row()()
    for sample in samples:
        row.add(sample)
    return row.pack()


def first_call(case: Case) -> float:
    """Milliseconds of the first `pack()` of a new process, its imports done."""
    command = [sys.executable, __file__, "--first-call", case.name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(case: Case, samples: list[dict[str, Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each contender, in turn: concatenates and pack, then pack and TRL.

    TRL's objects push all else out of the caches. So a turn of the second pair is two calls, and the second of them,
    which finds the caches as its own first call left them, is compared; the first is shown beside it.
    """

    def ours() -> Any:
        return pack_only(samples, case.max_tokens, PLACEMENT)

    def with_arrays() -> Any:
        return pack(samples, case.max_tokens, PLACEMENT)

    contenders = {"concatenate": lambda: concatenate(samples), "pack": ours, "pack, arrays": with_arrays}
    times = in_turn(contenders, repeats)
    if case.trl and tree_row() is not None:
        pair = {"pack beside TRL": ours, "trl": lambda: trl_pack(samples)}
        times |= in_turn(pair, repeats, calls=(", caches cold", ""))
    return times


def verdict(value: float, aim: float, must: float) -> str:
    return "aim met" if value <= aim else "must met" if value <= must else "MISSED"


def concatenate_table(results: list[Result]) -> Table:
    table = Table(title="pack() as a multiple of the concatenates")
    columns = "case|samples|raw tokens|budget|trees|N|M|concat ms||pack ms||first ms|ratio|with arrays|study|aim|must|"
    for heading in columns.split("|"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for case, stats, times, first in results:
        concat, ours, arrays = (statistics.median(times[name]) for name in ("concatenate", "pack", "pack, arrays"))
        counts = (stats.samples, stats.raw_tokens, case.max_tokens, stats.trees, stats.packed_tokens, stats.terms)
        table.add_row(
            case.name,
            *(f"{count:,}" for count in counts),
            f"{concat:.3f}",
            spread(times["concatenate"]),
            f"{ours:.3f}",
            spread(times["pack"]),
            f"{first:.2f}",
            f"{ours / concat:.2f}",
            f"{arrays / concat:.2f}",
            case.study,
            f"{case.aim:g}",
            f"{case.must:g}",
            verdict(ours / concat, case.aim, case.must),
        )
    return table


def trl_table(results: list[Result]) -> Table:
    table = Table(title="TRL's TreeRow, add and pack, as a multiple of pack()")
    for heading in ("case", "TRL ms", "", "pack ms", "", "pack ms, caches cold", "times faster", "must", ""):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for case, _, times, _ in results:
        if case.trl and "trl" in times:
            theirs, ours = times["trl"], times["pack beside TRL"]
            faster = statistics.median(theirs) / statistics.median(ours)
            shown = [f"{statistics.median(theirs):.1f}", spread(theirs), f"{statistics.median(ours):.3f}", spread(ours)]
            shown.append(f"{statistics.median(times['pack beside TRL, caches cold']):.3f}")
            met = "must met" if faster >= case.trl else "MISSED"
            table.add_row(case.name, *shown, f"{faster:,.0f}", f"{case.trl:,}", met)
    return table


def kept_sets_line(repeats: int) -> str:
    """The agent shape with kept sets, or what is wrong with it."""
    samples = synthetic.agent()
    packed = pack(samples, 131_072, PLACEMENT)
    check_packed(packed, samples)
    kept = packed.stats.kept_ids
    times = in_turn({"pack": lambda: pack(samples, 131_072, PLACEMENT)}, repeats)["pack"]
    ours = statistics.median(times)
    met = "must met" if ours <= KEPT_SETS_MUST_MS else "MISSED"
    must = f"must: at most {KEPT_SETS_MUST_MS:g} ms"
    return f"agent with kept sets (T = {kept:,}): {ours:.3f} ms {spread(times)}; {must}: {met}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each contender at least (%(default)s)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.first_call:
        case = next(case for case in CASES if case.name == arguments.first_call)
        samples = case.samples()
        start = time.perf_counter()
        packed = pack(samples, case.max_tokens, PLACEMENT)
        print((time.perf_counter() - start) * 1e3)
        del packed
        return 0

    with_data = "TREEPACK_DATA" in os.environ
    cases = [case for case in CASES if arguments.only in case.name and (with_data or case.trl)]
    console.print(environment())
    console.print(
        f"medians of {arguments.repeats} to 200 calls in turn after 2 of warm-up; ± half the distance of quartiles\n"
        f"first ms: first call of a new process; per-token arrays: {', '.join(PER_TOKEN)} (int64, uint8, float32)"
    )
    if not with_data:
        console.print("TREEPACK_DATA is not set: the real rollouts are left out")
    if tree_row() is None:
        console.print("TRL is not installed (it needs Python 3.11): the comparison with it is left out")

    results, wrong = [], []
    for case in cases:
        samples = case.samples()
        if error := check(case, samples):
            wrong.append(error)
            continue
        stats = pack(samples, case.max_tokens, PLACEMENT).stats
        results.append((case, stats, measure(case, samples, arguments.repeats), first_call(case)))
    if wrong:
        console.print("WRONG, so nothing is compared:", *wrong, sep="\n")
        return 1
    console.print("checked: every case against the oracle, and the packing of TRL array for array")
    console.print(concatenate_table(results))
    console.print(trl_table(results))
    if arguments.only in "agent":
        console.print(kept_sets_line(arguments.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
