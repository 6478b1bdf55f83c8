"""Trees that are made from arrays, not by the packer: those that were stored, and dummies for ranks that have too few.

Costs one copy of the arrays. Needs NumPy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import ALIGN, PackError
from ..inputs.columns import Format
from .tree import HostTree, PackedTree

#: dtypes of the arrays of every tree in the order of their buffer.
ARRAYS: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype, _, _ in _core.ARRAYS}
#: What trees of label branching alone have, and those of samples with kept sets.
(LABELS,) = (name for name, _, _, when in _core.ARRAYS if when == "label branching")
KEPT = tuple(name for name, _, _, when in _core.ARRAYS if when == "kept sets")
#: Gathered columns, by what they have a row for.
KINDS = ("terms.", "samples.", "positions.")
#: What padding holds in each array with a row per position.
_PADDING = {
    "input_ids": 0,
    "position_ids": 0,
    LABELS: -100,
    "parent": -1,
    "position_source": -1,
    "position_samples": 0,
}


def formats_of(tree: PackedTree) -> dict[str, Format]:
    """(dtype, row shape) of every gathered column by its full name, in the order of the buffer: "terms.advantage"."""
    names = [name for name in tree.arrays if name.startswith(("terms.", "samples."))]
    # A column on which the samples of this tree disagree has its place in other trees of the call.
    positions = [name for name in tree.arrays if name.startswith("positions.")]
    names += sorted([*positions, *(f"positions.{name}" for name in tree.disagreements)])
    return {name: tree.column_formats[name.split(".", 1)[1]] for name in names}


def tree_from_arrays(
    arrays: Mapping[str, npt.NDArray[Any]],
    formats: Mapping[str, Format],
    disagreements: Mapping[str, tuple[int, int, int]],
) -> HostTree:
    """A tree on one fresh buffer, laid out as the packer lays it out: arrays in order, each from a multiple of 64
    bytes, zeros in between.

    Args:
        arrays: every array by its full name, in the order of the buffer.
        formats: (dtype, row shape) of each column by its full name.
        disagreements: (sample, sample, token) of each per-token column that has no value per position.
    """
    fields, end = {}, 0
    for name, array in arrays.items():
        fields[name] = (end, len(array))
        end += array.nbytes + -array.nbytes % ALIGN
    space = np.zeros(end + ALIGN, np.uint8)
    begin = -space.ctypes.data % ALIGN
    buffer = space[begin : begin + end]
    for name, array in arrays.items():
        offset, rows = fields[name]
        np.ndarray((rows, *array.shape[1:]), array.dtype, buffer, offset)[...] = array
    return PackedTree(buffer, fields, {name.split(".", 1)[1]: row for name, row in formats.items()}, disagreements)


def dummy_tree(
    formats: Mapping[str, Format], label: bool = False, pad_to_multiple_of: int = 1, kept: bool = False
) -> HostTree:
    """A tree of nothing but padding: one position (or `pad_to_multiple_of`), no sample, no row, no term.

    Every array and every column is there, so that a model and a loss run on it as on any tree: attention gives 0 at
    padding, the log-probs and the terms have 0 rows, and all gradients are 0. It has the bytes of the tree that
    `treepack.pack(..., ranks=k)` gives a rank for which there is no sample.

    Args:
        formats: columns as `formats_of` gives them.
        label: with `shift_labels` (-100), as under `branching="label"`.
        pad_to_multiple_of: number of positions.
        kept: with kept sets.

    >>> tree = dummy_tree({"terms.advantage": (np.dtype(np.float32), ())})
    >>> tree.num_tokens, tree.subtree_end, tree.terms["advantage"].shape
    (1, array([0], dtype=int32), (0,))
    """
    n = pad_to_multiple_of
    if n < 1:
        raise PackError(f"pad_to_multiple_of is {n}; allowed is 1 or more")
    absent = [*([] if label else [LABELS]), *([] if kept else KEPT)]
    sizes = {"N": n, "S+1": 1, "n+1": 1}  # all others are 0
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, number, length, _ in _core.ARRAYS:
        if name not in absent:
            arrays[name] = np.full(sizes.get(length, 0), _PADDING.get(name, 0), number)
    arrays["subtree_end"][:] = np.arange(n)  # sees and is seen by nothing
    for name, (dtype, tail) in formats.items():
        arrays[name] = np.zeros((n if name.startswith("positions.") else 0, *tail), dtype)
    return tree_from_arrays(arrays, formats, {})
