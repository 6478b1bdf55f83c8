"""Cut trees on a GPU: one pass over real rollouts range by range, against trees within the same budget and the samples
alone.

    python benches/gpu_ranges.py --write rollouts.npz                      # once, where TREEPACK_DATA is
    python benches/gpu_ranges.py --data rollouts.npz [--budgets 16384 32768] [--ways cut packed alone]

The model is that of `gpu_model.py`: 1.5B parameters, random, bfloat16, every layer checkpointed. A pass is all forward
and backward passes over all samples, the gradients in the parameters at its end:

    cut       pack(cut=True), RangeRunner: every distinct token once
    packed    pack(): trees within the budget, term_log_probs of each
    alone     samples end to end up to the budget, padding-free, torch's varlen attention; with --alone-every 8 every
              eighth of these batches, its time times eight

All take the same sum over the loss terms, and the gate is that loss and the gradients of some parameters, which must
agree as two ways to compute in bfloat16 do (but for `alone` where it ran in part). No figure is printed on a red gate.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu_model
import model_rows
import numpy as np
import torch
from torch import Tensor

import treepack
from treepack.integrations.transformers import RangeRunner

#: Sets, and how many distinct tokens are taken of them; None: all.
SETS: dict[str, int | None] = {"tau_airline_turns": 200_000, "swe_gemini_comb": None}
#: Relative distance of the loss, and of the gradients as vectors, that is allowed between two ways.
LOSS_ALLOWED, GRADIENT_ALLOWED = 0.01, 0.08
KEY_VALUE_BYTES = 2 * 28 * 2 * 128 * 2  # of a row of this model: K and V, layers, heads, size, bfloat16
Way = Callable[[Any], float]


def write(path: Path) -> None:
    """Token ids and masks of both sets in one small file."""
    arrays: dict[str, Any] = {}
    for name, limit in SETS.items():
        with np.load(Path(os.environ["TREEPACK_DATA"]) / "data" / f"{name}.npz") as file:
            tokens, offsets, mask = file["tokens"], file["offsets"], file["completion_mask"]
        count = len(offsets) - 1
        if limit is not None:
            low = 1
            while low < count:  # the most samples with no more distinct tokens
                middle = (low + count + 1) // 2
                ids = {"input_ids": tokens[: offsets[middle]], "cu_seqlens": offsets[: middle + 1]}
                fits = treepack.pack(ids, max_tokens=2**31 - 1).stats.packed_tokens <= limit
                low, count = (middle, count) if fits else (low, middle - 1)
        stop = offsets[count]
        arrays |= {
            f"{name}.tokens": tokens[:stop],
            f"{name}.offsets": offsets[: count + 1],
            f"{name}.mask": mask[:stop],
        }
    np.savez_compressed(path, **arrays)


def read(path: Path, name: str) -> list[dict[str, np.ndarray]]:
    with np.load(path) as file:
        tokens, offsets, mask = (file[f"{name}.{part}"] for part in ("tokens", "offsets", "mask"))
    return [{"input_ids": tokens[a:b].astype(np.int64), "completion_mask": mask[a:b]} for a, b in pairwise(offsets)]


class Pass:
    """All samples through the model, each way with the same loss: the mean of weights x log-probs."""

    def __init__(self, samples: list[dict[str, np.ndarray]], budget: int, device: str, every: int):
        self.samples, self.budget, self.device, self.every = samples, budget, device, every
        terms = [int(x["completion_mask"][1:].sum()) for x in samples]
        self.first = np.concatenate([[0], np.cumsum(terms)])
        self.terms = int(self.first[-1])
        # Of one sign: a sum that cancels would say nothing about the distance of two losses.
        self.weights = (1 + torch.cos(torch.arange(self.terms, device=device, dtype=torch.float32)) / 2) / self.terms

    def of_tree(self, tree: Any) -> Tensor:
        """Weights of the terms of a tree: sample by sample, as they are numbered over all samples."""
        index = [np.arange(self.first[s], self.first[s + 1]) for s in tree.numpy().sample_index]
        return self.weights[torch.from_numpy(np.concatenate(index)).to(self.device)]

    def cut(self) -> tuple[Way, dict[str, Any]]:
        (tree,) = treepack.pack(self.samples, max_tokens=self.budget, cut=True)
        rows, above = np.diff(tree.cu_ranges), max(len(x.ancestors) for x in tree.ranges)
        tree = tree.to(self.device)
        weights = self.of_tree(tree)

        def run(model: Any) -> float:
            total = torch.zeros((), device=self.device)
            for part in RangeRunner(gpu_model._set(model, "treepack"), tree):
                loss = (part.term_log_probs() * weights[part.term_index]).sum()
                part.backward(loss)
                total += loss.detach()
            return float(total)

        pairs = int((tree.numpy().position_ids + 1).sum())
        return run, {"tokens": tree.num_tokens, "pairs": pairs, "passes": len(rows), "ancestors": above}

    def packed(self) -> tuple[Way, dict[str, Any]]:
        packed = treepack.pack(self.samples, max_tokens=self.budget)
        trees = [tree.to(self.device) for tree in packed]
        weights = [self.of_tree(tree) for tree in trees]

        def run(model: Any) -> float:
            total = torch.zeros((), device=self.device)
            for tree, of_tree in zip(trees, weights, strict=True):
                loss = (treepack.term_log_probs(gpu_model._set(model, "treepack"), tree) * of_tree).sum()
                loss.backward()
                total += loss.detach()
            return float(total)

        stats = packed.stats
        return run, {"tokens": stats.packed_tokens, "pairs": stats.attention_pairs, "passes": stats.trees}

    def alone(self) -> tuple[Way, dict[str, Any]]:
        batches: list[list[int]] = [[]]
        room = self.budget
        for number, sample in enumerate(self.samples):
            if len(sample["input_ids"]) > room:
                batches.append([])
                room = self.budget
            batches[-1].append(number)
            room -= len(sample["input_ids"])
        runs = [
            (
                gpu_model.Contenders([self.samples[i] for i in batch], self.device).make("alone")[0],
                self.weights[self.first[batch[0]] : self.first[batch[-1] + 1]],
            )
            for batch in batches[:: self.every]
        ]

        def run(model: Any) -> float:
            total = torch.zeros((), device=self.device)
            for log_probs, weights in runs:
                loss = (log_probs(model) * weights).sum()
                loss.backward()
                total += loss.detach()
            return float(total)

        lengths = np.array([len(x["input_ids"]) for x in self.samples])
        pairs = int((lengths * (lengths + 1) // 2).sum())
        times = len(batches) / len(runs)
        return run, {"tokens": int(lengths.sum()), "pairs": pairs, "passes": len(batches), "times": times}


def gradients(model: Any) -> list[Tensor]:
    """Of the norms and of the layers at both ends and in the middle, on the host."""
    layers = model.model.layers
    some = [layers[i].self_attn for i in sorted({0, len(layers) // 2, len(layers) - 1})]
    parameters = [
        *(x for a in some for x in (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)),
        model.model.norm.weight,
    ]
    return [x.grad.float().cpu() for x in parameters]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest, over the parameters, of the distance as a share of the norm."""
    return max(float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in zip(found, wanted, strict=True))


def measure(run: Way, model: Any, repeats: int, warm_up: bool) -> tuple[float, list[Tensor], list[float], float]:
    """(loss, gradients, seconds of each pass, peak GiB); a first pass as warm-up is left out."""
    on_gpu = next(model.parameters()).is_cuda
    seconds, loss, found = [], 0.0, []
    for number in range(0 if warm_up else 1, repeats + 1):
        model.zero_grad(set_to_none=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        for parameter in model.parameters():
            # There from the start, or the peak would hang on whether the largest tree comes first.
            parameter.grad = torch.zeros_like(parameter)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = run(model)
        if on_gpu:
            torch.cuda.synchronize()
        if number:
            seconds.append(time.perf_counter() - start)
    found = gradients(model)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    model.zero_grad(set_to_none=True)
    return loss, found, seconds, peak


def bench(name: str, budget: int, model: Any, arguments: argparse.Namespace, first: bool) -> bool:
    samples = read(arguments.data, name)[: arguments.samples]
    passes = Pass(samples, budget, arguments.device, arguments.alone_every)
    print(f"\n{name}, budget {budget:,}: {len(samples)} samples, {passes.terms:,} terms")
    results: dict[str, tuple[dict[str, Any], list[float], float]] = {}
    values: dict[str, tuple[float, list[Tensor]]] = {}
    for way in arguments.ways:
        run, sizes = getattr(passes, way)()
        # Ranges pin host memory of their own sizes; what the other ways compile is the same for all sets and budgets.
        warm_up = way == "cut" or (way == "packed" and first)
        loss, found, seconds, peak = measure(run, model, 1 if way == "alone" else arguments.repeats, warm_up)
        if sizes.get("times", 1) == 1:
            values[way] = loss, found
        results[way] = sizes, [x * sizes.get("times", 1) for x in seconds], peak
    *others, last = values
    green = True
    for way in others:
        loss = abs(values[way][0] - values[last][0]) / max(abs(values[last][0]), 1e-30)
        apart = distance(values[way][1], values[last][1])
        fits = loss <= LOSS_ALLOWED and apart <= GRADIENT_ALLOWED
        green &= fits
        print(f"  {way:7s} against {last}: loss {loss:.4%} apart, gradients {apart:.4f}{'' if fits else '  RED'}")
    if not green:
        print("  the gate is red: no figures")
        return False
    head = (f"{'seconds':>9s}", f"{'spread':>7s}", f"{'peak GiB':>9s}", f"{'tokens':>10s}", f"{'passes':>7s}")
    print(f"  {'':7s}", *head, f"{'PFLOP':>8s}")
    flops = {}
    for way, (sizes, seconds, peak) in results.items():
        flops[way] = model_rows.flops(model.config, sizes["tokens"], sizes["pairs"], passes.terms)
        spread = max(seconds) - min(seconds)
        print(
            f"  {way:7s} {statistics.median(seconds):9.2f} {spread:7.2f} {peak:9.1f} {sizes['tokens']:10,d} "
            f"{sizes['passes']:7d} {flops[way] / 1e15:8.2f}"
        )
    if "cut" in results:
        sizes, mine, peak = results["cut"]
        for way, (_, other, its_peak) in results.items():
            if way == "cut":
                continue
            faster = statistics.median(other) / statistics.median(mine)
            share = faster / (flops[way] / flops["cut"])
            above = sizes["ancestors"] * KEY_VALUE_BYTES / 2**30
            print(
                f"  cut is {faster:.3f}x as fast as {way}: {share:.3f} of the FLOP ratio; peak {peak - its_peak:+.2f} "
                f"GiB, K and V of the {sizes['ancestors']:,} ancestors {above:.2f} GiB"
            )
    sys.stdout.flush()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="write the rollouts there, and nothing else")
    parser.add_argument("--data", type=Path, help="the file that --write wrote")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--ways", nargs="+", default=["cut", "packed", "alone"], choices=["cut", "packed", "alone"])
    parser.add_argument("--repeats", type=int, default=3, help="passes that are timed; the samples alone take one")
    parser.add_argument("--alone-every", type=int, default=1, help="of the batches of samples alone, every so many-th")
    parser.add_argument("--samples", type=int, help="the first so many of each set")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write)
        return 0
    if arguments.data is None:
        parser.error("--data is needed: the file that --write wrote")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    print(gpu_model.environment(arguments.device))
    model = gpu_model.make_model(arguments.device, arguments.layers, arguments.tiny)
    pairs = [(name, budget) for name in arguments.sets for budget in arguments.budgets]
    green = [bench(*pair, model, arguments, pair == pairs[0]) for pair in pairs]
    return 0 if all(green) else 1


if __name__ == "__main__":
    sys.exit(main())
