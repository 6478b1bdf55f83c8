"""Tree attention by FlexAttention: the tree as its `mask_mod`, our tiles as its `BlockMask` (`from_kv_blocks`, so no
mask is ever built or compiled).

Soft caps and windows become its `score_mod` and `mask_mod`; sinks rescale its output by the log-sum-exp it returns. On
CUDA the call is compiled (once per pair of head sizes and feature set, for dynamic lengths); on the CPU it runs
FlexAttention's eager form, which is dense, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .tiles import tile_relation

BLOCK = 128


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    depth: Callable[[], Tensor] | None,
    cache: dict[Any, Any],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out (N, H, D_V), lse (H, N) natural)`; `cache` keeps the block mask of this tree between layers."""
    key = ("flex", sliding_window)
    if key not in cache:
        cache[key] = block_mask(subtree_end, depth() if depth else None, sliding_window)
    score_mod = _soft_cap(softcap, q.device) if softcap is not None else None
    run: Any = _compiled() if q.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out, aux = run(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=cache[key],
        scale=scale,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
    )
    lse = aux.lse
    real = torch.arange(subtree_end.shape[0], device=subtree_end.device) < subtree_end
    lse = torch.where(real, lse.squeeze(0), 0.0)
    out = torch.where(real[:, None, None], out.squeeze(0).transpose(0, 1), 0.0)
    if sinks is not None:
        with_sinks = torch.where(real, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]), 0.0)
        out = (out * torch.exp(lse - with_sinks).T[..., None]).to(q.dtype)
        lse = with_sinks
    return out, lse


def block_mask(subtree_end: Tensor, depth: Tensor | None = None, window: int | None = None) -> BlockMask:
    """The `BlockMask` of a tree, from its tiles of 128 x 128."""
    partial, full = tile_relation(subtree_end, BLOCK, BLOCK, depth=depth, window=window)

    def lists(mask: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)
        return mask.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    if window is None:

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < subtree_end[k])
    else:
        assert depth is not None

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < subtree_end[k]) & (depth[q] - depth[k] < window)

    n = subtree_end.shape[0]
    return BlockMask.from_kv_blocks(*lists(partial), *lists(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(n, n))


@functools.cache
def _soft_cap(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    # A tensor: a captured float becomes a symbol of its own under dynamic shapes, which the compiler does not take.
    cap = torch.tensor(softcap, device=device)

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
