"""Tree attention as transformers' attention implementation "treepack"; importing this registers it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ...attention import TreeTiles, tree_attention
from .checks.layers import FOR_CALLS, NoTreeError, check_attention_config
from .model import ATTENTION

__all__ = ["tree_attention_forward"]

# Keyword arguments that would change the scores in a way that tree attention does not compute.
_UNSUPPORTED = {
    "position_bias": "a bias on the scores",
    "indices": "sparse attention by an indexer",
    "block_indices": "sparse attention by blocks",
    "cu_seq_lens_q": "variable-length sequences in the row",
    "cu_seq_lens_k": "variable-length sequences in the row",
}


def tree_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, as `AttentionInterface` calls it.

    Args:
        module: the attention layer. query (1, H, N, D), key and value (1, H_kv, N, D).
        attention_mask: must be None or empty; the tree is the mask.
        dropout: must be 0. scaling: factor on the scores.
        kwargs: `subtree_end` (N,) or (1, N), or `tree_tiles`; `impl`; `tree_hook`, what one part of a tree exchanges
            with the others (`treepack.distributed.hooks`); from the layer `sliding_window`, `softcap`, `s_aux` (sinks).

    Returns:
        (output (1, N, H, D), None): attention weights are never made.

    Raises:
        ValueError: anything given that the tree's attention would ignore, or a length that is not the tree's.
    """
    tiles, end = kwargs.get("tree_tiles"), kwargs.get("subtree_end")
    name = type(module).__name__
    if tiles is None and end is None:
        error = NoTreeError(
            f"{name} got no subtree_end: call the model with model_inputs(tree, model=model). "
            "Under Trainer set remove_unused_columns=False, which otherwise drops it; to run unpacked rows or to "
            'generate, model.set_attn_implementation("sdpa")'
        )
        error.module = module
        raise error
    if attention_mask is not None and attention_mask.numel():
        raise ValueError(
            f"{name} got an attention_mask {tuple(attention_mask.shape)}: a packed tree has no padding mask, its mask "
            "is subtree_end; do not pass attention_mask"
        )
    if dropout:
        raise ValueError(f"{name} has attention dropout {dropout}: shared tokens would share it; set it to 0")
    if kwargs.get("use_cache") or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name} runs with a cache of keys and values: a packed tree is one pass; pass use_cache=False"
        )
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"{name} is not causal (is_causal=False): a token of a packed tree sees its ancestors only")
    if kwargs.get("output_attentions"):
        raise ValueError(f"{name}: output_attentions=True, but tree attention never makes the weights")
    for given, meaning in _UNSUPPORTED.items():
        if kwargs.get(given) is not None:
            raise ValueError(f"{name} got {given} ({meaning}), which tree attention does not compute")
    window = kwargs.get("sliding_window")
    weighted, asked = kwargs.get("weighted_aux_loss", False), bool(kwargs.get("output_router_logits"))
    remedies = kwargs.get("remedies", FOR_CALLS)
    check_attention_config(module, window, weighted, tiles, asked=asked, remedies=remedies)
    if tiles is None:
        # Per layer and again in a recomputation; model_inputs() makes them once. Depths come from the tree itself:
        # `position_ids` may have several axes.
        tiles = TreeTiles(torch.as_tensor(end).reshape(-1).to(torch.int32).contiguous())
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # As autocast treats torch's own attention: rotary embeddings leave float32, projections do not.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    hook, sinks = kwargs.get("tree_hook"), kwargs.get("s_aux")
    if hook is not None:  # a part of a tree: what it needs of the others comes first
        query, key, value, sinks = hook.before(module, query, key, value, sinks)
    out = tree_attention(
        query,
        key,
        value,
        tiles,
        scale=scaling,
        sliding_window=window,
        softcap=kwargs.get("softcap"),
        sinks=sinks,
        impl=kwargs.get("impl"),
    )
    assert isinstance(out, Tensor)
    if hook is not None:
        out = hook.after(out)
    if not torch.compiler.is_compiling():
        tiles.layers += 1
    return out.transpose(1, 2).contiguous(), None  # a copy only where the implementation stored it otherwise


def _no_mask(*, attention_mask: Tensor | None = None, q_length: Any = None, kv_length: Any = None, **_: Any) -> None:
    """What `AttentionMaskInterface` calls to make a mask. Registered so that a padding mask is seen: transformers drops
    it for implementations that are not."""
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} given: a packed tree has no padding mask, its mask is "
            "subtree_end, and padding of its own sees nothing; do not pass one (models that make it themselves, as "
            "BioGPT and OPT, want the empty one of model_inputs). To run padded batches or to "
            'generate, model.set_attn_implementation("sdpa")'
        )
    if isinstance(q_length, int) and isinstance(kv_length, int) and q_length != kv_length:
        raise ValueError("a cache of keys and values was given: a packed tree is one pass; pass use_cache=False")


AttentionInterface.register(ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)
