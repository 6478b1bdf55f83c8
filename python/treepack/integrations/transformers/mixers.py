"""Layers with a state (gated delta net, KDA, Mamba-2, short convolution) of Hugging Face models on packed trees.

In these layers tokens meet in two functions only, a causal convolution and a scan; all else is per token. The module of
the model calls both by name and hands on the keyword arguments of `model(...)`, so the tree reaches them as it reaches
attention, in a recomputation too. `install_loaded` puts functions in their place that run a tree where they are handed
one, and what was there before where they are not. No forward is copied, no layer is changed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ...attention import TreeTiles
from . import meetings

__all__ = ["CARRIERS", "has_mixers", "install_loaded", "installed", "is_mixer", "refusal"]

#: What runs on a tree, by the name that the modules of transformers call.
MEETINGS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": meetings.conv1d,
    "torch_chunk_gated_delta_rule": meetings.gated_delta_rule,
    "chunk_kimi_delta_attention": meetings.kda,
    "mamba2_chunk_scan": meetings.mamba2,
    "mamba2_split_conv1d_scan_combined": meetings.fused_mamba2,
}
#: One step with a cache; a tree never gets there.
_DECODING = (
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
)
_MAMBA_1 = "Mamba-1: its state decays by another factor in each of its entries"
_OTHER_SCANS = {"mamba_selective_scan": _MAMBA_1, "mamba_inner_fn": _MAMBA_1}
_LOOKS_LIKE_A_SCAN = re.compile(r"scan|delta|recurrent|lightning|retention|wkv")


def _own(kwargs: dict[str, Any]) -> TreeTiles | None:
    """The tree of `model_inputs`. From `subtree_end` alone it is made for each layer and again in a recomputation."""
    tiles, end = kwargs.get("tree_tiles"), kwargs.get("subtree_end")
    if tiles is not None or end is None:
        return tiles
    return TreeTiles(torch.as_tensor(end).reshape(-1).to(torch.int32).contiguous())


#: Each finds the tree among the keyword arguments of a call, or None. Integrations with other trainers add their own.
CARRIERS: list[Callable[[dict[str, Any]], TreeTiles | None]] = [_own]


def is_mixer(kind: Any) -> bool:
    """Whether the forward of a class calls a function of `MEETINGS` by the name in its module."""
    return any(name in MEETINGS for name in _called(kind))


def has_mixers(module: torch.nn.Module) -> bool:
    """Whether a module is a layer with a state, or has one in it."""
    return any(is_mixer(type(one)) for one in module.modules())


def refusal(kind: Any) -> str | None:
    """Why a layer with a state cannot run a packed tree, or None."""
    called = _called(kind)
    for name in called:
        if name in _OTHER_SCANS:
            return f"it scans by {name} ({_OTHER_SCANS[name]}), which has no form for trees"
        if name not in MEETINGS and name not in _DECODING and _LOOKS_LIKE_A_SCAN.search(name):
            return f"it calls {name}, which is not known here"
    dropped = [name for name, hands_on in called.items() if name in MEETINGS and not hands_on]
    if dropped:
        return (
            f"it does not hand on the keyword arguments of model(...), with which the tree travels, to {dropped[0]}; "
            "a newer transformers may (that of LFM2 does in 5.24)"
        )
    return None


_seen = 0  # how many modules were loaded when `install_loaded` last looked
_any = False  # whether it found one that can run trees


def install_loaded() -> bool:
    """Makes the functions run trees in every loaded module of a model whose layers with a state all can.

    Once for each module. What other code calls there sees no difference without a tree.

    Returns:
        Whether there is such a module.
    """
    global _any, _seen
    modules = list(sys.modules.values())
    if len(modules) == _seen:
        return _any
    for module in modules:
        names: dict[str, Any] = getattr(module, "__dict__", {})
        found = [name for name in MEETINGS if name in names and not hasattr(names[name], "treepack_meeting")]
        if not found:
            continue
        kinds = [kind for kind in list(names.values()) if _is_layer(kind) and is_mixer(kind)]
        if kinds and not any(refusal(kind) for kind in kinds):
            names.update({name: _either(names[name], MEETINGS[name]) for name in found})
            _any = True
    _seen = len(modules)
    return _any


def installed(kind: Any) -> bool:
    """Whether the functions in the module of a class, an attention layer say, run trees."""
    names = _globals(kind)
    return any(hasattr(names.get(name), "treepack_meeting") for name in MEETINGS)


def _either(without: Callable[..., Any], on_tree: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(without)
    def meeting(*args: Any, **kwargs: Any) -> Any:
        for carrier in CARRIERS:
            tiles = carrier(kwargs)
            if tiles is not None:
                if "tree_hook" in kwargs:  # inputs that were made without the model
                    raise ValueError(
                        f"a layer that carries a state ({without.__name__}) got one part of a tree, and its state does "
                        "not go from rank to rank; run its trees on one rank each, without mesh"
                    )
                return on_tree(tiles, *args, **kwargs)
        return without(*args, **kwargs)

    meeting.treepack_meeting = True  # type: ignore[attr-defined]
    return meeting


def _is_layer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.nn.Module)


def _globals(kind: Any) -> dict[str, Any]:
    """The names of the module in which the forward of a class was written."""
    return getattr(inspect.unwrap(kind.forward), "__globals__", {})


@cache
def _called(kind: Any) -> dict[str, bool]:
    """The functions of its module that the forward of a class calls by name, and whether each is handed `**kwargs`
    (True where a source cannot be read)."""
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    names = [name for name in getattr(code, "co_names", ()) if callable(_globals(kind).get(name))]
    if not any(name in MEETINGS or _LOOKS_LIKE_A_SCAN.search(name) for name in names):
        return {}
    found = dict.fromkeys(names, True)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return found
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in found:
            found[call.func.id] &= any(keyword.arg is None for keyword in call.keywords)
    return found
