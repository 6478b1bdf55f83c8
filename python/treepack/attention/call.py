# mypy: ignore-errors
"""Tree attention by the kernels of Triton: what is asked for is checked, the set of kernels chosen, the metadata made,
the first use checked, the operator called."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operator, rule, self_check


def tree_attention(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor, float]:
    """`(out (N, H, D_V), lse2 (H, N), the factor that makes lse2 natural)`; `tiles`: a `TreeTiles`."""
    rule.check(impl, q, v)
    window, cap = sliding_window or 0, softcap or 0.0
    kernels = rule.choose(impl, q, v, window, cap, scale)
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    self_check.at_first_use(kernels, q, k, v, window > 0, cap > 0, sinks is not None, training, with_lse)
    hopper = kernels != rule.PLAIN
    metadata = tiles.prepare(window, training=training, hopper=hopper, heads=(q.shape[1], k.shape[1]))
    out, lse2 = operator.attend(training, q, k, v, sinks, tiles.subtree_end, *metadata, scale, window, cap, kernels)
    return out, lse2, operator.LN2
