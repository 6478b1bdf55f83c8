"""PackOptions: how samples are packed, checked. The one list of these options; what takes them by name is compared
with it in tests/packing/test_options.py."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast

from .._core import PackError

Branching = Literal["token", "label"]
Order = Literal["largest_first", "first_seen"]
Overlong = Literal["raise", "skip"]
#: "stream" is for offline packing alone: sample by sample, as `Packer` does.
Placement = Literal["shared", "first_fit", "stream"]

#: Larger than any tree.
_NO_BUDGET = 2**31 - 1

Made = TypeVar("Made", bound="PackOptions")

__all__ = ["BatchOptions", "Branching", "Order", "Overlong", "PackOptions", "Placement"]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """The options of `treepack.pack` and `treepack.Packer`, which say what each means.

    Integers of any type become int. PackError for values that are not allowed, TypeError for wrong types: which option,
    what it is, what is allowed.
    """

    max_tokens: int
    max_terms: int | None = None
    max_kept: int | None = None
    vocab_size: int | None = None
    branching: Branching = "token"
    order: Order = "largest_first"
    placement: Placement = "shared"
    overlong: Overlong = "raise"
    pad_to_multiple_of: int | None = None
    ranks: int = 1

    #: What is allowed of the options that are words; the other options are numbers from 1, or None where that is said.
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "branching": ("token", "label"),
        "order": ("largest_first", "first_seen"),
        "placement": ("shared", "first_fit"),
        "overlong": ("raise", "skip"),
    }
    NUMBERS: ClassVar[tuple[str, ...]] = ("max_tokens", "ranks")
    NUMBERS_OR_NONE: ClassVar[tuple[str, ...]] = ("max_terms", "max_kept", "vocab_size", "pad_to_multiple_of")

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name in self.CHOICES:
                _check_choice(name, value, self.CHOICES[name])
            elif name in self.NUMBERS or (name in self.NUMBERS_OR_NONE and value is not None):
                object.__setattr__(self, name, _number(name, value))

    @classmethod
    def of(cls: type[Made], arguments: Mapping[str, Any]) -> Made:
        """The options among the arguments of a call, `locals()` say; whatever else is there is passed over. Checked
        once: a call that is made again with the same values gets the same object."""
        kind: Any = cls
        names = tuple(filter(arguments.__contains__, _names(kind)))
        values = map(arguments.__getitem__, names)
        try:
            return cast(Made, _checked(kind, names, *values))
        except TypeError:  # a value that cannot be hashed, or one of a wrong type
            return cls(**{name: arguments[name] for name in names})

    def pack_keywords(self) -> dict[str, Any]:
        """The options by name, as `treepack.pack` takes them."""
        return {each.name: getattr(self, each.name) for each in fields(PackOptions)}

    def for_rust(self) -> dict[str, Any]:
        """The options as Rust takes them."""
        return {
            "max_tokens": self.max_tokens,
            "max_terms": self.max_terms,
            "max_kept": self.max_kept,
            "vocab_size": self.vocab_size,
            "label_branching": self.branching == "label",
            "first_seen": self.order == "first_seen",
            "first_fit": self.placement == "first_fit",
            "skip_overlong": self.overlong == "skip",
            "pad_to_multiple_of": self.pad_to_multiple_of or 1,
            "ranks": self.ranks,
        }


@dataclass(frozen=True, kw_only=True)
class BatchOptions(PackOptions):
    """The options of `treepack.pack`: those of every way to pack, and how the trees of a batch are cut into ranges."""

    cut: bool = False
    max_ancestors: int | None = None

    NUMBERS_OR_NONE: ClassVar = (*PackOptions.NUMBERS_OR_NONE, "max_ancestors")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cut, bool):
            raise TypeError(f"cut is {self.cut!r}; True or False is needed")
        if not self.cut:
            if self.max_ancestors is not None:
                raise PackError(f"max_ancestors is {self.max_ancestors}; it is for ranges: allowed with cut=True")
            return
        for name in ("max_terms", "max_kept", "pad_to_multiple_of"):
            if getattr(self, name) is not None:
                raise PackError(
                    f"{name} is {getattr(self, name)}; with cut=True a tree holds all samples and max_tokens bounds "
                    f"the rows of a range: leave {name} out"
                )
        if self.overlong == "skip" and self.max_ancestors is not None:
            raise PackError(
                "overlong is 'skip'; with cut=True no sample is skipped, and one that max_ancestors does not allow is "
                "an error: leave one of the two out"
            )

    def pack_keywords(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(BatchOptions)}

    def for_rust(self) -> dict[str, Any]:
        return {**super().for_rust(), "max_tokens": _NO_BUDGET} if self.cut else super().for_rust()


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.init)


# By type as well: True is no number of tokens, though it equals 1.
@lru_cache(maxsize=64, typed=True)
def _checked(kind: Any, names: tuple[str, ...], *values: Any) -> PackOptions:
    options: PackOptions = kind(**dict(zip(names, values, strict=True)))
    return options


def _number(name: str, value: Any) -> int:
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


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise PackError(f"{name} is {value!r}; allowed is {', '.join(others)} or {last}")
