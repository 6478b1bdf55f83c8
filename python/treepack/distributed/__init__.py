"""Trees and ranks: ranks that pack their own samples, and one tree over several ranks.

    aligned     ranks that pack their own samples take the same number of steps, with one normaliser

`import treepack` does not load this folder. What needs torch is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..tree.layout import dummy_tree, formats_of

if TYPE_CHECKING:
    from .aligned import Aligned, align, connect

__all__ = ["Aligned", "align", "connect", "dummy_tree", "formats_of"]

_HOMES = {"Aligned": ".aligned", "align": ".aligned", "connect": ".aligned"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
