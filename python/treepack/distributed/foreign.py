"""Other libraries' sequence and context parallelism: found where it is switched on, and refused by name.

All of it cuts a row by position and lets an attention of its own exchange what the parts need. That attention knows no
tree: the parts of a tree would see rows of other samples, or miss their own ancestors.

Looked for in modules that are loaded already, so nothing is imported and a look costs microseconds. A version that
keeps its settings under other names is not seen; tests/integrations/test_foreign_parallelism.py asks the real ones.
"""

from __future__ import annotations

import sys
from typing import Any

from .._pages import page

__all__ = ["OURS", "refuse_foreign"]

#: The end of every refusal.
OURS = (
    'one tree runs over several ranks by treepack.term_log_probs(model, tree, mesh=..., shard="rows" or "heads"): '
    f"{page('shards')}"
)


def refuse_foreign() -> None:
    """ValueError where this process runs another library's sequence parallelism: which setting, its value, what to set.

    Seen are accelerate's ParallelismConfig (transformers' Trainer and TRL have it from there, from a launcher's file
    too), a block of torch's `context_parallel`, and the Ulysses group of verl.
    """
    for found in (_accelerate(), _torch(), _verl()):
        if found:
            raise ValueError(f"{found}, which cuts a row by position and does not know the tree in it; {OURS}")


def _accelerate() -> str | None:
    """A class with the state of the process, shared by all accelerators: none is made here."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    config = getattr(state, "_shared_state", {}).get("parallelism_config")
    for name, kind in (("cp_size", "context parallelism"), ("sp_size", "DeepSpeed's ALST/Ulysses")):
        size = getattr(config, name, None) or 1
        if size > 1:
            return f"accelerate's ParallelismConfig has {name}={size} ({kind}; allowed is 1)"
    return None


def _torch() -> str | None:
    """Within its block torch has another function in place of its attention."""
    module: Any = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    replaced = getattr(module, "_replaced_functions", {})
    if replaced and sys.modules["torch"].nn.functional.scaled_dot_product_attention in replaced:
        return "the model runs within torch's context_parallel (leave the block)"
    return None


def _verl() -> str | None:
    ulysses: Any = sys.modules.get("verl.utils.ulysses")
    size = ulysses.get_ulysses_sequence_parallel_world_size() if ulysses is not None else 1
    if size > 1:
        return f"verl's Ulysses group has {size} ranks (ulysses_sequence_parallel_size; allowed is 1)"
    return None
