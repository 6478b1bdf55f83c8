"""TRL on treepack. Its asynchronous GRPO trainer by a switch, its GRPO and RLOO trainers by a mixin.

    import treepack.integrations.trl
    treepack.integrations.trl.install()          # before AsyncGRPOTrainer is made

    class TreeGRPOTrainer(treepack.integrations.trl.TreeLogProbs, trl.GRPOTrainer):
        keep_groups = True

Under the switch TRL's `FixedCountBatcher`, `TokenBudgetBatcher` and `DataCollatorForRollout` make the same batches,
byte for byte, and its attention "tree_fa3" runs on `treepack.tree_attention`. The mixin computes the log-probs of TRL's
rows on trees. For every other trainer, TRL's own of other versions included, there are `treepack.row_log_probs` and
`DataCollatorForTreePacking`, which need no TRL. TRL is imported by what needs it alone.
"""

from ..collator import DataCollatorForTreePacking
from .attention import tree_attention
from .row import TreeRow
from .rows import TreeLogProbs
from .switch import WORKS_WITH, install, uninstall

__all__ = [
    "WORKS_WITH",
    "DataCollatorForTreePacking",
    "TreeLogProbs",
    "TreeRow",
    "install",
    "tree_attention",
    "uninstall",
]
