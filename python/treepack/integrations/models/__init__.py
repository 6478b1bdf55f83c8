"""Checks of a Hugging Face model, and its head, under the name of the module that they were in."""

from ..transformers.checks.layers import check_attention_config
from ..transformers.checks.model import check_model
from ..transformers.checks.tree import check_tree
from ..transformers.model import ATTENTION, attention_layers, base, logit_options, output_head, unwrap

__all__ = [
    "ATTENTION",
    "attention_layers",
    "base",
    "check_attention_config",
    "check_model",
    "check_tree",
    "logit_options",
    "output_head",
    "unwrap",
]
