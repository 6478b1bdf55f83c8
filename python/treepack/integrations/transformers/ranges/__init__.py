"""A tree under a Hugging Face model range by range: `pack(..., cut=True)`, then `RangeRunner(model, tree)`.

    keys        keys and values that later ranges need, and the gradients that come back for them
    gradients   when the gradients of several ranks are added up (DDP, FSDP2)
    host        what waits for its backward pass, in host memory
    part        RangePart: one range, as the loop of a user sees it
    runner      RangeRunner: all ranges in order, and which of them wait

What of a tree belongs to one range is `treepack.distributed.rows.Rows`. The keys and values of an ancestor are computed
once, with the range it lies in. Later ranges read them as constants; what their backward passes leave for them enters
the backward pass of that range, which therefore runs after theirs.
"""

from .part import RangePart
from .runner import RangeRunner

__all__ = ["RangePart", "RangeRunner"]
