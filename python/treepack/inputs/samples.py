"""Samples of a user -> the columns that cross the border to Rust. Arrays that are ready are borrowed as they are; only
others are converted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import _core
from ..errors import PackError, Where
from . import column_checks
from .aliases import disguised_mask, half_of_pair, no_ids
from .batches import read_flat, read_padded
from .columns import BOTH, COUNTS, GROUP, IDENTITY, IDS, KEPT, MASK, REAL, Format, Inputs, check_name, group_codes
from .convert import (
    Array,
    is_array,
    to_attention_mask,
    to_identity,
    to_ids,
    to_int32,
    to_kept_ids,
    to_mask,
    to_numpy,
    to_scalars,
)
from .nested import flat_of_nested, is_nested
from .tables import rows_of

Convert = Callable[[Any, Where], Array]


def read(samples: Any, per_token: Collection[str], per_sample: Collection[str]) -> Inputs:
    """Columns of a list of dicts, a table, a padded batch or a flat batch; `Inputs` are ready."""
    if isinstance(samples, Inputs):
        return samples
    per_token, per_sample = _column_names("per_token", per_token), _column_names("per_sample", per_sample)
    table = rows_of(samples)
    if table is not None:
        samples = table
    if isinstance(samples, Mapping):
        batch = dict(samples)
        _check_names(batch, per_token, per_sample)
        if is_nested(batch.get(IDS)):
            batch, per_token, per_sample = flat_of_nested(batch)  # which knows them by their form
        _check_needed(
            batch,
            Where("the batch"),
            lambda name: _begins_like(batch[name], batch[IDS]),
            lambda name: _begins_like(batch[name], batch[IDS]) or _first_has_rows(batch[name]),
        )
        if "cu_seqlens" in batch:
            return read_flat(batch, frozenset(per_token), frozenset(per_sample))
        return read_padded(batch)
    if isinstance(samples, str | bytes) or not isinstance(samples, Iterable):
        raise TypeError(f"samples is a {type(samples).__name__}; a list of dicts or a batch (a dict) is needed")
    rows = samples if isinstance(samples, list) else list(samples)
    if not all(type(row) is dict for row in rows):
        rows = [dict(row) if isinstance(row, Mapping) else row for row in rows]
    return _read_list(_core.columns(rows, [KEPT, COUNTS]), len(rows))


def _column_names(option: str, names: Any) -> tuple[str, ...]:
    """What a call says of columns: a list of names."""
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise TypeError(f"{option} is {names!r}; a list of names of columns is needed")
    present: tuple[str, ...] = tuple(names)
    for name in present:
        if not isinstance(name, str):
            raise TypeError(f"{option} holds {name!r}; names are strings")
    return present


def _check_names(batch: Mapping[str, Any], per_token: Sequence[str], per_sample: Sequence[str]) -> None:
    for name in (*per_token, *per_sample):
        if name in per_token and name in per_sample:
            raise PackError(f"per_token and per_sample both name {name!r}; a column is one of the two")
        if name not in batch:
            raise PackError(f"per_token or per_sample names {name!r}; the batch has {sorted(map(str, batch))}")


def _check_needed(
    columns: Mapping[str, Any], where: Where, per_token: Callable[[str], bool], has_rows: Callable[[str], bool]
) -> None:
    """PackError without ids; and without a mask where one of the columns per token is one but for its name, or where
    one with rows is half of a pair."""
    if IDS not in columns:
        raise where.error(f"has {no_ids(columns)}")
    if MASK not in columns:
        for refused in (disguised_mask(columns, per_token), half_of_pair(columns, has_rows)):
            if refused is not None:
                raise where.error(f"has {refused}")


def _begins_like(value: Any, ids: Any) -> bool:
    """Whether a column of a batch has the axes of its ids first."""
    try:
        shape = tuple(np.shape(ids))
        return tuple(np.shape(value)[: len(shape)]) == shape
    except (ValueError, RuntimeError):  # ragged lists and nested tensors, which are refused by name
        return False


def _first_has_rows(value: Any) -> bool:
    """Whether a column of a batch has an array for each sample."""
    try:
        return len(value) > 0 and is_array(value[0])
    except (TypeError, KeyError, IndexError):  # no sequence
        return False


# --- a list of dicts ------------------------------------------------------------------------------------------------


def _read_list(columns: dict[str, list[Any]], count: int) -> Inputs:
    if count == 0:
        return Inputs(ids=[])
    per_token = {name: is_array(values[0]) for name, values in columns.items()}.__getitem__
    _check_needed(columns, Where("it", 0), per_token, per_token)
    if REAL in columns:
        _drop_padding(columns, columns.pop(REAL))
    out = Inputs(ids=_lists(columns.pop(IDS), IDS, np.dtype(np.int64), to_ids))
    tokens = list(map(len, out.ids))
    if MASK in columns:
        masks = columns.pop(MASK)
        boolean = isinstance(masks[0], np.ndarray) and masks[0].dtype == np.bool_
        out.mask = _lists(masks, MASK, np.dtype(np.bool_ if boolean else np.uint8), _mask_as(boolean))
        _check_rows(out.mask, MASK, tokens)
    if KEPT in columns or COUNTS in columns:
        nothing = [None] * count
        out.kept = _kept_lists(columns.pop(KEPT, nothing), columns.pop(COUNTS, nothing), tokens)
    if GROUP in columns:
        out.add_scalars(GROUP, group_codes(columns.pop(GROUP)))
    for name in columns:
        check_name(name, Where("it", 0))
    # By name, so that the buffer does not depend on the order of a dict.
    for name, values in sorted(columns.items()):
        if name == IDENTITY and not is_array(values[0]):
            values[:] = [np.full(n, value) for n, value in zip(tokens, to_scalars(values, name), strict=True)]
        if is_array(values[0]):
            out.add_tokens(name, *_token_lists(values, name))
            _check_rows(values, name, tokens, out.ids)
        else:
            out.add_scalars(name, to_scalars(values, name))
    return out


def _drop_padding(columns: dict[str, list[Any]], masks: list[Any]) -> None:
    """Cut what an attention mask marks as padding out of every per-token column, in place."""
    for i, mask in enumerate(masks):
        where = Where(REAL, i)
        real = to_attention_mask(mask, where)
        ids = columns.get(IDS, masks)[i]
        if real.ndim != 1 or not is_array(ids) or len(real) != len(ids):
            tokens = len(ids) if is_array(ids) else "no"
            raise where.error(f"has shape {real.shape}; input_ids has {tokens} tokens, so one value for each is needed")
        if real.all():
            continue
        for name, values in columns.items():
            if name == KEPT or not is_array(values[i]):
                continue
            array = to_numpy(values[i], Where(name, i))
            if array.shape[:1] != real.shape:
                raise Where(name, i).error(f"has {len(array)} rows; {REAL} has {len(real)}")
            if name == COUNTS and (array[~real] != 0).any():
                raise Where(name, i).error("is not 0 at padding")
            values[i] = array[real]


def _lists(values: list[Any], name: str, dtype: np.dtype[Any], convert: Convert) -> list[Any]:
    """Make every value of a one-axis column ready, in place."""
    at = _core.first_unready(values, dtype, [], 0)
    while at < len(values):
        where = Where(name, at)
        array = convert(values[at], where)
        if array.ndim != 1:
            raise where.error(f"has shape {array.shape}; one axis is needed")
        values[at] = array
        at = _core.first_unready(values, dtype, [], at + 1)
    return values


def _check_rows(values: list[Any], name: str, tokens: list[int], ids: Sequence[Array] = ()) -> None:
    """PackError where a per-token column has not one row for each token; with `ids` it says what the values look like
    instead: lengths or offsets of packed rows."""
    rows = list(map(len, values))
    if rows == tokens:
        return
    i, has, wanted = next((i, *pair) for i, pair in enumerate(zip(rows, tokens, strict=True)) if pair[0] != pair[1])
    hint = "; every token has one, those of the prompt too (0, say)" if has < wanted else ""
    if has == 1 and name not in (MASK, COUNTS):
        hint = "; a value for the whole sample is a number, not a list of one"
    if ids and (packed := column_checks.packed_rows(name, values[i], ids[i])) is not None:
        hint = f"; {packed}"
    shown = "1 row" if has == 1 else f"{has} rows"
    raise Where(name, i).error(f"has {shown}; input_ids has {wanted} tokens, so {wanted} are needed{hint}")


def _kept_lists(kept: list[Any], counts: list[Any], tokens: list[int]) -> tuple[list[Any], list[Any]]:
    """Kept sets: ids and counts, both or neither of them in a sample."""
    int32 = np.dtype(np.int32)
    for i, (has_ids, has_counts) in enumerate(zip(kept, counts, strict=True)):
        if has_ids is None and has_counts is None:
            kept[i], counts[i] = np.zeros(0, np.int32), np.zeros(tokens[i], np.int32)
        elif has_ids is None or has_counts is None:
            has, lacks = (COUNTS, KEPT) if has_ids is None else (KEPT, COUNTS)
            raise PackError(f"it has {has} and no {lacks}; {BOTH}", sample=i)
    _lists(counts, COUNTS, int32, to_int32)
    _check_rows(counts, COUNTS, tokens)
    at = _core.first_unready(kept, int32, [], 0)
    while at < len(kept):
        kept[at] = to_kept_ids(kept[at], counts[at], Where(KEPT, at))
        at = _core.first_unready(kept, int32, [], at + 1)
    return kept, counts


def _mask_as(boolean: bool) -> Convert:
    dtype = np.bool_ if boolean else np.uint8
    return lambda value, where: to_mask(value, where).astype(dtype, copy=False)


def _token_lists(values: list[Any], name: str) -> tuple[list[Any], Format]:
    """Make a further per-token column ready: one dtype (the common one), one row shape (that of sample 0)."""
    convert = to_identity if name == IDENTITY else to_numpy
    first = convert(values[0], Where(name, 0))
    dtype, tail = first.dtype, first.shape[1:]
    if _core.first_unready(values, dtype, list(tail), 0) == len(values):
        return values, (dtype, tail)
    for i, value in enumerate(values):
        where = Where(name, i)
        if not is_array(value):
            raise where.error(f"is {value!r}", against=(0, "has an array there, so one row per token is needed"))
        array = values[i] = convert(value, where)
        if array.size == 0 and array.ndim == 1:
            array = values[i] = array.reshape(0, *tail)
        if array.shape[1:] != tail:
            raise where.error(f"has rows of shape {array.shape[1:]}", against=(0, f"has rows of shape {tail}"))
    dtype = _common_dtype(values, name)
    for i, array in enumerate(values):
        values[i] = np.ascontiguousarray(array, dtype)
    return values, (dtype, tail)


def _common_dtype(arrays: list[Array], name: str) -> np.dtype[Any]:
    """The dtype that holds all values exactly; empty arrays say nothing."""
    dtypes = {i: array.dtype for i, array in enumerate(arrays) if array.size} or {0: arrays[0].dtype}
    dtype: np.dtype[Any] = np.result_type(*set(dtypes.values()))
    if dtype.kind not in "iub" and all(one.kind in "iub" for one in dtypes.values()):
        first = min(dtypes)
        i = next(i for i, one in dtypes.items() if one != dtypes[first])
        has = f"has {dtypes[first]}, and no integer dtype holds both"
        raise Where(name, i).type_error(f"has dtype {dtypes[i]}", against=(first, has))
    return dtype
