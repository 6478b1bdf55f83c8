"""Tables and columns of lists -> rows: a pandas DataFrame, a pyarrow Table or RecordBatch, a slice of a `datasets`
Dataset (a dict of columns with a list for each sample).

None of these packages is imported but where the object is one of theirs. Lists of numbers of Arrow become NumPy views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import PackError
from .columns import IDS, REAL
from .convert import is_array

Rows = list[dict[str, Any]]


def rows_of(samples: Any) -> Rows | None:
    """A dict for each row of a table; None for what is no table. A batch, padded or flat, is none either."""
    if isinstance(samples, Mapping):
        return _rows_of_columns(samples) if is_ragged(samples) else None
    columns = columns_of(samples)
    return None if columns is None else _rows_of_columns(columns)


def columns_of(table: Any, other: Callable[[Any], list[Any]] | None = None) -> dict[str, list[Any]] | None:
    """The columns of a pandas DataFrame or a pyarrow Table or RecordBatch, a value for each row, numbers in their own
    dtype; None for anything else. `other`: what is made of Arrow columns that are no lists of numbers.

    Raises PackError where two columns have one name.
    """
    module = type(table).__module__.partition(".")[0]
    if module == "pandas" and hasattr(table, "iloc") and hasattr(table, "columns"):
        names = list(table.columns)
        columns = [[_plain(value) for value in table.iloc[:, at].to_numpy()] for at in range(len(names))]
    elif module == "pyarrow" and hasattr(table, "column_names"):
        names = list(table.column_names)
        columns = [arrow_values(table.column(at), other=other or _numbers_or_python) for at in range(len(names))]
    else:
        return None
    for name in names:
        if names.count(name) > 1:
            raise PackError(f"the table has {names.count(name)} columns named {name!r}; rename one")
    return dict(zip(names, columns, strict=True))


def is_ragged(batch: Mapping[str, Any]) -> bool:
    """Whether a dict of columns has a list for each sample, and so is no padded batch: lists of different lengths, a
    single one that no mask says is padded, an array of lists."""
    ids: Any = batch.get(IDS)
    objects = isinstance(ids, np.ndarray) and ids.dtype == object and ids.ndim == 1
    if "cu_seqlens" in batch or not (objects or isinstance(ids, list | tuple)) or not all(map(is_array, ids)):
        return False
    return objects or len({len(one) for one in ids}) > 1 or (len(ids) == 1 and REAL not in batch)


def _rows_of_columns(columns: Mapping[str, Any]) -> Rows:
    counts = {}
    for name, values in columns.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
            raise PackError(f"column {name!r} is a {type(values).__name__}; beside lists of samples a list is needed")
        counts[name] = len(values)
    if len(set(counts.values())) > 1:
        raise PackError(f"the columns have different numbers of rows: {counts}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _plain(value: Any) -> Any:
    """Arrays of lists (what pandas makes of a ragged column) as lists."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


# --- Arrow ----------------------------------------------------------------------------------------------------------


def _numbers_or_python(array: Any) -> list[Any]:
    """NumPy scalars of numbers, which keep their dtype; else what Arrow makes of it in Python (nulls are None)."""
    if _number(array.type) and not array.null_count:
        return list(array.to_numpy(zero_copy_only=False))
    return list(array.to_pylist())


def arrow_values(column: Any, *, other: Callable[[Any], list[Any]] = _numbers_or_python) -> list[Any]:
    """One value per row of an Arrow array, plain or chunked: a NumPy view for a list of numbers, else what `other`
    makes of a piece of it."""
    pieces = column.chunks if hasattr(column, "chunks") else [column]
    return [value for piece in pieces for value in _piece(piece, other)]


def _piece(array: Any, other: Callable[[Any], list[Any]]) -> list[Any]:
    import pyarrow.types as kinds

    kind = array.type
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        flat, offsets = array.values, array.offsets.to_numpy()
    elif kinds.is_fixed_size_list(kind) and array.null_count == 0:
        flat = array.flatten()
        offsets = np.arange(len(array) + 1) * kind.list_size
    else:
        return other(array)
    tail = []
    while kinds.is_fixed_size_list(flat.type) and not flat.null_count:
        tail.append(flat.type.list_size)
        flat = flat.flatten()  # heeds the slice that a fixed-size list may be
    if flat.null_count or not _number(flat.type):
        return other(array)  # text, lists of lists, nulls within
    values = flat.to_numpy(zero_copy_only=False)
    values = values.reshape(-1, *tail) if tail else values
    valid = [True] * len(array) if array.null_count == 0 else array.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if there else None for i, there in enumerate(valid)]


def _number(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind))
