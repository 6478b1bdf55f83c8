"""The columns of a Parquet row that holds one tree: the arrays of docs/layout.md, as lists of their own types.

    formats of the gathered columns -> an Arrow schema -> the formats again

Names and dtypes are in the schema itself, so that a table that went through another tool still says what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .._core import PackError
from ..inputs.columns import Format
from ..tree.layout import ARRAYS, KEPT, KINDS, LABELS
from .arrow import pa

#: Counts up when a row holds something else than before under the same names.
LAYOUT_VERSION = 1

#: Null where a tree has none: label branching alone has labels, and rollouts with kept sets alone have kept sets.
OPTIONAL = (LABELS, *KEPT)
#: Token ids repeat, and a dictionary finds that; other integers rise by steps, and differences are small.
IDS = ("input_ids", "shift_labels", "term_target", "sampling_mask")
FIRST_SAMPLE, DISAGREEMENTS = "first_sample", "disagreements"
COUNTS = ("num_tokens", "num_samples", "num_terms")

Formats = dict[str, Format]


def arrow_schema(formats: Mapping[str, Format], metadata: Mapping[str, str] | None = None) -> Any:
    """The schema of rows that hold trees with these gathered columns.

    Raises PackError for a dtype that Parquet has no type for.
    """
    fields = [pa.field(FIRST_SAMPLE, pa.int64())]
    fields += [pa.field(name, pa.int32()) for name in COUNTS]
    fields += [pa.field(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in ARRAYS.items()]
    fields += [pa.field(name, pa.list_(_row_type(name, row))) for name, row in formats.items()]
    pairs = [("column", pa.string()), ("sample", pa.int64()), ("other_sample", pa.int64()), ("token", pa.int64())]
    fields.append(pa.field(DISAGREEMENTS, pa.list_(pa.struct(pairs))))
    return pa.schema(fields, None if metadata is None else dict(metadata))


def formats_in(schema: Any, where: str) -> Formats:
    """The gathered columns of an Arrow schema, after a check that it holds trees.

    Raises PackError that names `where`, the first column that is missing or of another type, and what is needed.
    """
    names = set(schema.names)
    for name, dtype in ARRAYS.items():
        if name not in names:
            if name in OPTIONAL:
                continue
            raise PackError(f"{where} has no column {name!r}; a packed tree needs {needed_columns()}")
        found = list_format(schema.field(name).type)
        if found != (dtype, ()):
            raise PackError(f"{where}: column {name!r} has type {schema.field(name).type}; list<{dtype}> is needed")
    out: Formats = {}
    for field in schema:
        if field.name.startswith(KINDS):
            row = list_format(field.type)
            if row is None:
                raise PackError(f"{where}: column {field.name!r} has type {field.type}; a list of numbers is needed")
            out[field.name] = row
    return out


def needed_columns() -> str:
    return ", ".join(name for name in ARRAYS if name not in OPTIONAL)


def dictionary_columns(names: Iterable[str]) -> list[str]:
    """Parquet paths of the columns that are written with a dictionary."""
    return [f"{name}.list.element" for name in names if name in IDS]


def delta_columns() -> dict[str, str]:
    """Parquet encodings of the columns whose neighbouring values are close."""
    return {f"{name}.list.element": "DELTA_BINARY_PACKED" for name in ARRAYS if name not in IDS}


def _row_type(name: str, row: Format) -> Any:
    dtype, tail = row
    try:
        out = pa.from_numpy_dtype(dtype)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        out = None
    if out is None or dtype.kind not in "biuf" or 0 in tail:
        shape = f"{dtype} rows of shape {tail}" if tail else str(dtype)
        raise PackError(
            f"column {name.split('.', 1)[1]!r} holds {shape}; Parquet holds booleans, integers and floats of up to "
            "64 bits: convert it before packing"
        )
    for size in reversed(tail):
        out = pa.list_(out, size)
    return out


def list_format(kind: Any) -> Format | None:
    """(dtype, row shape) of a list column; None for what is no list of numbers."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    kind, tail = kind.value_type, []
    while pa.types.is_fixed_size_list(kind):
        tail.append(kind.list_size)
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    return np.dtype(kind.to_pandas_dtype()), tuple(tail)
