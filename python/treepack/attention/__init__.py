"""Tree attention: `tree_attention`, and `TreeTiles`, what it needs to know of a tree.

    api        checks, then one implementation           metadata   TreeTiles        tiles      the lists of tiles
    reference  plain torch: defines correct              tolerance  when a kernel counts as right
    call       the kernels of Triton: rule (which set), self_check (their first use), operator, versions
    triton/    the portable kernels                      hopper/    those for the H100 and H200
    flex, fa4/ the kernels of others on our tiles

The implementations never import each other. What is named here is loaded when it is first used: the kernels of
`hopper/` are compiled where there is Triton and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import IMPLEMENTATIONS as IMPLEMENTATIONS
    from .api import TRITON as TRITON
    from .api import tree_attention
    from .metadata import TreeTiles, tree_tiles

__all__ = ["TreeTiles", "tree_attention", "tree_tiles"]

_METADATA = ("TreeTiles", "tree_tiles")
_API = ("IMPLEMENTATIONS", "TRITON", "tree_attention")


def __getattr__(name: str) -> Any:
    home = ".metadata" if name in _METADATA else ".api" if name in _API else None
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
