"""Layers with a state on a tree, in plain torch: the definition that every kernel is compared with.

    the state before token t is the state after parent[t];  at a root it is zero

All tokens of one depth are one step, so a forest costs as many steps as its longest path has tokens, and every state is
kept for the backward pass: O(N H K V) memory. Float16 and bfloat16 are computed in float32.

Axes: n = token of a level, h = value head, k = size of a key, v = size of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .metadata import TreeSegments

__all__ = ["levels", "tree_conv1d", "tree_gated_delta_rule", "tree_kda", "tree_linear_attention"]

L2_EPSILON = 1e-6  # added to the squared length, as flash-linear-attention and transformers do

Step = Callable[..., tuple[Tensor, Tensor]]


def levels(tree: TreeSegments) -> tuple[Tensor, list[int], list[Tensor]]:
    """The tokens by depth.

    Returns:
        order: (real tokens,) int64, their packed index, by depth and then by index.
        counts: the number of tokens of each depth.
        above: for each depth but the first the place of each token's parent among the tokens one depth up.
    """
    if "levels" not in tree.cache:
        depth_of_segment = [0] * len(tree.starts)
        lengths = (tree.stops - tree.starts).tolist()
        for segment, above in enumerate(tree.segment_parent.tolist()):
            if above >= 0:
                depth_of_segment[segment] = depth_of_segment[above] + lengths[above]
        ranges = list(zip(tree.starts.tolist(), lengths, depth_of_segment, strict=True))
        none = np.zeros(0, np.int64)
        index = np.concatenate([none, *(np.arange(a, a + n) for a, n, _ in ranges)])
        depth = np.concatenate([none, *(np.arange(d, d + n) for _, n, d in ranges)])
        order = index[np.argsort(depth, kind="stable")]
        counts = np.bincount(depth)
        cuts = np.concatenate([[0], np.cumsum(counts)])
        place = np.zeros(tree.tokens, np.int64)
        place[order] = np.arange(len(order)) - np.repeat(cuts[:-1], counts)
        parents = tree.parent_on_host()[order]
        above = [tree.to_device(place[parents[a:b]]) for a, b in pairwise(cuts[1:])]
        tree.cache["levels"] = tree.to_device(order), counts.tolist(), above
    kept: tuple[Tensor, list[int], list[Tensor]] = tree.cache["levels"]
    return kept


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(tree: TreeSegments, *inputs: Tensor) -> list[Tensor]:
    """The real tokens of each input by depth, in float32 or wider: what follows never sees a row of padding."""
    order = levels(tree)[0]
    return [x[order].to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]


def _scan(tree: TreeSegments, step: Step, like: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """`step(state, k, v, *others)` for all tokens, parents first.

    Args:
        step: (state (n, h, k, v), the rows of n tokens) to (state after them, their output (n, h, v)).
        like: (N, h, v), of the shape and dtype of the result, which is 0 at padding.
        k, v, others: by depth, as `_rows` has them.
    """
    order, counts, above = levels(tree)
    if not counts:
        return torch.zeros_like(like)
    rows = [torch.split(x, counts) for x in (k, v, *others)]
    state = k.new_zeros(counts[0], v.shape[1], k.shape[-1], v.shape[-1])
    out = []
    for depth in range(len(counts)):
        if depth:
            state = state[above[depth - 1]]
        state, row = step(state, *(x[depth] for x in rows))
        out.append(row)
    return torch.zeros_like(like).index_copy(0, order, torch.cat(out).to(like.dtype))


def _heads(x: Tensor, heads: int) -> Tensor:
    """(N, H, size) with each head repeated for the value heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON)


def _delta_step(state: Tensor, k: Tensor, v: Tensor, q: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The value that the state has at k moves to v by beta; decay is (n, h, 1, 1) or (n, h, k, 1)."""
    state = state * decay
    error = v - torch.einsum("nhkv,nhk->nhv", state, k)
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    return state, torch.einsum("nhkv,nhk->nhv", state, q)


def _linear_step(state: Tensor, k: Tensor, v: Tensor, q: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    state = state * decay + k[..., None] * v[..., None, :]
    return state, torch.einsum("nhkv,nhk->nhv", state, q)


def tree_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, *, scale: float, qk_l2norm: bool
) -> Tensor:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464), per value head:

        S = exp(g) S_parent;   S = S + k (beta (v - S^T k))^T;   o = scale S^T q

    Args:
        q, k: (N, H, K); v: (N, HV, V), HV a multiple of H; g, beta: (N, HV).

    Returns:
        (N, HV, V) in the dtype of v, 0 at padding.
    """
    return _delta_rule(q, k, v, g[..., None], beta, tree, scale, qk_l2norm)


def tree_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, *, scale: float, qk_l2norm: bool
) -> Tensor:
    """Kimi delta attention (arXiv 2510.26692): the gated delta rule with a decay per channel of the keys, g (N, HV,
    K)."""
    return _delta_rule(q, k, v, g, beta, tree, scale, qk_l2norm)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, scale: float, qk_l2norm: bool
) -> Tensor:
    like, heads = v, v.shape[1]
    q, k, v, g, beta = _rows(tree, q, k, v, g, beta)
    if qk_l2norm:
        q, k = _normalised(q), _normalised(k)
    q, k = _heads(q, heads) * scale, _heads(k, heads)
    return _scan(tree, _delta_step, like, k, v, q, g.exp()[..., None], beta)


def tree_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, tree: TreeSegments, *, scale: float) -> Tensor:
    """Linear attention with a decay per head, the recurrence of Mamba-2: S = exp(g) S_parent + k v^T;  o = scale S^T q.

    Args:
        q, k: (N, H, K); v: (N, HV, V), HV a multiple of H; g: (N, HV).
    """
    like, heads = v, v.shape[1]
    q, k, v, g = _rows(tree, q, k, v, g)
    return _scan(tree, _linear_step, like, _heads(k, heads), v, _heads(q, heads) * scale, g.exp()[..., None, None])


def tree_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, tree: TreeSegments, *, silu: bool) -> Tensor:
    """A causal convolution per channel along the path of each token:

        y[t] = sum over j < W of weight[W - 1 - j] * x[the j-th ancestor of t]  +  bias        the 0-th is t itself

    Args:
        x: (N, C); weight: (C, W); bias: (C,) or None. silu: y * sigmoid(y) of that.
    """
    dtype, n, width = x.dtype, x.shape[0], weight.shape[1]
    real = tree.real[:, None]
    x, weight = _wide(x), _wide(weight)
    rows = functional.pad(x.masked_fill(~real, 0.0), (0, 0, 0, 1))  # row N is what lies above a root
    parent = tree.parent.long()
    up = functional.pad(torch.where(parent < 0, n, parent), (0, 1), value=n)
    ancestor = torch.arange(n, device=x.device)
    y = rows[ancestor] * weight[:, width - 1]
    for j in range(1, width):
        ancestor = up[ancestor]
        y = y + rows[ancestor] * weight[:, width - 1 - j]
    if bias is not None:
        y = y + _wide(bias)
    if silu:
        y = functional.silu(y)
    return y.masked_fill(~real, 0.0).to(dtype)
