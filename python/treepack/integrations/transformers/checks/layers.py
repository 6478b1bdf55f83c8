"""What the layers and the config of a Hugging Face model must be to run packed trees.

Every refusal says what was found and why it would be wrong. Models are read by their attributes; no tensor is read.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ....attention import TreeTiles
from ....distributed.foreign import refuse_foreign
from ..mixers import has_mixers, installed, is_mixer, refusal
from ..model import decoder_of
from .tree import row_rope

__all__ = [
    "FOR_CALLS",
    "NoTreeError",
    "Remedies",
    "check_attention_config",
    "check_aux_loss",
    "check_layer",
    "check_layer_types",
    "check_positions",
    "runnable_types",
]

_LAYER_TYPES = ("full_attention", "sliding_attention", "attention", "mlp", "moe")
# Of layers with a state, which run where the model's functions for them do (mixers.py).
_STATE_TYPES = ("linear_attention", "conv", "hybrid", "mamba")
# KimiLinearAttention is the softmax attention of Kimi-Linear.
_OTHER_LAYERS = re.compile(
    r"Mamba|SSM|Rwkv|RWKV|DeltaNet|DeltaRule|(?<!Kimi)LinearAttention|LightningAttention|ShortConv|Recurrent|RgLru|Rglru|Retention|XLSTM|xLSTM"
)
_WHY = "it would carry state from one sample of the row into the next"
_OWN_CODE = "tokens meet in its own code, not in a function that could be given the tree"
_OTHER_TYPES = {
    "indexed_attention": "an indexer chooses the keys among all tokens of the row, those of other samples too"
}
# Attention layers that make more of the mask than which keys a query sees, by class.
_OWN_MASKS = {
    "DogeAttention": "it chooses the keys of highest score among all of the row and adds their scores to the mask",
}


class NoTreeError(ValueError):
    """An attention layer that was called without a tree."""

    module: Any = None
    """The layer."""


class Remedies(NamedTuple):
    """What the caller of a model can do about a refusal; a trainer's user calls other things than one of his own."""

    router: str
    rope: str


FOR_CALLS = Remedies(
    router=(
        "take it weighted by position_samples, with term_log_probs(..., aux_loss=True), or from router_aux_loss beside "
        "a call with weighted_aux_loss=True; or set output_router_logits to False"
    ),
    rope="so the tree must be checked first: make the inputs with model_inputs(tree, model=model)",
)


def check_layer(name: str, path: str, module: Any, parent: Any) -> None:
    """Refuse a module that would be wrong on a packed tree.

    Args:
        name: of the model, for the message. path: of the module in it.
        parent: the module that it is a part of.
    """
    kind: Any = type(module)
    if is_mixer(kind):
        why = refusal(kind)
        if why is not None:
            raise ValueError(f"{name}: layer {path} is {kind.__name__}, which carries a state: {why}")
    elif _recurrent(kind) and not _in_mixers(module, parent):
        raise ValueError(f"{name}: layer {path} is {kind.__name__}, recurrent or a convolution: {_WHY}; {_OWN_CODE}")
    elif "Attention" in kind.__name__ and hasattr(module, "layer_idx"):
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


@cache
def _recurrent(kind: Any) -> bool:
    if issubclass(kind, nn.Conv1d | nn.RNNBase):
        return True
    return bool(_OTHER_LAYERS.search(kind.__name__)) and "Norm" not in kind.__name__


def _in_mixers(module: nn.Module, parent: Any) -> bool:
    """Whether a module that looks recurrent is what holds the weights of a mixer's convolution, or has mixers in it."""
    if isinstance(module, nn.Conv1d):
        return is_mixer(type(parent))
    return has_mixers(module)


def check_positions(name: str, decoder: Any) -> None:
    """Refuse a decoder that counts positions along the row, because it takes no depth of each token."""
    parameters = inspect.signature(type(decoder).forward).parameters
    wrapper = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    if "position_ids" not in parameters and not wrapper:
        raise ValueError(
            f"{name}: {type(decoder).__name__}.forward takes no position_ids, so it would count positions along the "
            "row and not along each sample"
        )


def check_layer_types(name: str, config: Any, states: bool) -> None:
    """Refuse layers by the name of their type.

    Args:
        name: of the model or layer, for the message. config: with the types of the layers.
        states: whether the model has layers with a state that run trees.
    """
    allowed = _LAYER_TYPES + (_STATE_TYPES if states else ())
    for attribute in ("layer_types", "layers_block_type"):
        for at, kind in enumerate(getattr(config, attribute, None) or ()):
            if kind in allowed:
                continue
            why = f"packed trees run layers of the types {', '.join(allowed)} ({_WHY}, or its mask is another one)"
            why = _OTHER_TYPES.get(kind, why)
            raise ValueError(f"{name}: layer {at} is of type {kind!r}; {why}")


def runnable_types(model: Any) -> set[str]:
    """The types of the layers of a model with a state, attention apart, where each of them can run a tree; else
    none."""
    config, decoder = model.config.get_text_config(), decoder_of(model)
    name, modules = type(model).__name__, dict(decoder.named_modules())
    if not has_mixers(decoder):
        return set()
    try:
        for path, module in modules.items():
            if is_mixer(type(module)) or isinstance(module, nn.Conv1d):
                check_layer(name, path, module, modules[path.rpartition(".")[0]])
        check_layer_types(name, config, True)
    except ValueError:
        return set()
    return {kind for kind in getattr(config, "layer_types", None) or () if "attention" not in kind or "linear" in kind}


def check_aux_loss(name: str, config: Any, weighted: bool, asked: bool = False, remedies: Remedies = FOR_CALLS) -> None:
    """Refuse a router loss that would count a shared token once, whether the config asks for it or the call does."""
    if weighted:
        return
    coefficient = getattr(config, "router_aux_loss_coef", 0) or 0
    if getattr(config, "output_router_logits", False):  # the model hands that on as if the call had asked
        if coefficient:
            raise ValueError(
                f"{name} adds a router auxiliary loss (output_router_logits, router_aux_loss_coef = {coefficient}) in "
                f"which a shared token counts once; {remedies.router}"
            )
    elif asked:
        raise ValueError(
            f"{name} was called with output_router_logits=True, for a router auxiliary loss in which a shared token "
            f"counts once; {remedies.router}"
        )


def check_attention_config(
    module: Any,
    window: int | None,
    weighted: bool,
    tiles: TreeTiles | None = None,
    *,
    asked: bool = False,
    remedies: Remedies = FOR_CALLS,
) -> None:
    """The same from within a layer, for calls of `model(...)` that nothing else has checked; no tensor is read.

    Args:
        module: the attention layer. window: the sliding window that it handed on.
        weighted: the router's auxiliary loss is weighted by `position_samples`.
        tiles: of the tree, which say whether `check_tree` has seen it.
        asked: the call asks for router logits.
        remedies: what the caller can do.
    """
    if not torch.compiler.is_compiling():
        refuse_foreign()
    config = getattr(module, "config", None)
    if config is None:
        return
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    check_layer_types(name, config, installed(type(module)))
    check_aux_loss(name, config, weighted, asked, remedies)
    check_attention(f"{name} (layer {layer})", module)
    rope = row_rope(config)  # first: a compiler would guard on what the tiles say
    if rope is not None and not (tiles is not None and tiles.row_checked):
        raise ValueError(
            f"{name} (layer {layer}) has {rope[0]} rotary embeddings, whose frequencies follow the longest sample of "
            f"the row, {remedies.rope}"
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
