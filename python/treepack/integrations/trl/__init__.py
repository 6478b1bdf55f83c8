"""TRL on treepack: the prefix packing and the tree attention of its asynchronous GRPO trainer, by one switch.

    import treepack.integrations.trl
    treepack.integrations.trl.install()          # before AsyncGRPOTrainer is made

TRL's `FixedCountBatcher`, `TokenBudgetBatcher` and `DataCollatorForRollout` then make the same batches, byte for byte,
and its attention "tree_fa3" runs on `treepack.tree_attention`. For every other trainer, TRL's own of other versions
included, there is `DataCollatorForTreePacking`, which needs no TRL. TRL is imported by `install` alone.
"""

from ..collator import DataCollatorForTreePacking
from .attention import tree_attention
from .row import TreeRow
from .switch import WORKS_WITH, install, uninstall

__all__ = [
    "WORKS_WITH",
    "DataCollatorForTreePacking",
    "TreeRow",
    "install",
    "tree_attention",
    "uninstall",
]
