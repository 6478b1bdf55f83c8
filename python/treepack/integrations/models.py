"""What a Hugging Face model must be to run packed trees, and how its logits come from its hidden states.

Every refusal says what was found and why it would be wrong. `transformers` is not imported here: models are read by
their attributes.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from torch import Tensor, nn

__all__ = [
    "ATTENTION",
    "attention_layers",
    "base",
    "check_attention_config",
    "check_model",
    "logit_options",
    "output_head",
    "unwrap",
]

#: The name of the attention implementation.
ATTENTION = "treepack"

_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
_OTHER_LAYERS = re.compile(
    r"Mamba|SSM|Rwkv|RWKV|DeltaNet|DeltaRule|LinearAttention|LightningAttention|ShortConv|Recurrent|RgLru|Rglru|Retention|XLSTM|xLSTM"
)
_WHY = "it would carry state from one sample of the row into the next"


def unwrap(model: Any) -> Any:
    """The Hugging Face model inside DDP, torch.compile and PEFT.

    Raises:
        ValueError: PEFT with virtual tokens (prompt or prefix tuning), or no Hugging Face model.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            for name, config in model.peft_config.items():
                if getattr(config, "is_prompt_learning", False):
                    raise ValueError(
                        f"adapter {name!r} ({type(config).__name__}) adds virtual tokens to the row, which are no part "
                        "of the packed tree"
                    )
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "base_model_prefix"):
            model = model.module
        else:
            break
    if not hasattr(model, "base_model") or not hasattr(model, "config") or base(model) is None:
        raise ValueError(
            f"{type(model).__name__} is no Hugging Face model with a language-model head; with another model compute "
            "the hidden states with treepack.tree_attention and call treepack.logprobs.head_log_probs"
        )
    return model


def base(model: Any) -> Any:
    """What makes the hidden states: the model below the head, or None."""
    below = model.base_model
    if below is model:  # the prefix names another class of the family
        below = getattr(model, "model", None)
    return below if isinstance(below, nn.Module) else None


def check_model(model: Any, *, weighted: bool = False) -> Any:
    """Raises ValueError where the model would not compute on a packed tree what it computes on each sample alone.

    Args:
        model: a Hugging Face causal language model, wrapped or not.
        weighted: the router's auxiliary loss is weighted by `position_samples` (`aux_loss=True`).

    Returns:
        The model without its wrappers.
    """
    model = unwrap(model)
    name, config = type(model).__name__, model.config.get_text_config()
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f"{name} uses attn_implementation={config._attn_implementation!r}, which does not know the tree and would "
            f'mix up the samples; load it with attn_implementation="{ATTENTION}" or call '
            f'model.set_attn_implementation("{ATTENTION}")'
        )
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} computes attention in its own code, not through transformers' AttentionInterface")
    check_layer_types(name, config)
    check_aux_loss(name, config, weighted)
    training = model.training
    if training:
        for setting in ("attention_dropout", "router_jitter_noise"):
            if getattr(config, setting, 0):
                raise ValueError(_random(name, setting, getattr(config, setting)))
    for path, module in _decoder(model).named_modules():
        kind: Any = type(module)
        recurrent, dropout, attention = _kind(kind)
        if recurrent:
            raise ValueError(f"{name}: layer {path} is {kind.__name__}, recurrent or a convolution: {_WHY}")
        if dropout and module.training and module.p > 0:
            raise ValueError(_random(name, f"{path} (dropout)", module.p))
        own = getattr(getattr(module, "config", None), "_attn_implementation", ATTENTION) if attention else ATTENTION
        if own != ATTENTION:
            raise ValueError(
                f"{name}: layer {path} uses attn_implementation={own!r}, which does not know the tree and would mix up "
                "the samples"
            )
    return model


@cache
def _kind(module: type) -> tuple[bool, bool, bool]:
    """(recurrent or a convolution, dropout, attention) of a class of modules."""
    recurrent = issubclass(module, nn.Conv1d | nn.RNNBase) or bool(_OTHER_LAYERS.search(module.__name__))
    return recurrent, issubclass(module, nn.Dropout), "Attention" in module.__name__


def _random(name: str, what: str, amount: float) -> str:
    return (
        f"{name} trains with {what} = {amount}: a shared token would draw once where its samples draw apart, so packed "
        "and alone differ; set it to 0, or model.eval()"
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


def check_attention_config(module: Any, window: int | None, weighted: bool) -> None:
    """The same from within a layer, for calls of `model(...)` that nothing else has checked; no tensor is read."""
    config = getattr(module, "config", None)
    if config is None:
        return
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    check_layer_types(name, config)
    check_aux_loss(name, config, weighted)
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


def _decoder(model: Any) -> Any:
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    return base(model) if found is None or found is model else found


def attention_layers(model: Any) -> int:
    """Number of attention layers of the decoder."""
    return sum("Attention" in type(m).__name__ and hasattr(m, "layer_idx") for m in _decoder(model).modules())


def output_head(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (V, h) and bias of the LM head of an unwrapped model.

    Raises:
        ValueError: a head that is not one plain linear layer (an adapter on it, quantised, sharded).
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the LM head is {type(head).__name__}; only a plain torch.nn.Linear can run on the rows alone (no adapter "
            "or quantisation on it)"
        )
    if type(head.weight).__name__ == "DTensor":
        raise ValueError("the LM head's weight is sharded (DTensor); keep the head out of the sharding")
    return head.weight, head.bias


def logit_options(model: Any) -> tuple[float, float | None]:
    """(scale, softcap) that the model applies to its logits after the head, by the names that configs use."""
    config = model.config.get_text_config()
    scale = float(getattr(model, "logit_scale", None) or getattr(config, "logit_scale", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return scale, float(softcap) if softcap else None
