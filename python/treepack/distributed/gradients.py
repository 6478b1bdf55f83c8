"""The gradients of the ranks that ran one tree together, added up: then they are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .exchange import Wire, ordered_sum

__all__ = ["averaged_by", "sum_gradients"]

#: Those that are modules of their own; FSDP2 is seen by its parameters.
_WRAPPERS = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP"}

# Numbers that are added up at once, so that a copy of all gradients is never made.
_BUCKET = 2**25


@torch.no_grad()
def sum_gradients(model: nn.Module, mesh: Any) -> None:
    """Adds up the gradients of all ranks of a mesh dimension over which trees are sharded, before the optimizer's step.

    Every rank of the dimension calls it, once for all trees of the step. Each number is added up in the order of the
    ranks (half precision in float32), so that all of them end with the same bytes. Of a parameter that FSDP2 shards
    over another dimension the local part is added up. A parameter that has a gradient on some ranks alone (an expert
    that no token of the others chose) has one on all of them afterwards.

    Not for a model that DDP or FSDP2 already averages over the ranks of this dimension: there multiply the loss by
    their number. It is refused where it can be seen: of DDP, where `model` is (or holds) the wrapper.

    Args:
        model: the model, wrapped or not; what requires no gradient is left alone.
        mesh: one dimension of a DeviceMesh, the one that `term_log_probs(..., mesh=...)` was given.

    Raises:
        TypeError, ValueError: a mesh that is not one dimension of a DeviceMesh.
        ValueError: DDP or FSDP2 over ranks of this dimension.
    """
    wire = Wire(mesh)
    wrapper = averaged_by(model, wire)
    if wrapper is not None:
        raise ValueError(
            f"{wrapper} averages the gradients of {type(model).__name__} over ranks of {wire.name} in the backward "
            "pass: leave out sum_gradients and multiply the loss by the number of ranks that it averages over, or wrap "
            'the model along another dimension (mesh["dp"])'
        )
    parameters = [x for x in model.parameters() if x.requires_grad]
    if wire.size == 1 or not parameters:
        return
    there = torch.tensor([x.grad is not None for x in parameters], dtype=torch.uint8, device=wire.device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=wire.group)
    gradients = []
    for parameter, anywhere in zip(parameters, there.tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if anywhere:
            gradients.append(_local(parameter.grad))
    for bucket in _buckets(gradients):
        total = _added_up(torch.cat([x.reshape(-1) for x in bucket]), wire)
        for x, part in zip(bucket, torch.split(total, [x.numel() for x in bucket]), strict=True):
            x.copy_(part.view_as(x))


def averaged_by(model: nn.Module, wire: Wire) -> str | None:
    """Which wrapper in the model, "DDP" or "FSDP", averages gradients over this rank and others of `wire`; or None."""
    others = set(dist.get_process_group_ranks(wire.group)) - {dist.get_rank()}
    for module in model.modules():
        name = _WRAPPERS.get(type(module).__name__)
        if name and others.intersection(dist.get_process_group_ranks(module.process_group)):  # type: ignore[arg-type]
            return name
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and others.intersection(parameter.device_mesh.mesh.flatten().tolist()):
            return "FSDP"
    return None


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients that follow each other and have one dtype and device, up to `_BUCKET` numbers or one gradient."""
    for _, same in groupby(gradients, lambda x: (x.dtype, x.device)):
        bucket: list[Tensor] = []
        for x in same:
            if bucket and sum(y.numel() for y in bucket) + x.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(x)
        yield bucket


def _added_up(x: Tensor, wire: Wire) -> Tensor:
    """The sum of (n,) over ranks: each rank adds up one part of it, then all get all parts."""
    share = -(-len(x) // wire.size)
    padded = torch.cat([x, x.new_zeros(share * wire.size - len(x))])
    equal = [share] * wire.size
    part = ordered_sum(wire.exchange(padded, equal, equal).view(wire.size, share))
    return wire.gather(part).flatten()[: len(x)]
