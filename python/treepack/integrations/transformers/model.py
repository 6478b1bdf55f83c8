"""A Hugging Face model without its wrappers, the part of it that makes the hidden states, and how its logits come from
them.

`transformers` is not imported here: models are read by their attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...attention import TreeTiles
from .mixers import is_mixer

__all__ = [
    "ATTENTION",
    "attention_layers",
    "base",
    "call_inputs",
    "decoder_of",
    "logit_options",
    "meeting_layers",
    "output_head",
    "unwrap",
]

#: The name of the attention implementation.
ATTENTION = "treepack"


def unwrap(model: Any) -> Any:
    """The Hugging Face model inside DDP, torch.compile and PEFT.

    Raises:
        ValueError: PEFT with virtual tokens (prompt or prefix tuning) or with adapters that start at a place in the
            row (aLoRA), or no Hugging Face model.
    """
    while True:
        hugging_face = hasattr(type(model), "base_model_prefix")
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and not hugging_face:
            check_adapters(model)
            if hasattr(type(model), "get_base_model"):
                model = model.get_base_model()
            else:  # of several kinds of adapters at once, or a tuner without the wrapper
                model = model.base_model if type(model).__name__ == "PeftMixedModel" else model.model
        elif isinstance(getattr(model, "module", None), nn.Module) and not hugging_face:
            model = model.module
        else:
            break
    if not hasattr(model, "base_model") or not hasattr(model, "config") or base(model) is None:
        raise ValueError(
            f"{type(model).__name__} is no Hugging Face model with a language-model head; with another model compute "
            "the hidden states with treepack.tree_attention and call treepack.logprobs.head_log_probs"
        )
    return model


def call_inputs(input_ids: Tensor, position_ids: Tensor, tiles: TreeTiles, impl: str | None) -> dict[str, Any]:
    """The keyword arguments of a model's call on one packed row, from (N,) each.

    `attention_mask` (1, 1, 1, 0) is "no mask": a 4-D mask is handed to the layers as it is, while with none
    transformers would look for packed sequences in `position_ids`, and wait for the device to do so.
    """
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "attention_mask": torch.empty(1, 1, 1, 0, device=tiles.subtree_end.device),
        "subtree_end": tiles.subtree_end,
        "tree_tiles": tiles,
        "impl": impl,
        "use_cache": False,
    }


def check_adapters(model: Any) -> None:
    """Refuse adapters of PEFT that depend on the row as a whole."""
    active = getattr(model, "active_adapters", ())
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} ({type(config).__name__}) adds virtual tokens to the row, which are no part "
                "of the packed tree"
            )
        if name in active and getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"adapter {name!r} is an activated LoRA (alora_invocation_tokens = {config.alora_invocation_tokens}): "
                "it starts where these tokens are last in the row, which is one place for all samples of a tree; run "
                "its samples unpacked"
            )


def base(model: Any) -> Any:
    """What makes the hidden states: the module below the head that the model calls, or None."""
    below = model.base_model
    if below is model:  # the prefix names another class of the family
        below = getattr(model, "model", None)
    decoder = getattr(below, "decoder", None)
    if isinstance(decoder, nn.Module) and decoder is _found_decoder(model):  # OPT, BART: called past what is around it
        below = decoder
    return below if isinstance(below, nn.Module) else None


def _found_decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else None


def decoder_of(model: Any) -> Any:
    """The module that holds the layers."""
    found = _found_decoder(model)
    return base(model) if found is None or found is model or isinstance(found, nn.Linear) else found


def attention_layers(model: Any) -> int:
    """Number of attention layers of the decoder."""
    kinds = [type(m) for m in decoder_of(model).modules() if hasattr(m, "layer_idx")]
    return sum("Attention" in kind.__name__ and not is_mixer(kind) for kind in kinds)


def meeting_layers(model: Any) -> int:
    """Number of layers of the decoder in which tokens meet: attention, and layers that carry a state."""
    return attention_layers(model) + sum(is_mixer(type(m)) for m in decoder_of(model).modules())


def output_head(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (V, h) and bias of the LM head of an unwrapped model.

    Raises:
        ValueError: a head that is not one plain linear layer (an adapter on it, quantised, sharded).
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the LM head is {type(head).__module__}.{type(head).__qualname__}; only a plain torch.nn.Linear can run "
            "on the rows alone (no adapter or quantisation on it)"
        )
    if head.weight.device.type == "meta":
        raise ValueError("the LM head's weight is offloaded (on the meta device); keep the head on the GPU")
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
