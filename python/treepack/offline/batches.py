"""A batch of samples in columns -> a table with a row per tree, for tools that map batches over a cluster.

datasets.Dataset.map(partial(pack_batch, max_tokens=16384), batched=True, batch_size=..., remove_columns=...)
ray.data.Dataset.map_batches(partial(pack_batch, max_tokens=16384), batch_size=..., batch_format="pyarrow")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .._core import PackError
from ..errors import Where, listed, shown
from ..inputs.aliases import right_name
from ..inputs.columns import IDS, MASK, check_name
from ..inputs.finite import check_log_probs
from ..inputs.tables import arrow_values
from ..packing import pack
from ..tree.layout import formats_of
from ..tree.tree import HostTree
from .arrow import pa
from .options import Options
from .pairs import Pair, pack_pairs
from .rows import table_of
from .schema import arrow_schema
from .units import as_floats, check_pair

_CHOSEN, _REJECTED = "chosen.", "rejected."


def pack_batch(
    batch: Any, *, max_tokens: int, columns: Mapping[str, str] | None = None, pairs: bool = False, **options: Any
) -> Any:
    """Pack one batch; samples share prefixes within it alone, so it should be large.

    Arguments:
        batch: a dict of columns (lists, NumPy arrays), a pyarrow Table or RecordBatch, with a row per sample.
        max_tokens, **options: as for `treepack.pack`; placement is "shared" or "first_fit".
        columns: the columns to take, by the name they have in a sample: `{"input_ids": "tokens"}`; without it all. With
            pairs two per column: `{"chosen.input_ids": "chosen", "rejected.input_ids": "rejected"}`, those without
            either word go to both.
        pairs: each row is a preference pair, whose two samples stay in one tree.

    Returns:
        A pyarrow Table, one row per tree; `trees_of(table)` are the trees. Its dtypes are those of the batch, with
        `advantage`, `old_log_probs`, `ref_log_probs` and `reward` as floats.

    Raises PackError or TypeError as `treepack.pack` does.
    """
    given = Options(max_tokens=max_tokens, pairs=pairs, **options)
    if given.placement == "stream":
        raise PackError("placement is 'stream'; a batch is packed at once: allowed is 'shared' or 'first_fit'")
    batch_columns = _columns(batch, columns)
    if columns is not None and not pairs and MASK not in batch_columns and IDS in batch_columns:
        # Columns that were asked for are meant, whatever they hold.
        batch_columns[MASK] = [np.ones(np.size(ids), np.uint8) for ids in batch_columns[IDS]]
    trees = _trees(batch_columns, given)
    # Where all are skipped, the table has no row, and the columns that it would have with more room.
    like = trees or _trees(
        batch_columns, replace(given, max_tokens=2**31, pad_to_multiple_of=None, max_terms=None, max_kept=None)
    )
    if not like:
        raise PackError("the batch has no rows; at least one sample is needed")
    return table_of(trees, [None] * len(trees), arrow_schema(formats_of(like[0])))


def _trees(columns: dict[str, list[Any]], options: Options) -> list[HostTree]:
    if options.pairs:
        pairs = _pairs(columns)
        for number, pair in enumerate(pairs if options.non_finite_log_probs == "raise" else ()):
            check_pair(pair, number)
        return [tree for one in pack_pairs(pairs, options)[0] for tree in one]
    samples = _samples(columns)
    for number, sample in enumerate(samples if options.non_finite_log_probs == "raise" else ()):
        check_log_probs(sample, number)
    return list(pack(samples, **options.pack_keywords()))


def _columns(batch: Any, columns: Mapping[str, str] | None) -> dict[str, list[Any]]:
    """The columns of a batch by the names that they have in a sample, a value for each row."""
    if isinstance(batch, pa.RecordBatch):
        batch = pa.Table.from_batches([batch])
    if not isinstance(batch, pa.Table) and not hasattr(batch, "keys"):
        raise TypeError(f"the batch is of type {type(batch).__name__}; a dict of columns or a pyarrow Table is needed")
    names = list(batch.column_names if isinstance(batch, pa.Table) else batch.keys())
    wanted = {name: name for name in names} if columns is None else dict(columns)
    for name, given in wanted.items():
        check_name(name, Where("the batch"))
        if given not in names:
            raise PackError(f"the batch has no column {given!r} to take {shown(name)} from; it has {listed(names)}")
        plain = name.removeprefix(_CHOSEN).removeprefix(_REJECTED)
        if columns is not None and (right := right_name(plain, given, names)) is not None:
            raise PackError(f"columns: {name!r} from {given!r}: a sample has no such column; did you mean {right!r}?")
        if names.count(given) > 1:
            raise PackError(f"the batch has {names.count(given)} columns named {given!r}; rename one")
    return {name: _values(batch[given], given) for name, given in wanted.items()}


def _values(column: Any, name: str) -> list[Any]:
    """A value for each row. What Arrow holds as numbers keeps its dtype."""
    if not isinstance(column, pa.ChunkedArray):
        rows = hasattr(column, "__len__") and getattr(column, "ndim", 1) > 0
        if isinstance(column, str | bytes | Mapping) or not rows:
            raise TypeError(
                f"column {name!r} of the batch is of type {type(column).__name__}; one value per row is needed"
            )
        return list(column)
    return arrow_values(column)


def _samples(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    counts = {name: len(values) for name, values in columns.items()}
    if len(set(counts.values())) > 1:
        raise PackError(f"the columns of the batch have different numbers of rows: {counts}")
    rows = zip(*columns.values(), strict=True)
    return [as_floats(dict(zip(columns, (_plain(value) for value in row), strict=True))) for row in rows]


def _plain(value: Any) -> Any:
    """NumPy arrays of lists (what some tools make of ragged columns) as lists."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


def _pairs(columns: dict[str, list[Any]]) -> list[Pair]:
    def side(prefix: str, other: str) -> list[dict[str, Any]]:
        own = {name: values for name, values in columns.items() if not name.startswith(other)}
        return _samples({name.removeprefix(prefix): values for name, values in own.items()})

    for name in (f"{_CHOSEN}input_ids", f"{_REJECTED}input_ids"):
        if name not in columns:
            raise PackError(
                f"pairs need {_CHOSEN}input_ids and {_REJECTED}input_ids; the batch has {listed(columns)}. Name "
                "them: columns={'chosen.input_ids': ..., 'rejected.input_ids': ...}"
            )
    counts = {name: len(values) for name, values in columns.items()}
    if len(set(counts.values())) > 1:
        raise PackError(f"the columns of the batch have different numbers of rows: {counts}")
    return [
        Pair(chosen, rejected)
        for chosen, rejected in zip(side(_CHOSEN, _REJECTED), side(_REJECTED, _CHOSEN), strict=True)
    ]
