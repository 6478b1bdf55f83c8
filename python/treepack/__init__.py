"""Pack rollouts that share prefixes into prefix trees: every shared token once, every loss term kept.

    packed = treepack.pack(samples, max_tokens=16384)
    for tree in packed:
        tree.input_ids, tree.position_ids, tree.subtree_end, tree.term_row, tree.term_target

`import treepack` needs NumPy alone; torch is loaded when a tree goes to a device.
"""

from typing import TYPE_CHECKING, Any

from ._optional import require
from ._version import __version__ as __version__
from .errors import PackError
from .packing import Packer, pack
from .tree.packed import Packed, Skipped, Stats
from .tree.tree import PackedTree

if TYPE_CHECKING:
    from .attention import tree_attention
    from .integrations.transformers.logprobs import term_log_probs
    from .integrations.transformers.rows import row_log_probs
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
    "row_log_probs",
    "term_log_probs",
    "tree_attention",
]


def __getattr__(name: str) -> Any:
    # What needs torch or an extra is loaded when it is first used.
    if name == "tree_attention":
        require("torch", "treepack.tree_attention", "torch")
        from .attention import tree_attention

        return tree_attention
    if name == "term_log_probs":
        require("torch", "treepack.term_log_probs", "torch")
        require("transformers", "treepack.term_log_probs", "transformers")
        from .integrations.transformers.logprobs import term_log_probs

        return term_log_probs
    if name == "row_log_probs":
        require("torch", "treepack.row_log_probs", "torch")
        require("transformers", "treepack.row_log_probs", "transformers")
        from .integrations.transformers.rows import row_log_probs

        return row_log_probs
    if name == "report":
        from .reports import report

        return report
    raise AttributeError(f"module 'treepack' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
