"""The scans level by level, by the public functions of flash-linear-attention: the segments of one depth are a batch of
sequences whose initial states are the final states of their parents.

Exact, and slower: a gather, a call and a scatter for every level of the tree, forward and backward. For versions of
flash-linear-attention whose internal functions are not as known (`chunked.reason`), and as a second opinion in tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .metadata import TreeSegments

Level = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _levels(tree: TreeSegments) -> list[Level]:
    """For each depth of the tree of segments: (index of its tokens, cu_seqlens, the same on the host, the place of
    each parent one level up)."""
    if "segment levels" not in tree.cache:
        depth = np.zeros(len(tree.starts), np.int64)
        for segment, above in enumerate(tree.segment_parent.tolist()):
            depth[segment] = depth[above] + 1 if above >= 0 else 0
        place = np.zeros(len(tree.starts), np.int64)
        made: list[Level] = []
        for level in range(int(depth.max(initial=-1)) + 1):
            (segments,) = np.nonzero(depth == level)
            place[segments] = np.arange(len(segments))
            ranges = [np.arange(a, b) for a, b in zip(tree.starts[segments], tree.stops[segments], strict=True)]
            cuts = np.cumsum([0, *map(len, ranges)])
            above = tree.to_device(place[tree.segment_parent[segments]]) if level else None
            made.append((tree.to_device(np.concatenate(ranges)), tree.to_device(cuts), torch.from_numpy(cuts), above))
        tree.cache["segment levels"] = made
    kept: list[Level] = tree.cache["segment levels"]
    return kept


def scan(tree: TreeSegments, module: str, name: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """A function of flash-linear-attention on a tree; inputs (N, ...) by its names."""
    function = getattr(import_module(module), name)
    v = inputs["v"]
    out = torch.zeros_like(v)
    state: Tensor | None = None
    for tokens, cuts, host, above in _levels(tree):
        if state is not None:
            state = state[above]
        rows = {name: x[tokens].unsqueeze(0) for name, x in inputs.items()}
        o, state = function(
            **rows, initial_state=state, output_final_state=True, cu_seqlens=cuts, cu_seqlens_cpu=host, **options
        )
        out = out.index_copy(0, tokens, o.squeeze(0))
    return out


def tree_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, *, scale: float, qk_l2norm: bool
) -> Tensor:
    """As `reference.tree_gated_delta_rule`."""
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return scan(
        tree,
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        inputs,
        {"scale": scale, "use_qk_l2norm_in_kernel": qk_l2norm},
    )


def tree_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, *, scale: float, qk_l2norm: bool
) -> Tensor:
    """As `reference.tree_kda`."""
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return scan(tree, "fla.ops.kda", "chunk_kda", inputs, {"scale": scale, "use_qk_l2norm_in_kernel": qk_l2norm})


def tree_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, tree: TreeSegments, *, scale: float) -> Tensor:
    """As `reference.tree_linear_attention`; the kernels know no groups, so q and k are repeated."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    return scan(tree, "fla.ops.simple_gla", "chunk_simple_gla", {"q": q, "k": k, "v": v, "g": g}, {"scale": scale})
