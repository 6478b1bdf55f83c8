# mypy: ignore-errors
"""Launches of the walk: buffers and tile sizes. Nothing waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..plan import Walk
from . import walk as kernels

Option = dict[str, Any]

# Said, and not left to a default: that of Triton 3.10 will be off, which changes the bits of every result.
COMPILE = {"enable_fp_fusion": True}


def blocks(walk: Walk, k_size: int, v_size: int, value_heads: int, *, backward: bool, use_w: bool) -> Option:
    """Tile sizes: a program keeps (K, BV) float32 in registers.

    Wide blocks read keys and W less often. Narrow ones give more programs, for forests that are nearly one chain, and
    fit the registers of the backward pass with W.
    """
    wide = 64 if k_size <= 128 else 32
    if (backward and use_w) or (walk.narrow and value_heads * v_size < 128 * wide):
        wide = 32
    return {"BV": math.gcd(v_size, wide), "num_warps": 4, "num_stages": 2}


def check_sizes(k_size: int, v_size: int) -> None:
    if k_size > 256 or k_size % 8 or v_size % 16:
        raise ValueError(
            f"q and k have {k_size} channels, v {v_size}; the kernels take multiples of 8 up to 256 and multiples of "
            f'16, impl="reference" any'
        )


def walk_forward(
    k: Tensor, u: Tensor, w: Tensor | None, g: Tensor | None, gk: Tensor | None, walk: Walk, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(the state before each chunk (1, chunks, HV, K, V) in `dtype`, the corrected values (1, N, HV, V)).

    Args:
        k: (1, N, H, K), gated with gk. u: (1, N, HV, V), the values. w: (1, N, HV, K); None: linear attention, whose
            values need no correction.
        g: (1, N, HV) or gk: (1, N, HV, K), cumulated within a chunk, base 2.
    """
    _, _, heads, size = k.shape
    value_heads, value_size = u.shape[2:]
    states = k.new_empty(1, len(walk.chunks), value_heads, size, value_size, dtype=dtype)
    values = u if w is None else torch.empty_like(u)
    _run(
        kernels.walk_forward, walk, k, heads, value_heads, size, value_size, w is not None, gk is not None, False,
        (k, u, u if w is None else w, values, k if g is None else g, k if gk is None else gk, states), (),
    )  # fmt: skip
    return states, values


def walk_backward(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    do: Tensor,
    dv: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    scale: float,
    walk: Walk,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(the gradient of the state after each chunk, of the corrected values), from `dv`, their gradient within chunks.

    Args as `walk_forward`; q: (1, N, H, K), gated with gk; do: (1, N, HV, V).
    """
    _, _, heads, size = k.shape
    value_heads, value_size = do.shape[2:]
    states = k.new_empty(1, len(walk.chunks), value_heads, size, value_size, dtype=dtype)
    values = torch.empty_like(dv)
    _run(
        kernels.walk_backward, walk, k, heads, value_heads, size, value_size, w is not None, gk is not None, True,
        (q, k, k if w is None else w, do, dv, values, k if g is None else g, k if gk is None else gk, states),
        (float(scale),),
    )  # fmt: skip
    return states, values


def _run(
    kernel: Any, walk: Walk, k: Tensor, heads: int, value_heads: int, size: int, value_size: int, use_w: bool,
    use_gk: bool, backward: bool, tensors: tuple[Tensor, ...], scalars: tuple[float, ...],
) -> None:  # fmt: skip
    option = blocks(walk, size, value_size, value_heads, backward=backward, use_w=use_w)
    paths = len(walk.paths)
    if not paths:
        return
    programs = value_heads * (value_size // option["BV"])
    at_forks = k.new_empty(walk.forks, value_heads, size, value_size, dtype=torch.float32)
    flags = torch.zeros(1 + walk.forks * programs, dtype=torch.int32, device=k.device)
    kernel[(paths * programs,)](
        *tensors, at_forks, walk.chunks, walk.paths, flags, *scalars, paths,
        H=heads, HV=value_heads, K=size, V=value_size, BT=walk.size, BK=triton.next_power_of_2(size), USE_W=use_w,
        USE_GK=use_gk, **option, **COMPILE,
    )  # fmt: skip
