"""Tree attention in plain torch: the definition that every kernel is compared with.

    q sees k  <=>  k <= q < subtree_end[k]                     (k is an ancestor of q, or q itself)
    q sees k  also needs  depth[q] - depth[k] < sliding_window  when a window is set

Queries may be the last rows alone. Cost: O(N^2) memory and time per head. Axes: q = query, k = key, c = key/value head,
g = query head within its group, d = head size of q and k, e = that of v and the output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["tree_attention", "tree_depth", "tree_mask"]


def tree_depth(subtree_end: Tensor) -> Tensor:
    """Depth of every packed token, (N,) int32: the number of its ancestors.

    `depth[q] = q - #{k : subtree_end[k] <= q}`, since of the q tokens before q exactly those whose subtree has ended
    are no ancestors.
    Padding rows get a value without meaning; nothing reads it, because padding sees and is seen by nothing.
    """
    n = subtree_end.shape[0]
    ended = torch.zeros(n + 1, dtype=torch.int64, device=subtree_end.device)
    ended.index_add_(0, subtree_end.long(), torch.ones_like(ended[:n]))
    index = torch.arange(n, device=subtree_end.device)
    return (index - ended[:n].cumsum(0)).to(torch.int32)


def tree_mask(subtree_end: Tensor, position_ids: Tensor | None = None, sliding_window: int | None = None) -> Tensor:
    """The dense mask, (N, N) bool: `[q, k]` is True where q sees k. Padding rows and columns are all False."""
    index = torch.arange(subtree_end.shape[0], device=subtree_end.device)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    if sliding_window is not None:
        depth = (tree_depth(subtree_end) if position_ids is None else position_ids).long()
        mask &= depth[:, None] - depth[None, :] < sliding_window
    return mask


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    *,
    position_ids: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    upcast: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a packed forest; differentiable in q, k, v and sinks.

    Args:
        q: (n, H, D) or (1, H, n, D), any float dtype, any device, any strides: the last n <= N rows.
        k: (N, H_kv, D) or (1, H_kv, N, D); H must be a multiple of H_kv.
        v: the same with a head size D_V of its own.
        subtree_end: (N,) int32 or int64, one past the last descendant; `subtree_end[i] == i` marks padding.
        position_ids: (N,) depth of each token, read only with `sliding_window`; derived from `subtree_end` where
            absent.
        scale: factor on q.k; default 1 / sqrt(D).
        sliding_window: a query sees keys fewer than this many tokens above it, itself included.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: (H,), one extra logit per query head that takes probability and gives nothing.
        return_lse: also return the log of the softmax denominator (sinks included), natural log, (H, n) or (1, H,
            n), float32 or wider; 0 at padding.
        upcast: compute float16 and bfloat16 in float32. False is eager attention in the inputs' own dtype, for
            tolerance rules.

    Returns:
        Output (n, H, D_V) or (1, H, n, D_V) in the dtype of q, or (output, lse). Rows of padding are 0 and give no
        gradient.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    batched = q.dim() == 4
    if batched:
        if q.shape[0] != 1:
            raise ValueError(f"q has batch size {q.shape[0]}; a packed forest is one row, so the batch size must be 1")
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k has {kv_heads}; the first must be a multiple of the second")
    keys = k.shape[0]
    if keys < n or v.shape[:2] != k.shape[:2] or subtree_end.shape != (keys,):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("k", k), ("v", v), ("subtree_end", subtree_end)))
        raise ValueError(f"q has {n} tokens, but {shapes} do not fit it")
    dtype = q.dtype
    if upcast and dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    scale = 1.0 / math.sqrt(size) if scale is None else scale

    group = heads // kv_heads
    scores = torch.einsum("qcgd,kcd->cgqk", q.reshape(n, kv_heads, group, size), k).reshape(heads, n, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = tree_mask(subtree_end, position_ids, sliding_window)[keys - n :]
    # A finite fill: a row without keys must not turn into NaN (-inf - -inf), in either direction.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    p = torch.exp(scores - lse[..., None]).masked_fill(~mask, 0.0).to(v.dtype)
    out = (
        torch.einsum("cgqk,kce->qcge", p.reshape(kv_heads, group, n, keys), v).reshape(n, heads, v.shape[-1]).to(dtype)
    )
    lse = lse.masked_fill(~mask.any(dim=-1), 0.0)
    if batched:
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    return (out, lse) if return_lse else out


def both_passes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """`[out, lse, dq, dk, dv]` of `tree_attention` and its gradients by the equations of docs/kernel.md, all in the
    dtype of q: for a check that must leave no trace in autograd.

    Args:
        q: (N, H, D); k: (N, H_kv, D); v: (N, H_kv, D_V); dout: (N, H, D_V), the gradient of the output.
        subtree_end: (N,).
        dlse: (H, N), the gradient of lse, or None.
    """
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    q, dout = (x.reshape(n, kv_heads, heads // kv_heads, x.shape[-1]) for x in (q, dout))
    wide = torch.promote_types(q.dtype, torch.float32)
    mask = tree_mask(subtree_end, position_ids, sliding_window)
    x = torch.einsum("qcgd,kcd->cgqk", q, k) * scale
    capped = None
    if softcap is not None:
        capped = torch.tanh(x / softcap)
        x = softcap * capped
    s = x.masked_fill(~mask, torch.finfo(x.dtype).min)
    lse = torch.logsumexp(s.to(wide), dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide).reshape(kv_heads, -1, 1))
    p = torch.exp(s - lse[..., None]).masked_fill(~mask, 0.0)
    out = torch.einsum("cgqk,kce->qcge", p.to(v.dtype), v)
    delta = (out * dout).to(wide).sum(-1).permute(1, 2, 0)
    if dlse is not None:
        delta = delta - dlse.to(wide).reshape(delta.shape)
    ds = p * (torch.einsum("qcge,kce->cgqk", dout, v) - delta[..., None])
    if capped is not None:
        ds = ds * (1 - capped.to(wide) ** 2)
    ds = ds.to(q.dtype)
    lse = lse.masked_fill(~mask.any(dim=-1), 0.0)
    return [
        out.reshape(n, heads, v.shape[-1]),
        lse.reshape(heads, n),
        torch.einsum("cgqk,kcd->qcgd", ds, k).reshape(n, heads, size) * scale,
        torch.einsum("cgqk,qcgd->kcd", ds, q) * scale,
        torch.einsum("cgqk,qcge->kce", p.to(q.dtype), dout),
    ]
