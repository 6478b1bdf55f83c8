"""Pack rollouts that share prefixes into prefix trees: every shared token once, every loss term kept.

    packed = treepack.pack(samples, max_tokens=16384)
    for tree in packed:
        tree.input_ids, tree.position_ids, tree.subtree_end, tree.term_row, tree.term_target

`import treepack` needs NumPy alone; torch is loaded when a tree goes to a device.
"""

from typing import TYPE_CHECKING, Any

from ._core import PackError
from ._optional import require
from .packing import Packer, pack
from .tree.packed import Packed, Skipped, Stats
from .tree.tree import PackedTree

if TYPE_CHECKING:
    from .attention import tree_attention
    from .logprobs import term_log_probs
    from .reports import report

__all__ = [
    "PackError",
    "Packed",
    "PackedTree",
    "Packer",
    "Skipped",
    "Stats",
    "pack",
    "report",
    "term_log_probs",
    "tree_attention",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # What needs torch or an extra is loaded when it is first used.
    if name in ("tree_attention", "term_log_probs"):
        require("torch", f"treepack.{name}", "torch")
        from .attention import tree_attention
        from .logprobs import term_log_probs

        return tree_attention if name == "tree_attention" else term_log_probs
    if name == "report":
        from .reports import report

        return report
    raise AttributeError(f"module 'treepack' has no attribute {name!r}")
