"""One tree over two GPUs against one GPU, and balanced ranks under DDP: time, bytes on the wire, peak memory.

    make bench-ranks ARGS='--data rollouts.npz'                    # two GPUs; the file as for gpu_ranges.py
    python benches/gpu_ranks.py --ranks 2 --device cpu --tiny      # gloo on a CPU, to see that the script runs

    attention   forward and backward of `TreeShard.attention`, exchanges included, on the tree of "multiturn", which one
                sample more fills to 65,536 positions; 32 / 8 and 12 / 2 heads of 128
    step        a step of the 1.5B model of `gpu_model.py`, every layer checkpointed, on the same tree
    balance     trees of `tau_airline_turns` for each rank (`pack(ranks=2)`): each rank's own time, and a step of all
                under DDP, whose sum of gradients waits for the slowest

Behind a gate: log-probs of the ranks are those of one GPU as bfloat16 has them. Nothing is printed on a red gate.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpu_model
import gpu_ranges
import model_rows
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import treepack
from treepack.distributed import TreeShard, sum_gradients
from treepack.integrations.transformers import model_inputs

POSITIONS = 65_536
HEADS = ((32, 8), (12, 2))
FORMS = ("rows", "heads")
MEAN_ALLOWED = 0.05  # of log-probs, as in gpu_model.py


class Bench:
    """What the parts share on one rank: the device, the mesh, clocks that all ranks start together."""

    def __init__(self, rank: int, arguments: argparse.Namespace):
        self.rank, self.arguments = rank, arguments
        self.device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
        self.mesh = init_device_mesh(arguments.device, (arguments.ranks,), mesh_dim_names=("sp",))
        self.on_gpu = self.device.type == "cuda"

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    def measure(self, call: Callable[[], Any], alone: bool = False) -> tuple[float, float, float]:
        """(milliseconds of the slowest rank, of the mean rank, peak GiB of the largest): medians after two warm-ups.
        `alone`: rank 0 calls, the others wait."""
        gc.collect()
        times = []
        for repeat in range(self.arguments.repeats + 2):
            if repeat == 2 and self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.settle()
            start = time.perf_counter()
            if not alone or self.rank == 0:
                call()
            if self.on_gpu:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else 0.0
        mine = torch.tensor([statistics.median(times[2:]), peak], dtype=torch.float64, device=self.device)
        every = mine.new_empty(self.arguments.ranks, 2)
        dist.all_gather_into_tensor(every, mine[None])
        if alone:
            every = every[:1]
        return float(every[:, 0].max()), float(every[:, 0].mean()), float(every[:, 1].max())


def long_tree(arguments: argparse.Namespace) -> treepack.PackedTree:
    """multiturn and one sample more, POSITIONS positions in all."""
    shapes = model_rows.turns(2, 3, 100, 40, 20, 30) if arguments.tiny else model_rows.turns()
    samples = model_rows.samples_of(shapes)
    tree = model_rows.one_tree(samples)
    missing = (2048 if arguments.tiny else POSITIONS) - tree.num_tokens
    ids = np.arange(missing) % 50 + 1
    more = {"input_ids": ids.astype(np.int64), "completion_mask": (np.arange(missing) > missing // 2).astype(np.uint8)}
    return model_rows.one_tree([*samples, more])


def attention(bench: Bench, tree: Any) -> None:
    for heads, kv_heads in HEADS:
        torch.manual_seed(0)
        whole = [
            torch.randn(1, count, tree.num_tokens, 128, device=bench.device, dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads, heads)
        ]

        def step(call: Callable[..., Any], tensors: list[torch.Tensor]) -> Callable[[], Any]:
            leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
            return lambda: torch.autograd.grad(call(*leaves), leaves, tensors[3])

        one, _, peak = bench.measure(step(lambda q, k, v: treepack.tree_attention(q, k, v, tree), whole), alone=True)
        bench.say(f"attention {heads}/{kv_heads}  one GPU {one:8.2f} ms, peak {peak:.2f} GiB")
        for form in FORMS:
            part = TreeShard(tree, bench.mesh, form)
            start, stop = part.edges[bench.rank : bench.rank + 2].tolist()
            mine = [x[:, :, start:stop] for x in whole]
            call = step(part.attention, mine)
            before = part.wire.received
            call()
            received = part.wire.received - before
            slowest, mean, peak = bench.measure(call)
            bench.say(
                f"attention {heads}/{kv_heads}  {form:6s}{slowest:8.2f} ms (mean {mean:.2f}), {one / slowest:.2f} x, "
                f"rank 0 received {received / 2**20:.1f} MiB, peak {peak:.2f} GiB"
            )


def step(bench: Bench, tree: Any) -> bool:
    model = gpu_model.make_model(str(bench.device), bench.arguments.layers, bench.arguments.tiny)
    found: dict[str, torch.Tensor] = {}

    def run(name: str, **options: Any) -> Callable[[], Any]:
        def call() -> None:
            model.zero_grad(set_to_none=True)
            values = treepack.term_log_probs(model, tree, **options)
            values.mean().backward()
            if options:
                sum_gradients(model, bench.mesh)
            found[name] = values.detach()

        return call

    lines = []
    one, _, peak = bench.measure(run("one GPU"), alone=True)
    lines.append(f"step  one GPU {one:9.1f} ms, peak {peak:.2f} GiB")
    for form in FORMS:
        slowest, mean, its_peak = bench.measure(run(form, mesh=bench.mesh, shard=form))
        inputs = model_inputs(tree, model=model, mesh=bench.mesh, shard=form)
        with torch.no_grad():
            model.model(**inputs)
        received = inputs["tree_hook"].wire.received
        lines.append(
            f"step  {form:6s}{slowest:9.1f} ms (mean {mean:.1f}), {one / slowest:.2f} x, peak {its_peak:.2f} GiB, "
            f"{its_peak / max(peak, 1e-9):.2f} of one GPU's; rank 0 received {received / 2**20:.1f} MiB a forward pass"
        )
    green = True
    if bench.rank == 0:
        for form in FORMS:
            apart = float((found[form] - found["one GPU"]).abs().mean())
            green &= apart <= MEAN_ALLOWED
            lines.append(f"gate  {form}: log-probs {apart:.4f} apart in the mean{'' if green else '  RED'}")
    for line in lines if green else lines[-2:]:
        bench.say(line)
    return green


def balance(bench: Bench) -> None:
    """Each rank's own trees under DDP: all ranks forward as many, and the sum of gradients waits for the slowest."""
    samples = gpu_ranges.read(bench.arguments.data, "tau_airline_turns")[: bench.arguments.samples]
    packed = treepack.pack(samples, max_tokens=bench.arguments.budget, ranks=bench.arguments.ranks)
    trees = [tree.to(bench.device) for tree in packed.for_rank(bench.rank)]
    model = gpu_model.make_model(str(bench.device), bench.arguments.layers, bench.arguments.tiny)
    wrapped = DistributedDataParallel(model)

    def own() -> None:
        for tree in trees:
            treepack.term_log_probs(model, tree).sum().backward()

    def together() -> None:
        for number, tree in enumerate(trees):
            wrapped.require_backward_grad_sync = number == len(trees) - 1
            treepack.term_log_probs(wrapped, tree).sum().backward()

    model.zero_grad(set_to_none=True)
    slowest, mean, _ = bench.measure(own)
    ddp, _, peak = bench.measure(together)
    stats = packed.stats
    bench.say(
        f"balance  {len(packed)} trees of {stats.packed_tokens:,} tokens, imbalance {stats.imbalance:.4f}: "
        f"slowest rank {slowest:.1f} ms, {slowest / mean:.4f} of the mean; under DDP {ddp:.1f} ms, peak {peak:.2f} GiB"
    )


def work(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    try:
        bench = Bench(rank, arguments)
        bench.say(f"{gpu_model.environment(arguments.device)}; {arguments.ranks} ranks over {dist.get_backend()}")
        tree = long_tree(arguments).to(bench.device)
        bench.say(f"tree of {tree.num_tokens:,} positions, {tree.num_samples} samples, {tree.num_terms:,} terms")
        if step(bench, tree):
            attention(bench, tree)
            if arguments.data:
                balance(bench)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--data", type=Path, help="rollouts that `gpu_ranges.py --write` wrote, for the balance")
    parser.add_argument("--samples", type=int, help="the first so many of them")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tree, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"{arguments.ranks} GPUs are needed, {torch.cuda.device_count()} are here")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
