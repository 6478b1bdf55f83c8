"""A tree to the values of its samples, in the order in which the page draws them: which row of which file, how long,
how much of it is trained, and every column that has one value for a sample. O(M + terms), NumPy."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tree.segments import sample_lengths
from .segments import Numbers

if TYPE_CHECKING:
    from ..tree.tree import HostTree

#: What a caller says of the samples: `given[i]` of the sample with the number i, or a tree -> a dict for each of its.
Given = Sequence[Mapping[str, Any]] | Callable[["HostTree"], Sequence[Mapping[str, Any]]]
#: Letters of a value that are shown.
VALUE = 80
#: Columns that the page computes with; they are there whatever the limit.
ALWAYS = ("sample", "length", "terms", "turns")


def given_of(tree: HostTree, given: Given) -> Sequence[Mapping[str, Any]]:
    """What a caller says of each sample of a tree; nothing of those that it does not know."""
    if callable(given):
        return given(tree)
    return [given[i] if i < len(given) else {} for i in tree.sample_index.tolist()]


def valid(text: str) -> str:
    """Text that UTF-8 can hold: of a file name that is not UTF-8 Python makes lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def drawn_order(tree: HostTree) -> Numbers:
    """(M,) int64: the samples from the top of the picture down: those that end in a segment come before those below."""
    return np.argsort(tree.sample_last_segment, kind="stable")


def terms_and_turns(tree: HostTree) -> tuple[Numbers, Numbers]:
    """(M,) int64 each: the loss terms of each sample, and in how many unbroken runs its trained tokens lie."""
    samples = len(tree.sample_index)
    owner = tree.term_sample.astype(np.int64)
    depth = tree.position_ids.astype(np.int64)[tree.row_position[tree.term_row]]
    order = np.lexsort((depth, owner))
    owner, depth = owner[order], depth[order]
    opens = np.ones(len(owner), bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (depth[1:] != depth[:-1] + 1)
    return np.bincount(owner, minlength=samples), np.bincount(owner[opens], minlength=samples)


def columns_of_samples(tree: HostTree, given: Given | None) -> dict[str, list[Any]]:
    """Name -> a plain value for each sample, in the order of the tree; what `given` says stands before the columns that
    were packed."""
    numbers = tree.sample_index.tolist()
    terms, turns = terms_and_turns(tree)
    out: dict[str, list[Any]] = {"sample": numbers}
    if given is not None:
        said = given_of(tree, given)
        out |= {name: [plain(one.get(name)) for one in said] for name in dict.fromkeys(k for one in said for k in one)}
    packed = {name: values for name, values in tree.samples.items() if np.ndim(values) == 1}
    packed |= {name: values for name in tree.terms if (values := _one_each(tree, tree.terms[name])) is not None}
    for name in sorted(packed.keys() - out.keys(), key=lambda name: (not name.startswith("group"), name)):
        out[name] = [plain(value) for value in np.asarray(packed[name]).tolist()]
    return out | {"length": sample_lengths(tree).tolist(), "terms": terms.tolist(), "turns": turns.tolist()}


def _one_each(tree: HostTree, values: Any) -> Any:
    """(M,): a column of terms whose value is the same at all terms of a sample; None where it is not."""
    values = np.asarray(values)
    samples = len(tree.sample_index)
    if values.ndim != 1 or not len(values):
        return None
    first = np.full(samples, -1)
    owner = tree.term_sample.astype(np.int64)
    first[owner[::-1]] = np.arange(len(owner))[::-1]
    same = values == values[first[owner]]
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(values[first[owner]])
    if not same.all():
        return None
    return np.array([values[at] if at >= 0 else None for at in first.tolist()], object)


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers to six digits, anything else as text that is not long."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return plain(value.item())
    text = valid(str(value))
    return text if len(text) <= VALUE else f"{text[: VALUE - 3]}..."


def within(columns: dict[str, list[Any]], most: int, names: int) -> tuple[dict[str, list[Any]], int]:
    """The columns that the page has room for, in their order, in at most about `most` bytes of it; and how many it
    leaves out. `names`: columns beside the page's own, at most."""
    kept, left, others = {}, 0, 0
    for name in (*ALWAYS, *(name for name in columns if name not in ALWAYS)):
        size = len(zlib.compress(json.dumps(columns[name]).encode())) * 4 // 3
        if name not in ALWAYS and (size > most or others == names):
            left += 1
            continue
        most -= size
        others += name not in ALWAYS
        kept[name] = columns[name]
    return kept, left
