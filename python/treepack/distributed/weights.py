"""Whether the ranks that run one tree have the same weights: nothing else keeps them alike.

Each rank would otherwise compute its rows with a model of its own, and nothing would say so: adapters that every
process draws by itself, or an optimizer's step before the gradients are added up.

Costs a few values of some parameters, one small all-gather and one wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .exchange import Wire
from .gradients import averaged_by

__all__ = ["check_weights"]

#: So many parameters are looked at, and so many values of each.
_PARAMETERS, _VALUES = 32, 4
#: What ranks may differ by, as a share of the largest of these values: the last digits may depend on the rank where a
#: norm of gradients was added up in another order. No less than this many steps of the dtype.
_SHARE, _STEPS = 1e-4, 4


@torch.no_grad()
def check_weights(model: nn.Module, wire: Wire) -> None:
    """Raises ValueError, on every rank alike, where one has other weights than rank 0.

    Looks at some of the parameters that are trained (of a model without, at any). Of those that FSDP2 shards over
    another dimension, at the local part. Not at a model that DDP or FSDP keeps alike over these ranks itself.
    """
    if wire.size == 1 or averaged_by(model, wire):
        return
    chosen = _chosen(model)
    mine = torch.zeros(_PARAMETERS, _VALUES, dtype=torch.float64, device=wire.device)
    if chosen:
        mine[: len(chosen)] = torch.stack([_values(x) for _, x in chosen]).to(wire.device)
    found = wire.gather(mine[None])[:, 0].cpu()
    for rank, its in enumerate(found):
        for (name, x), here, there in zip(chosen, its, found[0], strict=False):
            allowed = max(_SHARE, _STEPS * torch.finfo(x.dtype).eps) * float(there.abs().max())
            same = ((here - there).abs() <= allowed) | (here == there) | (here.isnan() & there.isnan())
            if not same.all():
                at = int(same.long().argmin())
                raise ValueError(
                    f"rank {rank} of {wire.name} has other weights than rank 0: a value of {name} is "
                    f"{float(here[at]):.6g} there and {float(there[at]):.6g} on rank 0. Ranks that run one tree need "
                    "the same weights: make or load them alike on all of them (adapters too: one seed, or a "
                    "broadcast), and call treepack.distributed.sum_gradients(model, mesh) before every step of the "
                    "optimizer"
                )


def _chosen(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Some parameters, spread over the model, with what of each lies on this rank."""
    named = [(name, _local(x), x.requires_grad) for name, x in model.named_parameters()]
    named = [(name, x, trained) for name, x, trained in named if x.numel() and x.is_floating_point() and not x.is_meta]
    some = [one for one in named if one[2]] or named
    places = torch.linspace(0, len(some) - 1, min(len(some), _PARAMETERS)).long().tolist()
    return [some[i][:2] for i in places]


def _local(parameter: Any) -> Tensor:
    local: Tensor = parameter.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def _values(x: Tensor) -> Tensor:
    """(_VALUES,) float64 from the whole length of a tensor."""
    flat = x.reshape(-1) if x.is_contiguous() else x[..., :_VALUES].reshape(-1)
    step = max(len(flat) // _VALUES, 1)
    found = flat[::step][:_VALUES].double()
    return torch.nn.functional.pad(found, (0, _VALUES - len(found)))
