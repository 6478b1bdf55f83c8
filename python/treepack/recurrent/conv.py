# mypy: ignore-errors
"""`tree_conv1d` by the kernels of `triton/conv.py`, and what they read of a tree: ancestors, and descendants past a
fork."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .metadata import TreeSegments
from .triton import conv as kernels
from .triton.launch import COMPILE

# Tokens and channels of a tile, by kernel; TILES: of a program that sums the gradient of the weights.
FORWARD = {"BN": 32, "BC": 128, "num_warps": 4}
BACKWARD = {"BN": 16, "BC": 64, "num_warps": 4, "TILES": 16}
INPUTS = {"BN": 16, "BC": 128, "num_warps": 4}
FORKED = {"BL": 16, "BC": 128}


class Neighbours(NamedTuple):
    """For one width; int32 on the device."""

    tokens: int
    """Real tokens; rows of padding come after them."""
    ancestors: Tensor
    """(W - 1, N), -1 where there is none."""
    forked: Tensor
    """(F,): the tokens that have a descendant fewer than W tokens below which is not that many rows on."""
    offsets: Tensor
    """(F + 1,): where the list of each begins."""
    below: Tensor
    """(L, 2): (descendant, its distance), the token itself included."""


def neighbours(tree: TreeSegments, width: int) -> Neighbours:
    """Made on the host, in O(N W), once for a forest and a width."""
    key = ("conv", width)
    if key not in tree.cache:
        tokens, parent, token = tree.contiguous_tokens(), tree.parent_on_host(), np.arange(tree.tokens, dtype=np.int32)
        above = [token]
        for _ in range(1, width):
            above.append(np.where(above[-1] < 0, -1, parent[above[-1]]).astype(np.int32))
        by_distance = [np.stack([x, token, np.full_like(token, j)], 1)[:tokens] for j, x in enumerate(above)]
        pairs = np.concatenate(by_distance)
        pairs = pairs[pairs[:, 0] >= 0]
        forked = np.unique(pairs[pairs[:, 1] != pairs[:, 0] + pairs[:, 2], 0])
        pairs = pairs[np.isin(pairs[:, 0], forked)]
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 2], pairs[:, 0]))]
        offsets = np.searchsorted(pairs[:, 0], np.append(forked, tree.tokens)).astype(np.int32)
        table = np.concatenate([np.zeros((0, tree.tokens), np.int32), *(x[None] for x in above[1:])])
        on = tree.to_device
        tree.cache[key] = Neighbours(tokens, on(table), on(forked), on(offsets), on(pairs[:, 1:]))
    kept: Neighbours = tree.cache[key]
    return kept


class _Conv(torch.autograd.Function):
    """x (N, C), channels side by side; weight (C, W) contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, near: Neighbours, silu: bool) -> Tensor:
        n, channels = x.shape
        y = torch.empty(n, channels, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(n, FORWARD["BN"]), triton.cdiv(channels, FORWARD["BC"]))
        kernels.conv_forward[grid](
            x, weight, weight if bias is None else bias, near.ancestors, y, n, near.tokens, x.stride(0), channels,
            WIDTH=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, **FORWARD, **COMPILE,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias)
        ctx.near, ctx.silu = near, silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        near, silu, (n, channels), width = ctx.near, ctx.silu, x.shape, weight.shape[1]
        dy = dy.contiguous()
        dz = torch.empty_like(dy) if silu else dy
        blocks = triton.cdiv(n, BACKWARD["BN"] * BACKWARD["TILES"])
        dw = torch.empty(blocks, width, channels, dtype=torch.float32, device=x.device)
        db = torch.empty(blocks, channels, dtype=torch.float32, device=x.device)
        kernels.conv_backward[(blocks, triton.cdiv(channels, BACKWARD["BC"]), triton.cdiv(width, 4))](
            x, weight, weight if bias is None else bias, near.ancestors, dy, dz, dw, db, n, near.tokens, x.stride(0),
            channels, WIDTH=width, HAS_BIAS=bias is not None, SILU=silu, **BACKWARD, **COMPILE,
        )  # fmt: skip
        dx = torch.empty(n, channels, dtype=x.dtype, device=x.device)
        kernels.conv_inputs[(triton.cdiv(n, INPUTS["BN"]), triton.cdiv(channels, INPUTS["BC"]))](
            dz, weight, near.ancestors, dx, n, near.tokens, channels, WIDTH=width, **INPUTS, **COMPILE
        )
        if len(near.forked):
            kernels.conv_forked[(len(near.forked), triton.cdiv(channels, FORKED["BC"]))](
                dz, weight, near.forked, near.offsets, near.below, dx, channels, WIDTH=width, **FORKED, **COMPILE
            )
        dweight = dw.sum(0).flip(0).T.to(weight.dtype)
        return dx, dweight, None if bias is None else db.sum(0).to(bias.dtype), None, None


def tree_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, tree: TreeSegments, *, silu: bool) -> Tensor:
    """As `reference.tree_conv1d`."""
    near = neighbours(tree, weight.shape[1])
    if not x.numel():
        return torch.zeros_like(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    out: Tensor = _Conv.apply(x, weight.contiguous(), bias, near, silu)
    return out
