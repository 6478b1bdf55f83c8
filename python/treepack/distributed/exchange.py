"""What the ranks of one dimension of a mesh exchange, each with the way back of its gradients.

    Wire          one all-to-all among the ranks, counted
    exchanged     parts of a tensor to each rank; back: the gradients of the parts, to where they came from
    gathered      the values of all ranks on every rank; back: the part of this rank
    added_up      the sum over the ranks on every rank; back: the gradient as it is

The last two fit ranks that all compute one loss: the gradients of the ranks then add up to those of one process.
Every rank makes the same exchanges in the same order, in the backward pass and in a recomputation too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Wire", "added_up", "exchanged", "gathered", "ordered_sum"]

_EXAMPLE = 'mesh["sp"] of init_device_mesh("cuda", (dp, sp), mesh_dim_names=("dp", "sp"))'


class Wire:
    """The ranks of one dimension of a mesh.

    Attributes:
        group: their process group. rank: the place of this one among them. size: how many they are.
        exchanges: all-to-alls so far. received: bytes that they brought from other ranks.

    Raises:
        TypeError: no DeviceMesh.
        ValueError: one of several dimensions, or one that this rank is not in.
    """

    def __init__(self, mesh: Any):
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}; one dimension of a DeviceMesh is needed: {_EXAMPLE}")
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            which = f" ({', '.join(names)})" if names else ""
            raise ValueError(f"mesh has {mesh.ndim} dimensions{which}; one of them is needed: {_EXAMPLE}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}")
        self.group = mesh.get_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        kind = mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.name = f"the mesh dimension {mesh.mesh_dim_names[0]!r}" if mesh.mesh_dim_names else "the mesh"
        self.exchanges = self.received = 0

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """The first send[0] rows of x go to rank 0 and so on; what comes is ordered by rank, receive[r] rows of each.
        Without gradients."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        self.exchanges += 1
        self.received += (len(out) - receive[self.rank]) * prod(out.shape[1:]) * out.element_size()
        return out

    def gather(self, x: Tensor) -> Tensor:
        """(n, ...) of every rank -> (ranks, n, ...). Without gradients."""
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out.view(self.size, *x.shape)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.wire, ctx.send, ctx.receive = wire, send, receive
        return wire.exchange(x, send, receive)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.wire.exchange(g, ctx.receive, ctx.send), None, None, None


def exchanged(x: Tensor, wire: Wire, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """`Wire.exchange`, differentiable."""
    out: Tensor = _Exchanged.apply(x, wire, send, receive)
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, most: int, where: Tensor, own: Tensor) -> Tensor:
        ctx.save_for_backward(own)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
        return wire.gather(padded).flatten(0, 1)[where]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (own,) = ctx.saved_tensors
        return g[own], None, None, None, None


def gathered(x: Tensor, wire: Wire, places: Sequence[Tensor]) -> Tensor:
    """The values of all ranks in one order, on every rank.

    Args:
        x: (m, ...) of this rank.
        places: for each rank the places (m_r,) of its values among those of all; together each place once.

    Returns:
        (M, ...). The backward pass takes the part of this rank: each rank has a loss of its own that is the same.
    """
    most = max(len(place) for place in places)
    if not most:
        return x
    where = torch.empty(sum(len(place) for place in places), dtype=torch.int64, device=x.device)
    for rank, place in enumerate(places):
        where[place] = torch.arange(rank * most, rank * most + len(place), device=x.device)
    out: Tensor = _Gathered.apply(x, wire, most, where, places[wire.rank])
    return out


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        return ordered_sum(wire.gather(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def added_up(x: Tensor, wire: Wire) -> Tensor:
    """The sum over ranks, in their order. The gradient of a rank's own part is that of the sum."""
    out: Tensor = _AddedUp.apply(x, wire)
    return out


def ordered_sum(parts: Tensor) -> Tensor:
    """(R, ...) -> (...), added up one after the other; half precision in float32."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
