"""Hugging Face models on packed trees: importing this registers the attention implementation "treepack".

    import treepack.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="treepack")
    log_probs = treepack.term_log_probs(model, tree)         # or: model(**model_inputs(tree)).logits

Keyword arguments of `model(...)` reach every attention layer, so the tree travels as `subtree_end` (and `tree_tiles`,
which holds what kernels derive from it, once for all layers) through any wrapper and both kinds of gradient
checkpointing. What would be wrong on a packed tree is refused with a ValueError, never run another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ...attention import TRITON, TreeTiles, tree_attention
from .capture import Capture, tie
from .checks.tree import check_ids
from .model import (
    ATTENTION,
    ROW_CHECKED,
    attention_layers,
    check_attention_config,
    check_model,
    check_tree,
    unwrap,
)

__all__ = [
    "ATTENTION",
    "check_model",
    "forward_tree",
    "hidden_alone",
    "model_inputs",
    "router_aux_loss",
    "tree_attention_forward",
]

# Keyword arguments that would change the scores in a way that tree attention does not compute.
_UNSUPPORTED = {
    "position_bias": "a bias on the scores",
    "indices": "sparse attention by an indexer",
    "block_indices": "sparse attention by blocks",
    "cu_seq_lens_q": "variable-length sequences in the row",
    "cu_seq_lens_k": "variable-length sequences in the row",
}


def model_inputs(tree: Any, *, model: Any = None, impl: str | None = None) -> dict[str, Any]:
    """The keyword arguments with which a Hugging Face model runs a packed tree.

    Args:
        tree: a `PackedTree` on the device of the model (`tree.to(device)`).
        model: the model, to have it checked (`check_model`) and to make what its layers share before the first one
            runs; its wrappers may be around it.
        impl: implementation of `tree_attention`; None: "triton" on CUDA, "reference" elsewhere.

    Returns:
        `input_ids`, `position_ids` (1, N), `subtree_end` (N,), `tree_tiles`, `impl`, `use_cache` (False) and
        `attention_mask`: (1, 1, 1, 0), "no mask". A 4-D mask is handed to the layers as it is, while with none
        transformers would look for packed sequences in `position_ids`, and wait for the device to do so.

    Raises:
        TypeError: not one tree, or one on the host as NumPy arrays.
        ValueError: a model that `check_model` refuses.
    """
    return _inputs(tree, impl, None if model is None else check_model(model))


def _inputs(tree: Any, impl: str | None, model: Any) -> dict[str, Any]:
    """`model_inputs` for a model that was checked and is without its wrappers, or None."""
    end = getattr(tree, "subtree_end", None)
    if end is None:
        many = f" of {len(tree)}: loop over it" if isinstance(tree, Sequence) else ""
        raise TypeError(f"one PackedTree is needed, not a {type(tree).__name__}{many}")
    if not isinstance(end, Tensor):
        raise TypeError("the tree holds NumPy arrays: move it to the model's device first, tree.to(device)")
    tiles = TreeTiles(end, tree.position_ids, getattr(tree, "tiles", None))
    config = None
    if model is not None:
        config = model.config.get_text_config()
        check_tree(model, tree)
        tiles.derived[ROW_CHECKED] = True
    if end.is_cuda and impl in (None, *TRITON):
        from ...kernels.triton_op import on_hopper

        if impl != "triton_plain" and on_hopper(end):
            tiles.schedule()
            heads = getattr(config, "num_attention_heads", None)
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            if isinstance(heads, int) and isinstance(kv_heads, int) and torch.is_grad_enabled():
                tiles.dkv_items(heads, kv_heads)
        for window in {0, getattr(config, "sliding_window", None) or 0}:
            tiles.lists(128, window)
            tiles.lists(64, window)
            if window:
                tiles.lists(64, window, transpose=True)
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "attention_mask": torch.empty(1, 1, 1, 0, device=end.device),
        "subtree_end": end,
        "tree_tiles": tiles,
        "impl": impl,
        "use_cache": False,
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
        kwargs: `subtree_end` (N,) or (1, N), or `tree_tiles`; `impl`; from the layer `sliding_window`, `softcap`,
            `s_aux` (sinks).

    Returns:
        (output (1, N, H, D), None): attention weights are never made.

    Raises:
        ValueError: anything given that the tree's attention would ignore, or a length that is not the tree's.
    """
    tiles, end = kwargs.get("tree_tiles"), kwargs.get("subtree_end")
    name = type(module).__name__
    if tiles is None and end is None:
        raise ValueError(
            f"{name} got no subtree_end: call the model with model_inputs(tree, model=model). "
            "Under Trainer set remove_unused_columns=False, which otherwise drops it; to run unpacked rows or to "
            'generate, model.set_attn_implementation("sdpa")'
        )
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
    weighted = kwargs.get("weighted_aux_loss", False)
    check_attention_config(module, window, weighted, None if tiles is None else tiles.derived)
    if tiles is None:
        # Per layer and again in a recomputation; model_inputs() makes them once. Depths come from the tree itself:
        # `position_ids` may have several axes.
        tiles = TreeTiles(torch.as_tensor(end).reshape(-1).to(torch.int32).contiguous())
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # As autocast treats torch's own attention: rotary embeddings leave float32, projections do not.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    out = tree_attention(
        query, key, value, tiles, scale=scaling, sliding_window=window, softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"), impl=kwargs.get("impl"))  # fmt: skip
    assert isinstance(out, Tensor)
    if not torch.compiler.is_compiling():
        tiles.derived["layers"] = tiles.derived.get("layers", 0) + 1
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


def forward_tree(
    model: Any, tree: Any, *, impl: str | None = None, router_logits: bool = False, own_head: bool = False
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """(hidden states (N, h) after the final norm, router logits of each MoE layer or None) of a packed tree.

    The model is called as a whole, wrappers included (DDP, torch.compile, PEFT), with the logits of one position only;
    the hidden states are read by a hook on its base model. With `own_head` the model's LM head may be anything.

    Raises:
        ValueError: a model that `check_model` refuses, one whose attention layers did not all run through treepack, or
            one that cannot leave out logits.
    """
    inner = check_model(model, weighted=router_logits)
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        raise ValueError(
            f"{type(inner).__name__}.forward has no logits_to_keep, so it would make the logits of all positions; "
            "compute the hidden states yourself and call treepack.logprobs.head_log_probs"
        )
    capture = Capture.of(inner)
    config = inner.config.get_text_config()
    inputs = _inputs(tree, impl, inner)
    check_ids(inner, tree)
    if router_logits:
        inputs |= {"output_router_logits": True, "weighted_aux_loss": True}
    if router_logits or getattr(config, "output_router_logits", False):
        del inputs["attention_mask"]  # the model's own router loss, which is not used, would take it for a padding mask
    with capture:
        out = model(**inputs, logits_to_keep=1)
        if capture.hidden is None:
            raise ValueError(
                f"{type(inner).__name__}: the base model's output was not seen. A model compiled and run before its "
                "first term_log_probs has its hooks compiled out: call torch.compiler.reset() once after this"
            )
        hidden, logits = capture.take()
    if not capture.verified:
        ran, wanted = inputs["tree_tiles"].derived.get("layers", 0), attention_layers(inner)
        if ran < wanted and not (ran == 0 and capture.compiled(model)):
            raise ValueError(
                f"{type(inner).__name__}: {ran} of {wanted} attention layers ran tree attention; the others compute "
                "their own and would leak between samples"
            )
        if not own_head:
            capture.verify(inner, hidden[:, -1], out.logits[:, -1])
    # Nothing is tied where nothing gathers gradients: the head's gradient of a single row is as large as the head.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (tie(hidden, out.logits) if distributed else hidden)[0], logits


def hidden_alone(model: Any, input_ids: Tensor) -> Tensor:
    """Hidden states (L, h) of one unpacked sample (L,) under whatever attention the model is set to."""
    capture = Capture.of(unwrap(model))
    with capture:
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
        return capture.take()[0][0]


def router_aux_loss(router_logits: tuple[Tensor, ...], tree: Any, *, num_experts: int, top_k: int) -> Tensor:
    """Load-balancing loss of the raw tokens: every position counts as often as samples pass through it.

    `num_experts * sum_e f_e P_e` (Fedus et al. 2021, Switch Transformers, eq. 4 to 6, with top-k choices as
    transformers has it): f_e the number of choices of expert e per token, P_e its mean probability, over all tokens
    and layers. Equal to transformers' own loss on the same samples in one unpacked batch.

    Args:
        router_logits: one (N, num_experts) per layer. tree: on their device.

    Returns:
        A scalar, to be multiplied by `config.router_aux_loss_coef`. 0 for a tree without samples.
    """
    logits = torch.cat([x.reshape(-1, num_experts) for x in router_logits])
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    weight = tree.position_samples.to(probabilities.dtype).repeat(len(router_logits))
    total = weight.sum().clamp(min=1)
    loss: Tensor = num_experts * ((weight @ chosen) / total * ((weight @ probabilities) / total)).sum()
    return loss


AttentionInterface.register(ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)
