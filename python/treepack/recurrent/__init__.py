"""Layers that carry a state, on a packed tree: the state before a token is the state after its parent.

    api        checks, then one implementation          metadata   TreeSegments: what a tree is to these layers
    reference  plain torch: defines correct

What is named here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import IMPLEMENTATIONS as IMPLEMENTATIONS
    from .api import tree_conv1d, tree_gated_delta_rule, tree_kda, tree_linear_attention
    from .mamba2 import tree_mamba2
    from .metadata import TreeSegments, tree_segments

__all__ = [
    "TreeSegments",
    "tree_conv1d",
    "tree_gated_delta_rule",
    "tree_kda",
    "tree_linear_attention",
    "tree_mamba2",
    "tree_segments",
]

_HOMES = {"TreeSegments": ".metadata", "tree_segments": ".metadata", "tree_mamba2": ".mamba2"}


def __getattr__(name: str) -> Any:
    if name not in __all__ and name != "IMPLEMENTATIONS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, ".api"), __name__), name)
