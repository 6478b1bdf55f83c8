"""The columns of a call as they cross the border to Rust: one array per sample in lists, or flat arrays and where
the samples lie in them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._core import Formats
from ..errors import Where
from .convert import Array, plain

# Known columns; everything else is a further column, per token or per sample.
IDS, MASK, IDENTITY = "input_ids", "completion_mask", "identity"
REAL = "attention_mask"
KEPT, COUNTS = "sampling_mask", "sampling_mask_counts"
GROUP = "group_id"
BOTH = "kept sets need both: flat ids, and of each token how many are its own"
KNOWN_PER_TOKEN = frozenset([IDENTITY, "old_log_probs"])
KNOWN_PER_SAMPLE = frozenset(["advantage"])

#: dtype and shape of a row of a column
Format = tuple[np.dtype[Any], tuple[int, ...]]


class Flat(NamedTuple):
    """A per-token column of all samples in one array: sample i has the rows `starts[i] : ends[i]`. What lies between
    samples, such as padding, is never read."""

    values: Array
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


@dataclass
class Inputs:
    """All columns of a call, ready for Rust. A per-token column is a list with one array per sample, or `Flat`.

    `formats`: row format of each gathered column, by name."""

    ids: Any
    mask: Any = None
    identity: tuple[str, int, Any] | None = None
    kept: tuple[Any, Any] | None = None
    token_columns: list[tuple[str, int, Any]] = field(default_factory=list)
    sample_columns: list[tuple[str, int, Array, bool]] = field(default_factory=list)
    formats: dict[str, Format] = field(default_factory=dict)

    def add_tokens(self, name: str, values: Any, row: Format) -> None:
        dtype, tail = row
        column = (name, dtype.itemsize * prod(tail), values)
        self.formats[name] = row
        self.token_columns.append(column)
        if name == IDENTITY:
            self.identity = column

    def add_scalars(self, name: str, values: Array) -> None:
        self.formats[name] = (values.dtype, ())
        self.sample_columns.append((name, values.dtype.itemsize, values, name != GROUP))


def group_codes(groups: Iterable[Hashable]) -> Array:
    """Groups as integers: their own values where all are integers, else numbers in order of first appearance."""
    if isinstance(groups, str | bytes) or not isinstance(groups, Iterable) or getattr(groups, "ndim", 1) == 0:
        raise TypeError(f"{GROUP} is a {type(groups).__name__}; a list or an array with one value per sample is needed")
    groups = list(groups)
    if not set(map(type, groups)) <= {int, str}:
        groups = [plain(group, Where(GROUP, i)) for i, group in enumerate(groups)]
    if set(map(type, groups)) <= {int}:
        try:
            return np.array(groups, np.int64)
        except OverflowError:
            pass  # numbered like other values
    codes: dict[Hashable, int] = {}
    out = np.empty(len(groups), np.int64)
    for i, group in enumerate(groups):
        try:
            out[i] = codes.setdefault(group, len(codes))
        except TypeError:
            raise Where(GROUP, i).type_error(f"is a {type(group).__name__}; it must be hashable") from None
    return out


def check_name(name: Any, where: Where) -> None:
    if not isinstance(name, str):
        raise where.type_error(f"has a column named {name!r}; names are strings")
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON may spell it
        raise where.error(f"has a column named {name!r}; names are Unicode text: give it another name") from None


def ready_formats(columns: Inputs) -> Formats:
    """What ready samples with the columns of these lists look like."""
    int32 = np.dtype(np.int32)
    tokens = [(name, *_listed(columns.formats[name])) for name, _, _ in columns.token_columns]
    scalars = [((name, *_listed(columns.formats[name])), per_term) for name, _, _, per_term in columns.sample_columns]
    return Formats(
        (IDS, np.dtype(np.int64), []),
        None if columns.mask is None else (MASK, columns.mask[0].dtype, []),
        None if columns.kept is None else ((KEPT, int32, []), (COUNTS, int32, [])),
        tokens,
        scalars,
        next((i for i, (name, *_) in enumerate(tokens) if name == IDENTITY), None),
    )


def _listed(row: Format) -> tuple[np.dtype[Any], list[int]]:
    return row[0], list(row[1])
