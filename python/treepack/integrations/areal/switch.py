"""The switch: treepack's functions in place of AReaL's, and back."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .batch import build_packed_tree_batch
from .theirs import areal

__all__ = ["install", "uninstall"]

_replaced: list[tuple[Any, str, Any]] = []
_carriers: list[Any] = []  # what finds AReaL's tree, while it is installed


def install(*, attention: bool = False) -> None:
    """Put `build_packed_tree_batch` in place of AReaL's, in every module of it that is loaded or will be.

    Args:
        attention: also compute attention of the FSDP engine with `treepack.tree_attention`, from one int32 per token
            instead of a dense mask, a block mask or a bit mask, and layers that carry a state along each path, where
            AReaL's would run on from one sample into the next. Call it before the engine is made. The Megatron and
            Archon engines keep their own. An `attn_impl` under which no tree attention runs, AReaL's own neither, is
            refused when the engine is initialized, and by the first layer that is given a tree.

    Raises:
        ImportError: no AReaL of a known version.
    """
    theirs = areal().build_packed_tree_batch
    uninstall()
    _replace(theirs, build_packed_tree_batch)
    if attention:
        from ..transformers.mixers import CARRIERS
        from .attention import replacements, tree_of_batch
        from .guard import replacements as guards

        for theirs, ours in replacements():
            _replace(theirs, ours)
        for holder, name, guard in guards():
            _replaced.append((holder, name, vars(holder)[name]))
            setattr(holder, name, guard)
        CARRIERS.append(tree_of_batch)
        _carriers.append(tree_of_batch)


def uninstall() -> None:
    """Undo `install`; nothing happens where it was not called."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)
    if _carriers:
        from ..transformers.mixers import CARRIERS

        CARRIERS.remove(_carriers.pop())


def _replace(theirs: Any, ours: Any) -> None:
    """Every loaded module of AReaL, and of transformers where AReaL has put it there, that holds `theirs`."""
    for loaded, module in list(sys.modules.items()):
        places = ("areal", "transformers.integrations.flash_attention")
        if not isinstance(module, ModuleType) or not (loaded in places or loaded.startswith("areal.")):
            continue
        for attribute, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, attribute, ours)
                _replaced.append((module, attribute, value))
