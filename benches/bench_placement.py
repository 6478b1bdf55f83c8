"""Which sample goes into which tree: tokens and trees on real rollouts against other rules, ranks, and the stream:
`make bench-placement`.

Every packing is first checked against the oracle (`treepack.testing`), and first fit against its known figures; if a
check fails, nothing is printed and the exit status is 1. Other packers' figures are not measured here: they are as
published in the issue that asked for this. Times are medians of calls in turn after a warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from common import PER_TOKEN, concatenate, console, environment, in_turn, load, pack, spread
from rich.table import Table

import treepack
from treepack import PackError, synthetic
from treepack.testing import check_packed


class Size(NamedTuple):
    tokens: int
    trees: int

    def __str__(self) -> str:
        return f"{self.tokens:,} ({self.trees})"


@dataclass(frozen=True)
class Row:
    """A set of rollouts, its budget, and what is published of it."""

    name: str
    max_tokens: int
    published: tuple[Size | None, ...]
    """As in PEERS and RULES, then the lower bound."""

    @property
    def bound(self) -> Size:
        return self.published[-1] or Size(0, 0)

    def best_peer(self) -> Size:
        """Fewest tokens and fewest trees of any peer."""
        peers = [peer for peer in self.published[: len(PEERS)] if peer]
        return Size(min(peer.tokens for peer in peers), min(peer.trees for peer in peers))


PEERS = ("first fit\n(AReaL)", "arrival-order\nstream (TRL)", "lexicographic\nnext fit")
RULES = ("longest first,\nmost shared", "groups, best\nfit decreasing")
PUBLISHED = [
    ("qwen_math_n8", 8192, (260183, 33), (260921, 34), (258881, 33), (297981, 37), (254423, 32), (254247, 32)),
    ("gsm8k_4models", 8192, (743295, 91), (746017, 93), (739815, 92), None, (736361, 91), (735184, 90)),
    ("tau_airline_traj", 16384, (733461, 46), (764287, 54), (760043, 53), (729787, 45), (741093, 48), (728816, 45)),
    ("tau_airline_traj", 32768, (632717, 20), (640510, 22), (636002, 21), None, (632599, 20), (632099, 20)),
    ("lats_agent_tree", 4096, (32353, 8), (31878, 9), (17780, 5), (23284, 6), (21522, 6), (17770, 5)),
    ("swe_gemini_comb", 16384, (273932, 17), (272357, 17), (267087, 17), (260799, 17), (243648, 16), (240928, 15)),
    ("swe_gemini_comb", 32768, (184101, 6), (182295, 6), (207376, 7), (264295, 9), (152893, 6), (152769, 5)),
    ("tau_airline_turns", 16384, (502279, 31), (489970, 31), (468081, 29), (400945, 25), (404810, 26), (400535, 25)),
    ("tau_airline_turns", 32768, (369186, 12), (365453, 12), (362295, 12), (346795, 11), (346581, 11), (346358, 11)),
    ("game24_tot_tree", 8192, (163053, 20), (170925, 21), (162375, 20), None, (162087, 21), (161414, 20)),
    ("game24_cot_n100", 8192, (210659, 26), (222664, 28), (205184, 26), None, (204245, 26), (203557, 25)),
]
ROWS = [Row(name, budget, tuple(size and Size(*size) for size in sizes)) for name, budget, *sizes in PUBLISHED]
MUST_CLOSE, AIM_CLOSE, MUST_TIMES, STREAM_MUST_TIMES = 0.90, 0.97, 6.0, 2.0
RANKS = (2, 4, 8, 16)


def size(packed: treepack.Packed) -> Size:
    return Size(packed.stats.packed_tokens, packed.stats.trees)


def check(row: Row, samples: list[dict[str, Any]]) -> str:
    """'' where both placements are right, and "shared" no worse than any peer; else what is wrong."""
    where = f"{row.name}, {row.max_tokens}"
    first = size(pack(samples, row.max_tokens, "first_fit"))
    if first != row.published[0]:
        return f"{where}: first fit gives {first}, known is {row.published[0]}"
    packed = pack(samples, row.max_tokens, "shared")
    ours, peer, bound = size(packed), row.best_peer(), row.bound
    if not (bound.tokens <= ours.tokens <= peer.tokens and bound.trees <= ours.trees <= peer.trees):
        return f"{where}: shared gives {ours}, allowed is from the bound {bound} to the best peer {peer}"
    try:
        check_packed(packed, samples)
    except PackError as error:
        return f"{where}: {error}"
    return ""


# ------------------------------------------------------------------------------------------------- tokens and time


def placement_table(results: list[tuple[Row, Size, dict[str, list[float]]]]) -> Table:
    table = Table(
        title="Tokens (trees). Grey: as published in the issue, not measured here", row_styles=["", "on grey7"]
    )
    table.add_column("set, max_tokens", no_wrap=True)
    for heading in (*PEERS, *RULES):
        table.add_column(heading, justify="right", no_wrap=True, style="grey50")
    table.add_column("first fit\n(ours)", justify="right", no_wrap=True)
    table.add_column('"shared"', justify="right", no_wrap=True, style="bold")
    table.add_column("lower bound", justify="right", no_wrap=True, style="grey50")
    table.add_column("closed", justify="right", no_wrap=True)
    for row, ours, _ in results:
        distance = row.best_peer().tokens - row.bound.tokens
        closed = (row.best_peer().tokens - ours.tokens) / distance
        published = [str(size) if size else "-" for size in row.published]
        first = published[0]  # `check` found ours to be the same
        table.add_row(
            f"{row.name}, {row.max_tokens}", *published[:-1], first, str(ours), published[-1], f"{100 * closed:.1f} %"
        )
    return table


def closed_line(results: list[tuple[Row, Size, dict[str, list[float]]]]) -> str:
    distance = sum(row.best_peer().tokens - row.bound.tokens for row, _, _ in results)
    closed = sum(row.best_peer().tokens - ours.tokens for row, ours, _ in results)
    share = closed / distance
    met = "aim met" if share >= AIM_CLOSE else "must met" if share >= MUST_CLOSE else "MISSED"
    return (
        f"closed of the {distance:,} tokens between the best peer of each row and its bound: {100 * share:.1f} % "
        f"(must {100 * MUST_CLOSE:.0f}, aim {100 * AIM_CLOSE:.0f}): {met}"
    )


def measure(row: Row, samples: list[dict[str, Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of the concatenates, of pack(), and of the placement within it ("placement", by its own clock)."""
    placement: list[float] = []

    def ours() -> treepack.Packed:
        packed = pack(samples, row.max_tokens, "shared")
        placement.append(packed.stats.milliseconds["placement"])
        return packed

    times = in_turn({"concatenate": lambda: concatenate(samples), "pack": ours}, repeats)
    return {**times, "placement": placement[-len(times["pack"]) :]}


def time_table(results: list[tuple[Row, Size, dict[str, list[float]]]]) -> Table:
    table = Table(title="Time, in multiples of one np.concatenate for each per-token array")
    headings = "set, max_tokens|concat ms||placement ms||times|must||pack ms (all phases)||times"
    for heading in headings.split("|"):
        table.add_column(heading, justify="left" if heading.startswith("set") else "right", no_wrap=True)
    for row, _, times in results:
        copy, placement, whole = (statistics.median(times[name]) for name in ("concatenate", "placement", "pack"))
        shown = [f"{copy:.3f}", spread(times["concatenate"]), f"{placement:.3f}", spread(times["placement"])]
        met = "met" if placement <= MUST_TIMES * copy else "MISSED"
        shown += [f"{placement / copy:.2f}", f"{MUST_TIMES:g}", met]
        shown += [f"{whole:.3f}", spread(times["pack"]), f"{whole / copy:.2f}"]
        table.add_row(f"{row.name}, {row.max_tokens}", *shown)
    return table


# --------------------------------------------------------------------------------------------- ranks and the stream


def ranks_table(loaded: list[tuple[Row, list[dict[str, Any]]]]) -> Table:
    """Imbalance: work of the slowest rank over the mean, summed over micro-batches. Extra: tokens beyond ranks = 1."""
    table = Table(title="Ranks: imbalance, extra tokens (of all), trees without a sample")
    table.add_column("set, max_tokens", no_wrap=True)
    table.add_column("tokens (trees)", justify="right", no_wrap=True)
    for ranks in RANKS:
        table.add_column(f"{ranks} ranks", justify="right", no_wrap=True)
    for row, samples in loaded:
        alone = size(pack(samples, row.max_tokens, "shared"))
        shown = []
        for ranks in RANKS:
            packed = pack(samples, row.max_tokens, "shared", ranks=ranks)
            check_packed(packed, samples)
            stats = packed.stats
            extra = stats.packed_tokens - alone.tokens
            percent = 100 * extra / alone.tokens
            shown.append(f"{stats.imbalance:.3f}  {extra:+,} ({percent:+.1f} %)  {stats.dummies}")
        table.add_row(f"{row.name}, {row.max_tokens}", str(alone), *shown)
    return table


def stream_line(repeats: int) -> str:
    """A sample of the multi-turn shape through `Packer` and through `pack`."""
    samples, budget = synthetic.multi_turn(), 131_072

    def stream() -> Any:
        packer = treepack.Packer(max_tokens=budget)
        return [trees for sample in samples for trees in packer.add(sample)], packer.flush()

    closed, (trees,) = stream()
    assert not closed
    assert trees[0].input_ids.tolist() == pack(samples, budget, "shared")[0].input_ids.tolist()
    times = in_turn({"pack": lambda: pack(samples, budget, "shared"), "stream": stream}, repeats)
    ours, theirs = (1e3 * statistics.median(times[name]) / len(samples) for name in ("stream", "pack"))
    met = "must met" if ours <= STREAM_MUST_TIMES * theirs else "MISSED"
    return (
        f"multi_turn, {len(samples)} samples with kept sets: {ours:.1f} µs {spread(times['stream'])} a sample through "
        f"Packer, {theirs:.1f} µs {spread(times['pack'])} in pack(): {ours / theirs:.2f} times, at most "
        f"{STREAM_MUST_TIMES:g}: {met}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each contender at least (%(default)s)")
    parser.add_argument("--only", default="", help="sets whose name contains this")
    arguments = parser.parse_args()

    console.print(environment())
    console.print(
        f"medians of {arguments.repeats} to 200 calls in turn after 2 of warm-up; ± half the distance of quartiles\n"
        f"per-token arrays: {', '.join(PER_TOKEN)} (int64, uint8, float32)"
    )
    if "TREEPACK_DATA" not in os.environ:
        console.print("TREEPACK_DATA is not set: the real rollouts are left out")
    else:
        loaded = [(row, load(row.name)) for row in ROWS if arguments.only in row.name]
        wrong = [error for row, samples in loaded if (error := check(row, samples))]
        if wrong:
            console.print("WRONG, so nothing is compared:", *wrong, sep="\n")
            return 1
        console.print("checked: every packing against the oracle, first fit against its known figures")
        results = [
            (row, size(pack(samples, row.max_tokens, "shared")), measure(row, samples, arguments.repeats))
            for row, samples in loaded
        ]
        console.print(placement_table(results))
        console.print(closed_line(results))
        console.print(time_table(results))
        console.print(ranks_table(loaded))
    console.print(stream_line(arguments.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
