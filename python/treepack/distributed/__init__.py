"""Trees and ranks: ranks that pack their own samples, and one tree over several ranks.

    aligned     ranks that pack their own samples take the same number of steps, with one normaliser
    split       where a tree is cut over ranks; traffic, what that costs on the wire
    rows        what of a tree belongs to one range of its rows
    exchange    what ranks exchange, with gradients; hooks, what they do so before and after attention
    shard       TreeShard: one rank's part of a tree
    gradients   the gradients of the ranks of one tree added up
    foreign     other libraries' sequence parallelism, which is refused

`import treepack` does not load this folder. What needs torch is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..tree.layout import dummy_tree, formats_of

if TYPE_CHECKING:
    from .aligned import Aligned, align, connect
    from .gradients import sum_gradients
    from .shard import TreeShard

__all__ = ["Aligned", "TreeShard", "align", "connect", "dummy_tree", "formats_of", "sum_gradients"]

_HOMES = {
    "Aligned": ".aligned",
    "TreeShard": ".shard",
    "align": ".aligned",
    "connect": ".aligned",
    "sum_gradients": ".gradients",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
