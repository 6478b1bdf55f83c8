"""One rank of `test_distributed.py`: packs its own samples, takes a training step in several ways, keeps its gradients.

Run by `torch.multiprocessing.spawn`, so that all ways share the start of the processes.
"""

from __future__ import annotations

import contextlib
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import tiny_model
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import treepack
from treepack.distributed import align, connect

STARVED = 1  # the rank without samples
MAX_TOKENS = 24


def samples(rank: int) -> list[dict[str, Any]]:
    """Rollouts of one rank: groups that share prompts, more of them on later ranks, none on one."""
    if rank == STARVED:
        return []
    rng = random.Random(rank)
    out = []
    for _ in range(1 + 2 * rank):
        prompt = [rng.randrange(tiny_model.VOCABULARY) for _ in range(rng.randint(1, 6))]
        for _ in range(rng.randint(1, 4)):
            ids = prompt + [rng.randrange(tiny_model.VOCABULARY) for _ in range(rng.randint(1, 7))]
            mask = [0] * len(prompt) + [rng.randrange(2) for _ in ids[len(prompt) :]]
            out.append({"input_ids": ids, "completion_mask": mask, "advantage": rng.randint(-8, 8) / 8})
    return out


def run(rank: int, world: int, folder: str) -> None:
    """Everything that the tests ask for, saved as `<rank>.pt` in `folder`."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        mine = treepack.pack(samples(rank), max_tokens=MAX_TOKENS)
        trees, terms = align(mine)
        found: dict[str, Any] = {"packed": len(mine), "trees": len(trees), "terms": terms}
        found["dummies"] = [i for i, tree in enumerate(trees) if len(tree.sample_index) == 0]
        found["names"] = sorted(trees[-1].terms), sorted(trees[-1].samples), sorted(trees[-1].positions)
        for way in (plain, parallel, parallel_no_sync, parallel_constant_loss, sharded, sharded_no_sync):
            found[way.__name__] = way(trees, terms, world)
        found["mismatch"] = mismatches(rank)
        found["nothing"] = tuple(align([]))
        found["halves"] = halves(rank, world)
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- ways to take a step


def plain(trees: list[Any], terms: int, world: int) -> list[Tensor]:
    """Gradients summed over ranks by hand."""
    model = tiny_model.Model()
    for tree in trees:
        (tiny_model.loss_sum(model, tree) / terms).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return gradients(model)


def parallel(trees: list[Any], terms: int, world: int) -> list[Tensor]:
    """DistributedDataParallel, gradients exchanged in every backward."""
    model = tiny_model.Model()
    wrapped = DistributedDataParallel(model)
    for tree in trees:
        (tiny_model.loss_sum(wrapped, tree) * world / terms).backward()
    return gradients(model)


def parallel_no_sync(trees: list[Any], terms: int, world: int) -> list[Tensor]:
    """DistributedDataParallel, gradients accumulated and exchanged once, in the last backward."""
    model = tiny_model.Model()
    wrapped = DistributedDataParallel(model)
    for i, tree in enumerate(trees):
        with wrapped.no_sync() if i + 1 < len(trees) else contextlib.nullcontext():
            (tiny_model.loss_sum(wrapped, tree) * world / terms).backward()
    return gradients(model)


def parallel_constant_loss(trees: list[Any], terms: int, world: int) -> list[Tensor]:
    """A loss that is a constant where there is no term: `connect` puts the parameters into its graph."""
    model = tiny_model.Model()
    wrapped = DistributedDataParallel(model)
    for tree in trees:
        rows = tiny_model.logits(wrapped, tree)
        loss = tiny_model.terms_loss(rows, tree) if len(tree.term_row) else torch.zeros((), dtype=torch.float64)
        (connect(loss, rows) * world / terms).backward()
    return gradients(model)


def sharded(trees: list[Any], terms: int, world: int, accumulate: bool = False) -> list[Tensor]:
    """FSDP2: every block and the whole, on a mesh of CPU processes."""
    model = tiny_model.Model()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for i, tree in enumerate(trees):
        if accumulate:
            model.set_requires_gradient_sync(i + 1 == len(trees))
        (tiny_model.loss_sum(model, tree) * world / terms).backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def sharded_no_sync(trees: list[Any], terms: int, world: int) -> list[Tensor]:
    """FSDP2, gradients exchanged once, in the last backward."""
    return sharded(trees, terms, world, accumulate=True)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


# ------------------------------------------------------------------------------------------------------------ others


def mismatches(rank: int) -> list[str]:
    """What each rank raises when the ranks do not fit each other."""
    plain = {"input_ids": [1, 2]}
    kinds = [
        treepack.pack([plain], max_tokens=4, branching="token" if rank else "label"),
        treepack.pack([plain if rank else {**plain, "advantage": 1.0}], max_tokens=4),
        treepack.pack([{**plain, "advantage": 1 if rank else 1.0}], max_tokens=4),
    ]
    out = []
    for trees in kinds:
        try:
            align(trees)
        except treepack.PackError as error:
            out.append(str(error))
    return out


def halves(rank: int, world: int) -> tuple[int, int]:
    """Number of trees and terms when even and odd ranks are groups of their own."""
    groups = [dist.new_group(range(part, world, 2)) for part in (0, 1)]
    packed = treepack.pack([{"input_ids": [1, 2, 3 + i]} for i in range(rank)], max_tokens=3, pad_to_multiple_of=3)
    trees, terms = align(packed, groups[rank % 2], pad_to_multiple_of=3)
    assert all(tree.num_tokens == 3 for tree in trees)
    return len(trees), terms
