"""Attention of AReaL's FSDP engine on `treepack.tree_attention`: what `areal.install(attention=True)` puts in place.

The engine asks `build_tree_attn_kwargs` for keyword arguments before each forward pass and hands them through
transformers to `_tree_attn_fwd_func`. Here they are one `TreeTiles`, O(N) on the device and shared by all layers, where
AReaL makes a dense (N, N) mask or N x N / 64 words. Layers that carry a state (Qwen3.5 and its kind) find it there too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention import TreeTiles, tree_attention, tree_tiles
from ...recurrent.metadata import TreeSegments, share_segments
from .trie import PackedTrie

__all__ = ["replacements", "tree_metadata", "tree_of_batch"]

#: AReaL takes keywords that start with tree_ for its own.
KEYWORD = "tree_treepack"


def tree_metadata(trie: PackedTrie, padded_size: int, device: torch.device) -> TreeTiles:
    """The metadata of one micro-batch on a device.

    Args:
        trie: a trie of `build_packed_tree_batch`; of a dummy no token sees any.
        padded_size: positions, padding included.

    Raises:
        ValueError: a trie that is padded to another size.
    """
    if trie.tree is None:
        return tree_tiles(torch.arange(padded_size, dtype=torch.int32, device=device))
    if trie.tree.num_tokens != padded_size:
        raise ValueError(f"{trie} is padded to {trie.tree.num_tokens} positions; {padded_size} were asked for")
    tree = trie.tree.to(device)
    return TreeTiles(tree.subtree_end, tree.position_ids, tree.tiles)


def tree_of_batch(kwargs: dict[str, Any]) -> TreeTiles | None:
    """The tree among the keyword arguments of the engine's call of a model, for layers that carry a state."""
    tiles: TreeTiles | None = kwargs.get(KEYWORD)
    return tiles


def replacements() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """(AReaL's function, the one to put in its place)."""
    tree = importlib.import_module("areal.models.tree_attn.tree")
    fsdp = importlib.import_module("areal.models.tree_attn.module_fsdp")
    their_kwargs: Callable[..., dict[str, Any]] = tree.build_tree_attn_kwargs
    their_forward: Callable[..., Tensor] = fsdp._tree_attn_fwd_func

    def build_tree_attn_kwargs(
        trie: Any, padded_size: int, device: torch.device, *, dense_mask: bool = False
    ) -> dict[str, Any]:
        """`{"tree_treepack": TreeTiles}`; AReaL's own for its own tries and for a dense mask (Megatron)."""
        if dense_mask or not isinstance(trie, PackedTrie):
            return their_kwargs(trie, padded_size, device, dense_mask=dense_mask)
        from ..transformers.mixers import install_loaded

        tiles = tree_metadata(trie, padded_size, device)
        if install_loaded() and trie.tree is not None:
            share_segments(tiles, TreeSegments(tiles.subtree_end, trie.tree.subtree_end))
        return {KEYWORD: tiles}

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        softmax_scale: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """(1, N, H, D) each -> (1, N, H, D). A sliding window, a softcap and sinks are honoured."""
        tiles = kwargs.get(KEYWORD)
        if tiles is None:
            return their_forward(query, key, value, attention_mask, softmax_scale, *args, **kwargs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = tree_attention(
            q,
            k,
            v,
            tiles,
            scale=softmax_scale,
            sliding_window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return [
        (their_kwargs, build_tree_attn_kwargs),
        (their_forward, forward),
    ]
