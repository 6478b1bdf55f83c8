"""One rank of `test_transformers_ranks.py`: gradients of term_log_probs under wrappers that average over ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import shared_samples, tiny, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import treepack
from treepack.logprobs import term_log_probs

STEPS = 2  # a static graph is learned in the first


def step(wrapped, tree) -> None:
    log_probs = term_log_probs(wrapped, tree)
    (log_probs * weights_of(len(log_probs))).sum().backward()


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp2": sharded,
}


def tree_of(rank: int):
    return treepack.pack(shared_samples(seed=rank), max_tokens=256)[0].to("cpu")


def run(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        found = {}
        for name, wrap in WRAPPERS.items():
            model = tiny("qwen2")
            wrapped = wrap(model)
            for _ in range(STEPS):
                model.zero_grad()
                step(wrapped, tree_of(rank))
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            found[name] = {key: g.full_tensor() if isinstance(g, DTensor) else g for key, g in gradients.items()}
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
