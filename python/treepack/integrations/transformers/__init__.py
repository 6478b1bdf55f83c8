"""Hugging Face models on packed trees: importing this registers the attention implementation "treepack".

    import treepack.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="treepack")
    log_probs = treepack.term_log_probs(model, tree)         # or: model(**model_inputs(tree)).logits

Keyword arguments of `model(...)` reach every attention layer, so the tree travels as `subtree_end` (and `tree_tiles`,
which holds what kernels derive from it, once for all layers) through any wrapper and both kinds of gradient
checkpointing. What would be wrong on a packed tree is refused with a ValueError, never run another way.
"""

from .attention import tree_attention_forward
from .checks.model import check_model
from .forward import forward_tree, hidden_alone, model_inputs
from .model import ATTENTION
from .ranges import RangePart, RangeRunner
from .router import router_aux_loss
from .rows import RowLogProbs

__all__ = [
    "ATTENTION",
    "RangePart",
    "RangeRunner",
    "RowLogProbs",
    "check_model",
    "forward_tree",
    "hidden_alone",
    "model_inputs",
    "router_aux_loss",
    "tree_attention_forward",
]
