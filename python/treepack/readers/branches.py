"""Messages that form a tree, each with the tokens that it adds and the number of the one before -> a sample a leaf.

    nodes: [{"parent": null, "token_ids": [1, 2]}, {"parent": 0, "token_ids": [3], "mask": [1]}, {"parent": 0, ...}]

So verifiers keeps its traces. What several branches share is trained in the first of them, as its trainers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .source import ReadError, kind

#: Values of a node for each of its tokens, or for those alone that its mask trains -> what they are of a branch.
_VALUES = {"logprobs": "logprobs", "reference_logprobs": "ref_logprobs", "advantages": "advantages"}
#: What stands for a value that a node lacks: unknown where it would be used, and nothing elsewhere.
_LACKING = {"logprobs": math.nan, "reference_logprobs": math.nan, "advantages": 0.0}


def as_branches(items: Any, where: str = "") -> Any:
    """A branch for each leaf of a list of nodes: `token_ids`, `completion_mask` if the nodes have masks, and values for
    each token. Any other list as it is.

    Raises ReadError for a parent that is not an earlier node, and for values of another number.
    """
    if not _are_nodes(items):
        return items
    parents = [_parent(node.get("parent"), at, f"{where}[{at}]") for at, node in enumerate(items)]
    inner = set(parents)
    trained: set[int] = set()
    out = []
    for leaf in range(len(items)):
        if leaf not in inner:
            path = []
            at: int | None = leaf
            while at is not None:
                path.append(at)
                at = parents[at]
            out.append(_branch(items, path[::-1], trained, where))
    return out


def _are_nodes(items: Any) -> bool:
    return (
        isinstance(items, list)
        and bool(items)
        and all(isinstance(item, dict) and "parent" in item and "token_ids" in item for item in items)
    )


def _parent(parent: Any, at: int, where: str) -> int | None:
    if parent is None:
        return None
    if not isinstance(parent, int) or not 0 <= parent < at:
        raise ReadError(
            f"{where}: parent is {parent!r}; null, or the number of an earlier one, 0 to {at - 1}, is needed"
        )
    return parent


def _branch(nodes: Sequence[dict[str, Any]], path: Sequence[int], trained: set[int], where: str) -> dict[str, Any]:
    masked = any("mask" in node and node["mask"] is not None for node in nodes)
    there = [name for name in _VALUES if any(_list(node, name, where) for node in nodes)]
    out: dict[str, list[Any]] = {
        name: [] for name in ("token_ids", "completion_mask", *map(_VALUES.__getitem__, there))
    }
    for at in path:
        node, ids = nodes[at], _list(nodes[at], "token_ids", f"{where}[{at}]")
        mask = _list(node, "mask", f"{where}[{at}]") or [0] * len(ids)
        if len(mask) != len(ids):
            raise ReadError(
                f"{where}[{at}]: mask has {len(mask)} values; needed is one for each of its {len(ids)} tokens"
            )
        out["token_ids"] += ids
        out["completion_mask"] += mask if at not in trained else [0] * len(ids)
        for name in there:
            out[_VALUES[name]] += _spread(_list(node, name, f"{where}[{at}]"), mask, name, f"{where}[{at}]")
        trained.add(at)
    if not masked:
        del out["completion_mask"]
    return out


def _list(node: dict[str, Any], name: str, where: str) -> list[Any]:
    value = node.get(name)
    if value is None:
        return []
    if isinstance(value, str | dict) or not hasattr(value, "__len__"):
        raise ReadError(f"{where}: {name} is {kind(value)}; a list is needed")
    return list(value)


def _spread(values: list[Any], mask: list[Any], name: str, where: str) -> list[Any]:
    """A value for each token, of one for each or for each that the mask trains."""
    if len(values) == len(mask):
        return values
    if values and len(values) != sum(map(bool, mask)):
        raise ReadError(
            f"{where}: {name} has {len(values)} values; needed is one for each of its {len(mask)} tokens, or of the "
            f"{sum(map(bool, mask))} that its mask trains"
        )
    rest = iter(values)
    return [next(rest, _LACKING[name]) if on else 0.0 for on in mask]
