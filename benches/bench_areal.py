"""AReaL 1.0.4's tree packing against treepack's, on rollouts of TREEPACK_DATA: host seconds and bytes of metadata.

    TREEPACK_AREAL=folder/with/the/unpacked/wheel python benches/bench_areal.py

Everything of a case runs in one process, in turn. Gate: micro-batches, samples, tokens, depths and packed columns equal
AReaL's position by position, and `subtree_end` says what its dense mask says; on a red gate no figure is printed and
the exit status is 1. AReaL's code is its own; what it imports from elsewhere in AReaL is the stand-ins of the tests.

tries: AReaL's `_greedy_build_tries` (its best of some) against `build_tries` (the median), from the same padded batch:
ours reads the whole attention mask, folds, places and lays out every tree, positions of padding included. Nodes, which
AReaL makes while it builds, are made on demand: `nodes` is ours with all of them in lists, against the same of AReaL;
`spans` is both with the spans of every sequence, which is what AReaL's log-probs ask a trie for. batch:
`build_packed_tree_batch` of both. metadata: for one micro-batch, what the Triton path of AReaL puts on the device (bit
mask and lists) against `subtree_end` and tile lists, and the seconds to make it.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import console, environment
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import areal_stubs

from treepack.integrations import areal
from treepack.integrations.areal.attention import tree_metadata

#: set, samples, budget.
CASES = [
    ("qwen_math_n8", 800, 8_192),
    ("tau_airline_turns", 200, 16_384),
    ("swe_gemini_comb", 60, 16_384),
    ("game24_cot_n100", 2_000, 8_192),  # few trees, so that AReaL looks into few: its best case
    ("game24_cot_n100", 10_000, 8_192),
]
MUST = 100.0
CPU = torch.device("cpu")


def load(name: str, samples: int, budget: int) -> dict[str, Any]:
    """The first samples of a set that fit the budget, padded on the right, with a mask and log-probs."""
    with np.load(Path(os.environ["TREEPACK_DATA"]) / "data" / f"{name}.npz") as file:
        tokens, offsets, trained = file["tokens"].astype(np.int64), file["offsets"], file["completion_mask"]
    spans = [(a, b) for a, b in pairwise(offsets) if b - a <= budget][:samples]
    width = max(b - a for a, b in spans)
    ids, mask, loss = (np.zeros((len(spans), width), np.int64) for _ in range(3))
    for row, (a, b) in enumerate(spans):
        ids[row, : b - a], mask[row, : b - a], loss[row, : b - a] = tokens[a:b], 1, trained[a:b]
    data = {"input_ids": ids, "attention_mask": mask, "loss_mask": loss}
    log_probs = -np.random.default_rng(0).random(ids.shape, np.float32)
    return {key: torch.from_numpy(value) for key, value in data.items()} | {"logprobs": torch.from_numpy(log_probs)}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def best(function: Callable[[], Any], seconds: float = 5.0) -> tuple[float, Any]:
    """(fewest seconds of a call, result), of calls for about `seconds`, two at least."""
    found = [timed(function)]
    while len(found) < 2 or sum(time for time, _ in found) < seconds:
        found.append(timed(function))
    return min(found, key=lambda pair: pair[0])


def median(function: Callable[[], Any], seconds: float = 1.0) -> float:
    """Median seconds of calls, after one to warm up, for about `seconds`."""
    function()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        times.append(timed(function)[0])
    return statistics.median(times)


def check(theirs: Any, ours: Any, tree: Any) -> None:
    """AssertionError where the two batches differ."""
    assert ours.group_lens == theirs.group_lens, "tokens of the micro-batches"
    for a, b, size in zip(theirs.mbs, ours.mbs, theirs.padded_to_lengths, strict=True):
        place = areal_stubs.same_place(a["trie_node"], b["trie_node"], size)
        for name in ("input_ids", "position_ids"):
            assert torch.equal(b[name][0, place], a[name][0]), name
        for name in ("loss_mask", "logprobs"):
            assert torch.equal(a[name], b[name]), name
    mask = tree.build_attention_mask_from_trie(theirs.mbs[-1]["trie_node"], theirs.padded_to_lengths[-1], CPU)
    place = areal_stubs.same_place(theirs.mbs[-1]["trie_node"], ours.mbs[-1]["trie_node"], len(mask))
    attention = torch.from_numpy(ours.mbs[-1]["trie_node"].tree.attention_mask())
    assert torch.equal(attention[place][:, place], mask), "attention"


def build(data: dict[str, Any], budget: int) -> list[Any]:
    """Our tries."""
    return areal.build_tries(data["input_ids"], data["attention_mask"], budget)


def all_nodes(data: dict[str, Any], budget: int) -> list[Any]:
    """Our tries with the lists of all nodes."""
    tries = build(data, budget)
    for trie in tries:
        _ = trie.nodes
    return tries


def spans_of(tries: list[Any]) -> list[list[tuple[int, int]]]:
    """Of every sequence of every trie, in AReaL's way of asking."""
    return [trie.get_sequence_tree_indices(sequence) for trie in tries for sequence in trie.all_sequence_ids]


def nbytes(record: Any) -> int:
    return sum(x.numel() * x.element_size() for x in vars(record).values())


def case(name: str, samples: int, budget: int) -> dict[str, float] | str:
    """Figures of a case, or what is wrong with it."""
    tree = areal_stubs.load().tree
    data, spec = load(name, samples, budget), areal_stubs.Spec(budget)
    whole, theirs = timed(lambda: tree.build_packed_tree_batch(data, spec))
    ours = areal.build_packed_tree_batch(data, spec)
    try:
        check(theirs, ours, tree)
    except AssertionError as error:
        return f"{name}: {error}"
    figures = {
        "samples": len(data["input_ids"]),
        "raw": int(data["attention_mask"].sum()),
        "budget": budget,
        "trees": len(ours.mbs),
        "packed": sum(ours.group_lens),
        "dense bytes": budget * budget,
    }
    figures |= their_figures(tree, data, budget, theirs.mbs[0]["trie_node"]) | {"batch": whole}
    del theirs
    gc.collect()  # what is left of theirs would slow ours down
    return figures | our_figures(data, spec, ours.mbs[0]["trie_node"])


def their_figures(tree: Any, data: dict[str, Any], budget: int, trie: Any) -> dict[str, float]:
    greedy, (tries, _) = best(lambda: tree._greedy_build_tries(data, budget))
    asked, _ = timed(lambda: spans_of(tries))
    bits, masks = timed(lambda: tree.build_triton_attn_data_from_trie(trie, budget))
    return {"tries": greedy, "spans": greedy + asked, "metadata": bits, "bit bytes": nbytes(masks)}


def our_figures(data: dict[str, Any], spec: Any, trie: Any) -> dict[str, float]:
    budget = spec.max_tokens_per_mb
    metadata = tree_metadata(trie, budget, CPU)
    fresh = [anew(trie) for _ in range(20)]
    return {
        "our tries": median(lambda: build(data, budget)),
        "our nodes": median(lambda: all_nodes(data, budget)),
        "our spans": median(lambda: spans_of(build(data, budget))),
        "our batch": median(lambda: areal.build_packed_tree_batch(data, spec)),
        "our metadata": statistics.median(timed(partial(tree_metadata, x, budget, CPU))[0] for x in fresh),
        "our bytes": metadata.metadata_bytes(),
    }


def anew(trie: Any) -> Any:
    """The trie as it was before its tile lists were made."""
    return pickle.loads(pickle.dumps(trie))


def table(title: str, *headings: str) -> Table:
    made = Table(title=title)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="only this set; may be given more than once")
    chosen = parser.parse_args().case
    torch.set_num_threads(1)
    areal_stubs.load(block_size=128)
    rows, wrong = [], []
    for name, samples, budget in CASES:
        if chosen is None or name in chosen:
            found = case(name, samples, budget)
            if isinstance(found, str):
                wrong.append(found)
            else:
                rows.append((name, found))
    if wrong or not rows:
        console.print("gate: red\n" + "\n".join(wrong))
        return 1
    console.print(environment(areal="1.0.4"), "\ngate: green, one thread\n")
    host = table("host time: AReaL / treepack", "set", "samples", "raw tokens", "budget", "trees", "packed", "tries s",
                 "ms", "times", "nodes ms", "times", "spans s", "ms", "times", "batch s", "ms", "times")  # fmt: skip
    device = table("metadata of attention, one micro-batch: AReaL / treepack", "set", "positions", "dense mask MiB",
                   "bit mask and lists MiB", "KiB", "times less", "to make it s", "ms", "times")  # fmt: skip
    missed = []
    for name, x in rows:
        tries, spans, batch, made = (x[key] / x[f"our {key}"] for key in ("tries", "spans", "batch", "metadata"))
        missed += [f"{name} ({x['samples']:,} samples): {tries:.0f}"] if tries < MUST else []
        counts = [f"{x[key]:,}" for key in ("samples", "raw", "budget", "trees", "packed")]
        times = [f"{x['tries']:.2f}", f"{x['our tries'] * 1e3:.2f}", f"{tries:,.0f}"]
        times += [f"{x['our nodes'] * 1e3:.2f}", f"{x['tries'] / x['our nodes']:,.0f}"]
        times += [f"{x['spans']:.2f}", f"{x['our spans'] * 1e3:.2f}", f"{spans:,.0f}"]
        times += [f"{x['batch']:.1f}", f"{x['our batch'] * 1e3:.2f}", f"{batch:,.0f}"]
        host.add_row(name, *counts, *times)
        sizes = [f"{x['budget']:,}", f"{x['dense bytes'] / 2**20:.0f}", f"{x['bit bytes'] / 2**20:.1f}"]
        sizes += [f"{x['our bytes'] / 2**10:.0f}", f"{x['bit bytes'] / x['our bytes']:,.0f}"]
        device.add_row(name, *sizes, f"{x['metadata']:.2f}", f"{x['our metadata'] * 1e3:.2f}", f"{made:,.0f}")
    console.print(host)
    console.print(
        "tries: from the padded batch to tries, ours with every tree laid out, nodes on demand; nodes: ours with the "
        "lists of all nodes;\nspans: both with the spans of every sequence; batch: all of build_packed_tree_batch\n"
    )
    console.print(device)
    console.print(
        f"tries at least {MUST:.0f} times faster: {'MISSED by ' + ', '.join(missed) if missed else 'must met'}"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
