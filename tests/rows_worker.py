"""One rank of `test_rows_ranks.py`: gradients of `row_log_probs` under wrappers whose forward waits for other ranks."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from model_ranks_worker import sharded
from tiny_models import shared_samples, tiny, weights_of
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from treepack import row_log_probs

#: wrapper, budget of a tree, rows of rank 1
WAYS = {
    "fsdp2, few rows": (sharded, 22, 2),
    "fsdp2, no rows": (sharded, 22, 0),
    "fsdp2, one tree": (sharded, None, 0),
    "ddp, few rows": (DistributedDataParallel, 22, 2),
    "ddp, no rows": (DistributedDataParallel, 22, 0),
    "ddp, static graph": (lambda model: DistributedDataParallel(model, static_graph=True), 22, 2),
}


def rows(way: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded rows of a rank and their mask; where it has none, one row of padding."""
    samples = shared_samples(seed=rank)
    samples = samples if rank == 0 else samples[: WAYS[way][2]]
    ids = torch.zeros(max(len(samples), 1), 24, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        tokens = torch.from_numpy(sample["input_ids"])
        ids[i, -len(tokens) :], mask[i, -len(tokens) :] = tokens, 1
    return ids, mask


def values(model, ids, mask, **options):
    return row_log_probs(model, ids, mask, last=12, **options)


def loss(values):
    return (values.reshape(-1) * weights_of(values.numel())).sum()


def step(way: str, rank: int) -> dict[str, object]:
    wrap, budget, _ = WAYS[way]
    model = tiny("qwen2")
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    wrapped = wrap(model)
    found = values(wrapped, *rows(way, rank), max_tokens=budget, group=dist.group.WORLD)
    loss(found).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {
        "values": found.detach(),
        "forwards": len(forwards),
        "gradients": {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()},
    }


def run(rank: int, world: int, folder: str) -> None:
    """What every way gives on this rank, saved as `<rank>.pt` in `folder`."""
    torch.set_num_threads(1)
    os.environ["TREEPACK_MODEL_CHECK"] = "0"  # its passes would be counted
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=90))
    try:
        torch.save({way: step(way, rank) for way in WAYS}, Path(folder) / f"{rank}.pt")
        gc.collect()  # no wrapper may outlive the group that it holds
        dist.barrier()  # nor a rank leave while another still reads from it
    finally:
        dist.destroy_process_group()
