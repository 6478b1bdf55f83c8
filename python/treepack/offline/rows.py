"""Trees -> rows of an Arrow table -> the same trees, array by array and byte by byte.

Costs one copy of the arrays each way. A row can be read without treepack: every array is a list column of its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import PackError
from ..inputs.columns import Format
from ..tree.layout import ARRAYS, tree_from_arrays
from ..tree.tree import HostTree
from .arrow import pa
from .schema import COUNTS, DISAGREEMENTS, FIRST_SAMPLE, OPTIONAL, Formats, formats_in

Array = npt.NDArray[Any]


def table_of(trees: Sequence[HostTree], first_samples: Sequence[int | None], schema: Any) -> Any:
    """One row per tree, in columns of `schema` (`schema.arrow_schema`).

    Args:
        trees: trees on the host, with the columns that the schema names.
        first_samples: of each tree the number of sample 0 of its call among all samples; None where that says nothing.

    Raises PackError where a column has another dtype or row shape than the schema has.
    """
    wanted = formats_in(schema, "the schema")
    columns: dict[str, Any] = {FIRST_SAMPLE: pa.array(first_samples, pa.int64())}
    sizes = zip(*(_sizes(tree) for tree in trees), strict=True) if trees else [()] * len(COUNTS)
    columns |= {name: pa.array(values, pa.int32()) for name, values in zip(COUNTS, sizes, strict=True)}
    for name in ARRAYS:
        arrays = [tree.arrays.get(name) for tree in trees]
        columns[name] = _lists(arrays, (ARRAYS[name], ()), schema.field(name).type)
    for name, row in wanted.items():
        arrays = [_gathered(tree, name, row) for tree in trees]
        columns[name] = _lists(arrays, row, schema.field(name).type)
    columns[DISAGREEMENTS] = pa.array([_disagreements(tree) for tree in trees], schema.field(DISAGREEMENTS).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def trees_of(table: Any) -> list[HostTree]:
    """The trees of a table that `table_of` or `pack_batch` made, whatever it went through in between: Parquet, a
    Hugging Face data set (`.with_format("arrow")`), a Ray data set (`batch_format="pyarrow"`).

    Raises PackError where columns are missing or of other types.
    """
    formats = formats_in(table.schema, "the table")
    return [tree for batch in table.to_batches() for tree in _batch_trees(batch, formats)]


# --- trees to rows --------------------------------------------------------------------------------------------------


def _sizes(tree: HostTree) -> tuple[int, int, int]:
    return tree.num_tokens, len(tree.sample_index), len(tree.term_row)


def _gathered(tree: HostTree, name: str, wanted: Format) -> Array | None:
    """A gathered column in the dtype of the table; None where the samples of this tree disagree on it."""
    if name not in tree.arrays:
        if name.startswith("positions.") and name.split(".", 1)[1] in tree.disagreements:
            return None
        raise PackError(f"column {name!r} is missing in {tree!r}; every sample needs the same columns")
    array: Array = tree.arrays[name]
    dtype, tail = wanted
    if array.shape[1:] != tail:
        column = name.split(".", 1)[1]
        raise PackError(f"column {column!r} has rows of shape {array.shape[1:]} here, and {tail} before")
    if array.dtype == dtype:
        return array
    out = array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else None
    if out is None or (dtype.kind in "iub" and not np.array_equal(out, array)):
        column = name.split(".", 1)[1]
        raise PackError(
            f"column {column!r} holds {array.dtype} here, and {dtype} before: give every row the same type "
            "(say 1.0 instead of 1)"
        )
    return out


def _lists(arrays: Sequence[Array | None], row: Format, kind: Any) -> Any:
    dtype, tail = row
    present = [array for array in arrays if array is not None]
    flat = np.concatenate([array.reshape(-1) for array in present]) if present else np.zeros(0, dtype)
    lengths = [0 if array is None else len(array) for array in arrays]
    values, inner = pa.array(flat), kind.value_type
    for level in range(len(tail)):
        step = inner
        for _ in range(len(tail) - 1 - level):
            step = step.value_type
        values = pa.FixedSizeListArray.from_arrays(values, type=step)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    absent = np.array([array is None for array in arrays], np.bool_)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=pa.array(absent) if absent.any() else None)


def _disagreements(tree: HostTree) -> list[dict[str, Any]]:
    return [
        {"column": name, "sample": a, "other_sample": b, "token": token}
        for name, (a, b, token) in tree.disagreements.items()
    ]


# --- rows to trees --------------------------------------------------------------------------------------------------


def _batch_trees(batch: Any, formats: Formats) -> list[HostTree]:
    """The trees of one record batch."""
    order = [name for name in ARRAYS if name in batch.schema.names] + list(formats)
    rows = {name: (ARRAYS[name], ()) if name in ARRAYS else formats[name] for name in order}
    columns = {name: Lists(batch.column(name), row) for name, row in rows.items()}
    noted = batch.column(DISAGREEMENTS).to_pylist() if DISAGREEMENTS in batch.schema.names else [None] * len(batch)
    out = []
    for at in range(batch.num_rows):
        arrays = {name: column[at] for name, column in columns.items()}
        found = {x["column"]: (x["sample"], x["other_sample"], x["token"]) for x in noted[at] or ()}
        for name, array in arrays.items():
            if array is None and name not in OPTIONAL and name.removeprefix("positions.") not in found:
                raise PackError(f"row {at}: column {name!r} is null; a packed tree needs it")
        kept = {name: array for name, array in arrays.items() if array is not None}
        out.append(tree_from_arrays(kept, formats, found))
    return out


class Lists(Sequence["Array | None"]):
    """A list column of one chunk as NumPy rows, without a copy where Arrow holds the numbers as NumPy does."""

    def __init__(self, column: Any, row: Format):
        dtype, tail = row
        self._tail = tail
        self._valid = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
        self._offsets = column.offsets.to_numpy()
        values = column.values
        for _ in tail:
            # `flatten` heeds the slice that a fixed-size list may be, `.values` does not.
            values = values.flatten()
        if values.null_count:
            raise PackError(f"a list of {dtype} holds nulls; the arrays of a packed tree have none")
        self._values = values.to_numpy(zero_copy_only=False)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, at: Any) -> Any:
        if self._valid is not None and not self._valid[at]:
            return None
        width = prod(self._tail)
        start, stop = int(self._offsets[at]), int(self._offsets[at + 1])
        out: Array = self._values[start * width : stop * width].reshape(stop - start, *self._tail)
        return out
