"""What a Hugging Face model must be to run packed trees, whatever the tree.

Every refusal says what was found and why it would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....distributed.foreign import OURS, refuse_foreign
from ..attention import tree_attention_forward
from ..mixers import has_mixers, install_loaded
from ..model import ATTENTION, decoder_of, unwrap
from .layers import check_aux_loss, check_layer, check_layer_types, check_positions
from .randomness import check_randomness

__all__ = ["check_model"]


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
    refuse_foreign()
    other: Any = ALL_ATTENTION_FUNCTIONS.get(ATTENTION)
    if other is not tree_attention_forward:
        raise ValueError(
            f"{name}: {getattr(other, '__module__', '?')}.{getattr(other, '__qualname__', other)} was registered in "
            f"place of the attention {ATTENTION!r}, as DeepSpeed's Ulysses (ALST) does with every implementation, and "
            f"it does not know the tree; set sp_size to 1: {OURS}"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} computes attention in its own code, not through transformers' AttentionInterface")
    check_aux_loss(name, config, weighted)
    decoder = decoder_of(model)
    modules = dict(decoder.named_modules())
    for path, module in modules.items():
        check_layer(name, path, module, modules[path.rpartition(".")[0]])
        if "Attention" not in type(module).__name__:
            continue
        own = getattr(getattr(module, "config", None), "_attn_implementation", ATTENTION)
        if own != ATTENTION:
            raise ValueError(
                f"{name}: layer {path} uses attn_implementation={own!r}, which does not know the tree and would mix up "
                "the samples"
            )
    check_positions(name, decoder)
    check_layer_types(name, config, has_mixers(decoder))
    check_randomness(name, config, _with_embedding(model, modules))
    install_loaded()
    return model


def _with_embedding(model: Any, modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    yield from modules.items()
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Module):
        yield "embedding", embedding
