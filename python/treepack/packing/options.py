"""Keyword arguments of `pack` and `Packer`, checked: which argument, what it is, what is allowed."""

from __future__ import annotations

import operator
from typing import Any

from .._core import PackError

Keywords = dict[str, Any]


def keywords(
    *,
    max_tokens: Any,
    max_terms: Any,
    max_kept: Any,
    vocab_size: Any,
    branching: Any,
    order: Any,
    placement: Any,
    overlong: Any,
    pad_to_multiple_of: Any,
    ranks: Any,
) -> Keywords:
    """The options as Rust takes them. PackError for values that are not allowed, TypeError for wrong types."""
    return {
        "max_tokens": _count("max_tokens", max_tokens),
        "max_terms": None if max_terms is None else _count("max_terms", max_terms),
        "max_kept": None if max_kept is None else _count("max_kept", max_kept),
        "vocab_size": None if vocab_size is None else _count("vocab_size", vocab_size),
        "label_branching": _choice("branching", branching, ("token", "label")) == "label",
        "first_seen": _choice("order", order, ("largest_first", "first_seen")) == "first_seen",
        "first_fit": _choice("placement", placement, ("shared", "first_fit")) == "first_fit",
        "skip_overlong": _choice("overlong", overlong, ("raise", "skip")) == "skip",
        "pad_to_multiple_of": 1 if pad_to_multiple_of is None else _count("pad_to_multiple_of", pad_to_multiple_of),
        "ranks": _count("ranks", ranks),
    }


def _count(name: str, value: Any) -> int:
    if type(value) is int and 0 < value < 2**63:
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; an integer is needed")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; an integer is needed") from None
    if number < 1:
        raise PackError(f"{name} is {number}; allowed is 1 or more")
    return min(number, 2**63)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        allowed = " or ".join(repr(choice) for choice in choices)
        raise PackError(f"{name} is {value!r}; allowed is {allowed}")
    return value
