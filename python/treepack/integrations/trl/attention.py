"""TRL's tree attention on treepack's kernels: the tree is read off the lengths of its segments and their paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import _core
from ...attention import TreeTiles
from ...recurrent.metadata import TreeSegments, share_segments

__all__ = ["tiles_of_segments", "tree_attention", "tree_of_row"]


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    tree_kv_index: Any = None,
    tree_max_seqlen_q: Any = None,
    tree_max_seqlen_k: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """TRL's tree attention on treepack's kernel: the tree is read off the lengths, and no key is gathered.

    Args:
        module: the attention layer. query (1, H, N, D), key and value (1, H_kv, N, D).
        tree_cu_seqlens_q, tree_cu_seqlens_k: (S + 1,) boundaries of the segments and of their paths, depth first. The
            first layer waits for the device once; what it finds stays with `tree_cu_seqlens_q` for the other layers.
        tree_kv_index, tree_max_seqlen_q, tree_max_seqlen_k: not needed.
        kwargs: as for `treepack.integrations.transformers.tree_attention_forward`.

    Returns:
        (output (1, N, H, D), None).

    Raises:
        ValueError: lengths that are not those of these tokens, or an option that tree attention does not compute.
    """
    from transformers.integrations.flash_attention import get_target_dtype

    from ..transformers.attention import tree_attention_forward
    from ..transformers.checks.layers import Remedies
    from ..transformers.checks.tree import row_is_short

    tiles = _shared_tiles(tree_cu_seqlens_q, tree_cu_seqlens_k)
    # A sample may end within the tree, so all that is known of their lengths is the longest.
    tiles.row_checked = tiles.longest is not None and row_is_short(module.config, tiles.longest)
    dtype = get_target_dtype(query, module) or query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    # A cache that this pass fills is as long as the row; one from before it is longer, and refused there.
    kwargs.pop("use_cache", None)
    remedies = Remedies(
        router="set router_aux_loss_coef=0.0 in AsyncGRPOConfig, and output_router_logits=False in the model's config; "
        "or train with GRPOTrainer under treepack.integrations.trl.TreeLogProbs, which weighs it",
        rope=f"and the longest here has {tiles.longest} tokens, beyond what they were made for: shorten samples "
        "(max_completion_length), or train without install()",
    )
    kwargs |= {"tree_tiles": tiles, "remedies": remedies}
    return tree_attention_forward(module, query, key, value, attention_mask, **kwargs)


def tree_of_row(kwargs: dict[str, Any]) -> TreeTiles | None:
    """The tree among the keyword arguments of TRL's call of a model, for layers that carry a state; None without."""
    if kwargs.get("tree_cu_seqlens_q") is None or kwargs.get("tree_cu_seqlens_k") is None:
        return None
    return _shared_tiles(kwargs["tree_cu_seqlens_q"], kwargs["tree_cu_seqlens_k"])


def _shared_tiles(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> TreeTiles:
    """`tiles_of_segments`, kept with the boundaries for the other layers."""
    tiles: TreeTiles | None = getattr(cu_seqlens_q, "_treepack_tiles", None)
    if tiles is None:
        tiles = tiles_of_segments(cu_seqlens_q, cu_seqlens_k)
        cu_seqlens_q._treepack_tiles = tiles  # type: ignore[attr-defined]
    return tiles


def tiles_of_segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> TreeTiles:
    """The tree of segments in depth-first order from how long they and their paths are; O(N), on the host.

    Args:
        cu_seqlens_q, cu_seqlens_k: (S + 1,) int32, boundaries of the segments and of their paths.

    Returns:
        The metadata of attention, on their device.

    Raises:
        ValueError: a path that is shorter than its segment, or than what lies above it.
    """
    cuts = np.ascontiguousarray(cu_seqlens_q.cpu().numpy(), np.int32)
    length = np.diff(cuts)
    reach = np.diff(cu_seqlens_k.cpu().numpy()).astype(np.int32)
    if len(reach) != len(length) or (reach < length).any() or (length < 1).any():
        raise ValueError(
            f"{len(length)} segments of {length.tolist()[:8]} tokens with paths of {reach.tolist()[:8]}: a path holds "
            "its segment, and a segment at least one token"
        )
    from ..transformers.mixers import install_loaded

    # What lies below a segment starts at the depth at which it ends; the first segment that starts higher up ends it.
    ends = np.full(len(length), cuts[-1], np.int32)
    open_segments: list[tuple[int, int]] = []  # (segment, depth at which it ends)
    for segment, (depth, end) in enumerate(zip((reach - length).tolist(), reach.tolist(), strict=True)):
        while open_segments and open_segments[-1][1] > depth:
            ends[open_segments.pop()[0]] = cuts[segment]
        above = open_segments[-1][1] if open_segments else 0
        if above != depth:
            raise ValueError(f"segment {segment} starts at depth {depth}; what lies above it ends at depth {above}")
        open_segments.append((segment, end))
    subtree_end = np.repeat(ends, length)
    depths = np.arange(cuts[-1], dtype=np.int64) + np.repeat(reach - length - cuts[:-1], length)
    device = cu_seqlens_q.device
    lists = {}
    for size in _core.TILE_SIZES:
        rows, items = _core.tile_lists(cuts, subtree_end, size)
        lists[size] = torch.from_numpy(rows).to(device).reshape(-1, 4), torch.from_numpy(items).to(device)
    made = TreeTiles(torch.from_numpy(subtree_end).to(device), torch.from_numpy(depths).to(device), lists)
    made.longest = int(reach.max(initial=0))
    if install_loaded():
        share_segments(made, TreeSegments(made.subtree_end, subtree_end))
    return made
