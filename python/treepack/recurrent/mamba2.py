"""Mamba-2's recurrence by `tree_linear_attention`: B are the keys, C the queries, x times the step size the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .api import check_rows, check_shape, tree_linear_attention
from .metadata import tree_segments
from .rule import eager


@eager
def tree_mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    tree: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    impl: str | None = None,
) -> Tensor:
    """The state-space recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) on a packed forest, per head:

        S = exp(dt A) S_parent + B (dt x)^T;   y = S^T C + D x

    The names, shapes and order of `mamba_chunk_scan_combined` of mamba_ssm.

    Args:
        x: (N, H, P) or (1, N, H, P).
        dt: (N, H), the step size; `dt_bias` is added, then softplus with `dt_softplus`, then clamped to `dt_limit`.
        A: (H,), negative. B, C: (N, G, K), G groups of heads.
        tree: a `PackedTree` or `TreeTiles` on the device of x.
        D: (H,) or (H, P). dt_bias: (H,).
        impl: as `tree_linear_attention`.

    Returns:
        y in the shape and dtype of x, 0 at padding.

    Raises:
        ValueError, TypeError: what does not fit; the message says what was given and what is allowed.
    """
    segments = tree_segments(tree)
    given = x
    x, dt, B, C = check_rows(segments, x=(x, 3), dt=(dt, 2), B=(B, 3), C=(C, 3))
    heads = x.shape[1]
    check_shape("dt", dt, (x.shape[0], heads), "one step size per token and head of x")
    check_shape("A", A, (heads,), "one per head of x")
    if dt_bias is not None:
        check_shape("dt_bias", dt_bias, (heads,), "one per head of x")
    if D is not None and D.dim() != 2:
        check_shape("D", D, (heads,), "one per head of x, or (heads, size) as x")
    elif D is not None:
        check_shape("D", D, (heads, x.shape[2]), "(heads, size) as x")
    if dt_limit is not None and not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit must be (least, most), not {dt_limit}")
    if segments.padded:  # what lies there may be anything
        x, dt = x.masked_fill(~segments.real[:, None, None], 0.0), dt.masked_fill(~segments.real[:, None], 0.0)
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    if dt_limit is not None:
        dt = dt.clamp(*dt_limit)
    v = (x * dt[..., None]).to(x.dtype)
    y = tree_linear_attention(C, B, v, dt * A.to(dt.dtype), tree=segments, scale=1.0, impl=impl)
    if D is not None:
        y = y + (x * (D if D.dim() == 2 else D[:, None])).to(x.dtype)
    return y.reshape(given.shape)
