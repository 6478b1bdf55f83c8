"""Attention implementations that AReaL's FSDP engine may be set to, and under which no tree attention runs.

AReaL puts tree attention into transformers' flash attention alone. Under `attn_impl="sdpa"`, "eager" or
"flex_attention" a packed row runs as one sequence, and samples see each other without a word. Refused where an engine
is made, and in the first layer of the first batch, whoever made the model.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["BYPASSED", "replacements"]

#: What `attn_impl` may be without tree attention running.
BYPASSED = ("sdpa", "eager", "flex_attention")
#: With what AReaL's tree attention, or ours, is called.
_KEYWORDS = ("tree_treepack", "tree_block_mask", "tree_triton_data")


def refuse(what: str, name: str) -> None:
    """ValueError that says what to set."""
    raise ValueError(
        f"{what} has attn_impl={name!r}, under which no tree attention runs and the samples of a tree would see each "
        "other; set attn_impl to flash_attention_2 (no flash-attn is called for a tree), or enable_tree_training to "
        "False"
    )


def replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(object, name of a function of it, what to put there)."""
    from transformers import AttentionInterface

    look_up = vars(AttentionInterface).get("get_interface")  # the versions that AReaL asks for have it
    made: list[tuple[Any, str, Callable[..., Any]]] = []
    if look_up is not None:
        made.append((AttentionInterface, "get_interface", _guarded(look_up)))
    try:
        engine: Any = importlib.import_module("areal.engine.fsdp_engine").FSDPEngine
    except (ImportError, AttributeError):
        return made  # its packages are not here, so no engine will be made
    made.append((engine, "initialize", _checked(engine.initialize)))
    return made


def _guarded(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """`AttentionInterface.get_interface`, whose functions refuse a tree that they would not see."""

    @functools.wraps(look_up)
    def guarded(self: Any, name: str, *default: Any, **options: Any) -> Any:
        found = look_up(self, name, *default, **options)
        if name not in BYPASSED or found is None:
            return found

        @functools.wraps(found)
        def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
            if any(kwargs.get(keyword) is not None for keyword in _KEYWORDS):
                refuse(f"{type(module).__name__} of AReaL's engine", name)
            return found(module, *args, **kwargs)

        return attention

    return guarded


def _checked(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """`FSDPEngine.initialize` that looks at its configuration first."""

    @functools.wraps(initialize)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.config, "attn_impl", None)
        if getattr(self, "enable_tree_training", False) and name in BYPASSED:
            refuse("the configuration of AReaL's FSDP engine", name)
        return initialize(self, *args, **kwargs)

    return checked
