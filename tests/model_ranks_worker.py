"""One rank of `test_transformers_ranks.py` and `test_hybrid_ranks.py`: gradients under wrappers that average."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from leaking_layers import LEAKING, put
from tiny_models import shared_samples, tiny, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import treepack
from treepack import term_log_probs
from treepack.integrations.transformers import RangeRunner

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


BY_RANGE = [name for name in WRAPPERS if "static graph" not in name]


def tree_of(rank: int, device: torch.device | str = "cpu"):
    return treepack.pack(shared_samples(seed=rank), max_tokens=256)[0].to(device)


def step_by_range(wrapped, tree) -> None:
    """The same from ranges, of which every rank has another number; in two passes, of which the second adds up."""
    for sync in (False, True):
        for part in RangeRunner(wrapped, cut(tree, 5 + 4 * dist.get_rank()), sync=sync):
            log_probs = part.term_log_probs()
            weights = weights_of(tree.num_terms)[part.term_index.cpu()].to(log_probs)
            part.backward((log_probs * weights).sum() / 2)


def cut(tree, rows: int):
    tree._cuts = np.append(np.arange(0, tree.num_tokens, rows), tree.num_tokens)
    return tree


def gradients(
    wrap, rank: int, device: torch.device, dtype: torch.dtype, family: str, step=step, checkpoint: bool = False
) -> dict[str, torch.Tensor]:
    """Of what is trained, on the host, after `STEPS` steps under a wrapper."""
    model = tiny(family, dtype).to(device)
    if checkpoint:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = wrap(model)
    for _ in range(STEPS):
        model.zero_grad()
        step(wrapped, tree_of(rank, device))
    found = {key: x.grad for key, x in model.named_parameters() if x.requires_grad}
    return {key: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for key, g in found.items()}


def refusal(wrap, rank: int, device: torch.device, dtype: torch.dtype) -> str:
    """What the first use of a model with a leaking layer says. Every rank runs it, on shards of its own."""
    model = put(tiny("qwen2", dtype).to(device), LEAKING["Smooth"]())
    try:
        step(wrap(model), tree_of(rank, device))
    except ValueError as error:
        return str(error)
    return ""


def run(
    rank: int,
    world: int,
    folder: str,
    kind: str = "cpu",
    dtype: torch.dtype = torch.float64,
    family: str = "qwen2",
    names: tuple[str, ...] = tuple(WRAPPERS),
) -> None:
    """The gradients of this rank under every wrapper, and what a leaking model is refused with, saved as `<rank>.pt` in
    `folder`."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend, store = {"cpu": "gloo", "cuda": "nccl"}[kind], f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=90))
    try:
        found = {name: gradients(WRAPPERS[name], rank, device, dtype, family) for name in names}
        for name in BY_RANGE if names == tuple(WRAPPERS) else ():
            for checkpoint in (False, True):
                key = f"ranges, {name}" + (", checkpointed" if checkpoint else "")
                found[key] = gradients(WRAPPERS[name], rank, device, dtype, family, step_by_range, checkpoint)
        found["refusals"] = {name: refusal(WRAPPERS[name], rank, device, dtype) for name in names}
        torch.save(found, Path(folder) / f"{rank}.pt")
        gc.collect()  # no wrapper may outlive the group that it holds
        dist.barrier()  # nor a rank leave while another still reads from it
    finally:
        dist.destroy_process_group()
