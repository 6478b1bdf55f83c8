"""What the layers and the config of a Hugging Face model must be to run packed trees.

Every refusal says what was found and why it would be wrong. Models are read by their attributes; no tensor is read.
"""

from __future__ import annotations

import dis
import inspect
import re
from functools import cache
from typing import Any

from torch import nn

from ....attention import TreeTiles
from .tree import row_rope

__all__ = ["check_attention_config", "check_aux_loss", "check_layer", "check_layer_types", "check_positions"]

_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
_OTHER_LAYERS = re.compile(
    r"Mamba|SSM|Rwkv|RWKV|DeltaNet|DeltaRule|LinearAttention|LightningAttention|ShortConv|Recurrent|RgLru|Rglru|Retention|XLSTM|xLSTM"
)
_WHY = "it would carry state from one sample of the row into the next"
# Attention layers that make more of the mask than which keys a query sees, by class.
_OWN_MASKS = {
    "DogeAttention": "it chooses the keys of highest score among all of the row and adds their scores to the mask",
}


def check_layer(name: str, path: str, module: Any, *callers: Any) -> None:
    """Refuse a module that would be wrong on a packed tree, or that the tree would not reach.

    Args:
        name: of the model, for the message. path: of the module in it.
        callers: the modules through which its keyword arguments come.
    """
    kind: Any = type(module)
    if _recurrent(kind):
        raise ValueError(f"{name}: layer {path} is {kind.__name__}, recurrent or a convolution: {_WHY}")
    if "Attention" in kind.__name__ and hasattr(module, "layer_idx"):
        for one in callers:
            caller: Any = type(one)
            if not _hands_on(caller):
                raise ValueError(
                    f"{name}: {caller.__name__}.forward (at {path}) does not hand on the keyword arguments of "
                    "model(...), with which the tree travels, so attention would not get it; another model is needed, "
                    "or a forward that hands **kwargs on to attention"
                )
        check_attention(f"{name}: layer {path}", module)


def check_attention(where: str, module: Any) -> None:
    """Refuse an attention layer for what it does around the scores."""
    if type(module).__name__ in _OWN_MASKS:
        raise ValueError(f"{where} is {type(module).__name__}: {_OWN_MASKS[type(module).__name__]}")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
        raise ValueError(
            f"{where} scales its queries by their place in the row (attn_temperature_tuning), which is not the depth "
            "in the sample; set config.attn_temperature_tuning to False if the model was trained without"
        )
    value = getattr(module, "v_head_dim", None)
    score = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    if isinstance(value, int) and isinstance(score, int) and value != score:
        raise ValueError(
            f"{where} ({type(module).__name__}) has value heads of size {value} and query and key heads of size "
            f"{score}; tree attention takes one size for all three"
        )


@cache
def _recurrent(kind: type) -> bool:
    return issubclass(kind, nn.Conv1d | nn.RNNBase) or bool(_OTHER_LAYERS.search(kind.__name__))


@cache
def _hands_on(kind: type) -> bool:
    """Whether the forward function of a class reads its `**kwargs`; True for classes of torch, and where that cannot be
    told."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    code = getattr(forward, "__code__", None)
    if kind.__module__.startswith("torch.") or code is None:
        return True
    if {"tree_tiles", "subtree_end"} & set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
        return True
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    takes_more = bool(code.co_flags & inspect.CO_VARARGS)
    keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + takes_more]
    for step in dis.get_instructions(code):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if keywords in names and "LOAD" in step.opname:
            return True
    return False


def check_positions(name: str, decoder: Any) -> None:
    """Refuse a decoder that counts positions along the row, because it cannot be told the depth of each token."""
    parameters = inspect.signature(type(decoder).forward).parameters
    wrapper = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    if "position_ids" not in parameters and not wrapper:
        raise ValueError(
            f"{name}: {type(decoder).__name__}.forward takes no position_ids, so it would count positions along the "
            "row and not along each sample"
        )


def check_layer_types(name: str, config: Any) -> None:
    """Refuse linear attention, convolution and hybrid layers by the name of the layer type."""
    for attribute in ("layer_types", "layers_block_type"):
        for at, kind in enumerate(getattr(config, attribute, None) or ()):
            if kind not in _LAYER_TYPES:
                raise ValueError(
                    f"{name}: layer {at} is of type {kind!r}; packed trees run full_attention and sliding_attention "
                    f"layers only ({_WHY}, or its mask is another one)"
                )


def check_aux_loss(name: str, config: Any, weighted: bool) -> None:
    """Refuse a router loss that would count a shared token once."""
    coefficient = getattr(config, "router_aux_loss_coef", 0) or 0
    if getattr(config, "output_router_logits", False) and coefficient and not weighted:
        raise ValueError(
            f"{name} adds a router auxiliary loss (output_router_logits, router_aux_loss_coef = {coefficient}) in "
            "which a shared token counts once; take it weighted by position_samples, with term_log_probs(..., "
            "aux_loss=True), or set output_router_logits to False"
        )


def check_attention_config(module: Any, window: int | None, weighted: bool, tiles: TreeTiles | None = None) -> None:
    """The same from within a layer, for calls of `model(...)` that nothing else has checked; no tensor is read.

    Args:
        module: the attention layer. window: the sliding window that it handed on.
        weighted: the router's auxiliary loss is weighted by `position_samples`.
        tiles: of the tree, which say whether `check_tree` has seen it.
    """
    config = getattr(module, "config", None)
    if config is None:
        return
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    check_layer_types(name, config)
    check_aux_loss(name, config, weighted)
    check_attention(f"{name} (layer {layer})", module)
    rope = row_rope(config)  # first: a compiler would guard on what the tiles say
    if rope is not None and not (tiles is not None and tiles.row_checked):
        raise ValueError(
            f"{name} (layer {layer}) has {rope[0]} rotary embeddings, whose frequencies follow the longest sample of "
            "the row, so the tree must be checked first: make the inputs with model_inputs(tree, model=model)"
        )
    if window is not None:
        return
    kinds = getattr(config, "layer_types", None)
    if kinds and layer is not None:
        expected = kinds[layer] == "sliding_attention"
    else:
        expected = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    if expected:
        raise ValueError(
            f"{name} (layer {layer}) has a sliding window in its config ({getattr(config, 'sliding_window', None)}) "
            "but does not hand it to the attention implementation, so it would be lost; set sliding_window to None if "
            "the samples are shorter"
        )
