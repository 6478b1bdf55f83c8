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

__all__ = ["sum_gradients"]

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
    their number.

    Args:
        model: the model, wrapped or not; what requires no gradient is left alone.
        mesh: one dimension of a DeviceMesh, the one that `term_log_probs(..., mesh=...)` was given.

    Raises:
        TypeError, ValueError: a mesh that is not one dimension of a DeviceMesh.
    """
    wire = Wire(mesh)
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
