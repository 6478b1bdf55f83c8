"""One rank of `test_transformers_ranks.py`: gradients of term_log_probs under wrappers that average over ranks."""

from __future__ import annotations

import gc
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
from treepack import term_log_probs

STEPS = 2  # a static graph is learned in the first


def step(wrapped, tree) -> None:
    log_probs = term_log_probs(wrapped, tree)
    (log_probs * weights_of(len(log_probs)).to(log_probs)).sum().backward()


def sharded(model):
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def head_alone(model):
    """A frozen base: the hidden states want no gradient, the head does."""
    model.model.requires_grad_(False)
    return model


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "static graph, head alone": lambda model: DistributedDataParallel(head_alone(model), static_graph=True),
    "fsdp2": sharded,
}


def tree_of(rank: int, device: torch.device | str = "cpu"):
    return treepack.pack(shared_samples(seed=rank), max_tokens=256)[0].to(device)


def gradients(wrap, rank: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of what is trained, on the host, after `STEPS` steps under a wrapper."""
    model = tiny("qwen2", dtype).to(device)
    wrapped = wrap(model)
    for _ in range(STEPS):
        model.zero_grad()
        step(wrapped, tree_of(rank, device))
    found = {key: x.grad for key, x in model.named_parameters() if x.requires_grad}
    return {key: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for key, g in found.items()}


def run(rank: int, world: int, folder: str, kind: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
    """The gradients of this rank under every wrapper, saved as `<rank>.pt` in `folder`."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend, store = {"cpu": "gloo", "cuda": "nccl"}[kind], f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=90))
    try:
        found = {name: gradients(wrap, rank, device, dtype) for name, wrap in WRAPPERS.items()}
        torch.save(found, Path(folder) / f"{rank}.pt")
        gc.collect()  # no wrapper may outlive the group that it holds
        dist.barrier()  # nor a rank leave while another still reads from it
    finally:
        dist.destroy_process_group()
