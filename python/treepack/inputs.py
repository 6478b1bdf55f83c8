"""Samples, padded and flat batches -> the columns that cross the border to Rust.

Arrays that are ready are borrowed as they are; only others are converted. A column is a list with one array per
sample, or one flat array that Rust cuts at `offsets`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._core import PackError
from .arrays import Array, is_array, to_attention_mask, to_identity, to_ids, to_int32, to_kept_ids, to_mask, to_numpy, to_scalars

# Known columns; everything else is a further column, per token or per sample.
IDS, MASK, IDENTITY = "input_ids", "completion_mask", "identity"
REAL = "attention_mask"
KEPT, COUNTS = "sampling_mask", "sampling_mask_counts"
GROUP = "group_id"
KNOWN_PER_TOKEN = frozenset([IDENTITY, "old_log_probs"])
KNOWN_PER_SAMPLE = frozenset(["advantage"])

#: dtype and shape of a row of a column
Format = tuple[np.dtype[Any], tuple[int, ...]]
Convert = Callable[[Any, str], Array]


@dataclass
class Inputs:
    """All columns of a call, ready for Rust. `formats`: row format of each gathered column, by name."""

    ids: Any
    mask: Any = None
    identity: tuple[str, int, Any] | None = None
    kept: tuple[Any, Any] | None = None
    token_columns: list[tuple[str, int, Any]] = field(default_factory=list)
    sample_columns: list[tuple[str, int, Array, bool]] = field(default_factory=list)
    offsets: npt.NDArray[np.int64] | None = None
    kept_offsets: npt.NDArray[np.int64] | None = None
    formats: dict[str, Format] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "formats"}

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


def read(samples: Any, per_token: Sequence[str], per_sample: Sequence[str]) -> Inputs:
    """Columns of a list of dicts, a padded batch or a flat batch."""
    if isinstance(samples, Mapping):
        batch = dict(samples)
        _check_names(batch, (*per_token, *per_sample))
        if IDS not in batch:
            raise PackError(f"the batch has no input_ids; it has {sorted(map(str, batch))}")
        if "cu_seqlens" in batch:
            return _read_flat(batch, frozenset(per_token), frozenset(per_sample))
        return _read_padded(batch)
    if isinstance(samples, str | bytes) or not isinstance(samples, Iterable):
        raise TypeError(f"samples is a {type(samples).__name__}; a list of dicts or a batch (a dict) is needed")
    rows = samples if isinstance(samples, list) else list(samples)
    if not all(type(row) is dict for row in rows):
        rows = [dict(row) if isinstance(row, Mapping) else row for row in rows]
    return _read_list(_core.columns(rows, [KEPT, COUNTS]), len(rows))


def _check_names(batch: Mapping[str, Any], named: Sequence[str]) -> None:
    for name in named:
        if name not in batch:
            raise PackError(f"per_token or per_sample names {name!r}; the batch has {sorted(map(str, batch))}")


# --- a list of dicts ------------------------------------------------------------------------------------------------


def _read_list(columns: dict[str, list[Any]], count: int) -> Inputs:
    if count == 0:
        return Inputs(ids=[])
    if IDS not in columns:
        raise PackError(f"sample 0: it has no input_ids; it has {sorted(map(str, columns))}")
    if REAL in columns:
        _drop_padding(columns, columns.pop(REAL))
    out = Inputs(ids=_lists(columns.pop(IDS), IDS, np.dtype(np.int64), to_ids))
    if MASK in columns:
        masks = columns.pop(MASK)
        boolean = isinstance(masks[0], np.ndarray) and masks[0].dtype == np.bool_
        out.mask = _lists(masks, MASK, np.dtype(np.bool_ if boolean else np.uint8), _mask_as(boolean))
    if KEPT in columns or COUNTS in columns:
        nothing = [None] * count
        out.kept = _kept_lists(columns.pop(KEPT, nothing), columns.pop(COUNTS, nothing), out.ids)
    if GROUP in columns:
        out.add_scalars(GROUP, _group_codes(columns.pop(GROUP)))
    for name, values in columns.items():
        _check_name(name)
        if name == IDENTITY and not is_array(values[0]):
            values[:] = [np.full(len(ids), value) for ids, value in zip(out.ids, to_scalars(values, name), strict=True)]
        if is_array(values[0]):
            out.add_tokens(name, *_token_lists(values, name))
        else:
            out.add_scalars(name, to_scalars(values, name))
    return out


def _drop_padding(columns: dict[str, list[Any]], masks: list[Any]) -> None:
    """Cut what an attention mask marks as padding out of every per-token column, in place."""
    for i, mask in enumerate(masks):
        real = to_attention_mask(mask, f"sample {i}: {REAL}")
        if real.all():
            continue
        for name, values in columns.items():
            if name == KEPT or not is_array(values[i]):
                continue
            array = to_numpy(values[i], f"sample {i}: {name}")
            if array.shape[:1] != real.shape:
                raise PackError(f"sample {i}: {name} has {len(array)} rows; {REAL} has {len(real)}")
            if name == COUNTS and (array[~real] != 0).any():
                raise PackError(f"sample {i}: sampling_mask_counts is not 0 at padding")
            values[i] = array[real]


def _lists(values: list[Any], name: str, dtype: np.dtype[Any], convert: Convert) -> list[Any]:
    """Make every value of a one-axis column ready, in place."""
    at = _core.first_unready(values, dtype, [], 0)
    while at < len(values):
        where = f"sample {at}: {name}"
        array = convert(values[at], where)
        if array.ndim != 1:
            raise PackError(f"{where} has shape {array.shape}; one axis is needed")
        values[at] = array
        at = _core.first_unready(values, dtype, [], at + 1)
    return values


def _kept_lists(kept: list[Any], counts: list[Any], ids: list[Any]) -> tuple[list[Any], list[Any]]:
    """Kept sets: ids and counts, both or neither of them in a sample."""
    int32 = np.dtype(np.int32)
    for i, (has_ids, has_counts) in enumerate(zip(kept, counts, strict=True)):
        if has_ids is None and has_counts is None:
            kept[i], counts[i] = np.zeros(0, np.int32), np.zeros(len(ids[i]), np.int32)
        elif has_ids is None or has_counts is None:
            has, lacks = (COUNTS, KEPT) if has_ids is None else (KEPT, COUNTS)
            raise PackError(f"sample {i}: it has {has} and no {lacks}; kept sets need both")
    _lists(counts, COUNTS, int32, to_int32)
    at = _core.first_unready(kept, int32, [], 0)
    while at < len(kept):
        kept[at] = to_kept_ids(kept[at], counts[at], f"sample {at}: ")
        at = _core.first_unready(kept, int32, [], at + 1)
    return kept, counts


def _mask_as(boolean: bool) -> Convert:
    dtype = np.bool_ if boolean else np.uint8
    return lambda value, where: to_mask(value, where).astype(dtype, copy=False)


def _token_lists(values: list[Any], name: str) -> tuple[list[Any], Format]:
    """Make a further per-token column ready: one dtype (the common one), one row shape (that of sample 0)."""
    convert = to_identity if name == IDENTITY else to_numpy
    first = convert(values[0], f"sample 0: {name}")
    dtype, tail = first.dtype, first.shape[1:]
    if _core.first_unready(values, dtype, list(tail), 0) == len(values):
        return values, (dtype, tail)
    for i, value in enumerate(values):
        where = f"sample {i}: {name}"
        if not is_array(value):
            raise PackError(f"{where} is {value!r}; sample 0 has an array there, so one row per token is needed")
        array = values[i] = convert(value, where)
        if array.size == 0 and array.ndim == 1:
            array = values[i] = array.reshape(0, *tail)
        if array.shape[1:] != tail:
            raise PackError(f"{where} has rows of shape {array.shape[1:]}; sample 0 has rows of shape {tail}")
    dtype = _common_dtype(values, name)
    for i, array in enumerate(values):
        values[i] = np.ascontiguousarray(array, dtype)
    return values, (dtype, tail)


def _common_dtype(arrays: list[Array], name: str) -> np.dtype[Any]:
    """The dtype that holds all values exactly; empty arrays say nothing."""
    arrays = [array for array in arrays if array.size] or arrays
    dtype: np.dtype[Any] = np.result_type(*{array.dtype for array in arrays})
    if dtype.kind not in "iub" and all(array.dtype.kind in "iub" for array in arrays):
        i, other = next((i, array.dtype) for i, array in enumerate(arrays) if array.dtype != arrays[0].dtype)
        raise TypeError(
            f"sample {i}: {name} has dtype {other}; sample 0 has {arrays[0].dtype}, and no integer dtype holds both"
        )
    return dtype


def _group_codes(groups: Iterable[Hashable]) -> Array:
    """Groups as integers: their own values where all are integers, else numbers in order of first appearance."""
    groups = list(groups)
    if not set(map(type, groups)) <= {int, str}:
        # NumPy scalars and tensors as the values that they hold.
        groups = [group.item() if hasattr(group, "item") and getattr(group, "ndim", 1) == 0 else group for group in groups]
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
            raise TypeError(f"sample {i}: group_id is a {type(group).__name__}; it must be hashable") from None
    return out


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a column is named {name!r}; names are strings")


# --- one batch ------------------------------------------------------------------------------------------------------


def _read_padded(batch: dict[str, Any]) -> Inputs:
    """A padded batch is the flat batch of what its attention mask marks."""
    ids = to_numpy(batch.pop(IDS), IDS)
    if ids.ndim != 2:
        raise PackError(f"input_ids has shape {ids.shape}; a padded batch is (B, S), a flat one comes with cu_seqlens")
    if REAL not in batch:
        raise PackError("a padded batch needs an attention_mask (B, S): lengths, never ids, say what is padding")
    real = to_attention_mask(batch.pop(REAL), REAL)
    if real.shape != ids.shape:
        raise PackError(f"attention_mask has shape {real.shape}; input_ids has shape {ids.shape}")
    flat: dict[str, Any] = {IDS: ids[real], "cu_seqlens": np.concatenate([[0], np.cumsum(real.sum(1))])}
    per_token, per_sample = set(), set()
    for name, value in batch.items():
        _check_name(name)
        if name in (KEPT, GROUP):
            flat[name] = value
            continue
        array = to_numpy(value, name)
        if array.shape[:2] == ids.shape:
            if name == COUNTS and (array[~real] != 0).any():
                row = int(np.argwhere((array != 0) & ~real)[0, 0])
                raise PackError(f"sample {row}: sampling_mask_counts is not 0 at padding")
            flat[name] = array[real]
            per_token.add(name)
        elif array.shape == ids.shape[:1]:
            flat[name] = array
            per_sample.add(name)
        else:
            wanted = f"{(*ids.shape, '...')} per token or {ids.shape[:1]} per sample"
            raise PackError(f"{name} has shape {array.shape}; a column of this batch has {wanted}")
    return _read_flat(flat, frozenset(per_token), frozenset(per_sample))


def _read_flat(batch: dict[str, Any], per_token: frozenset[str], per_sample: frozenset[str]) -> Inputs:
    ids = to_ids(batch.pop(IDS), IDS)
    offsets = _offsets(batch.pop("cu_seqlens"), len(ids))
    count = len(offsets) - 1
    out = Inputs(ids=ids, offsets=offsets)
    if MASK in batch:
        out.mask = _rows(to_mask(batch.pop(MASK), MASK), MASK, len(ids), "tokens")
        if out.mask.ndim != 1:
            raise PackError(f"{MASK} has shape {out.mask.shape}; one value per token is needed")
    if (KEPT in batch) != (COUNTS in batch):
        has, lacks = (KEPT, COUNTS) if KEPT in batch else (COUNTS, KEPT)
        raise PackError(f"the batch has {has} and no {lacks}; kept sets need both")
    if KEPT in batch:
        counts = _rows(to_int32(batch.pop(COUNTS), COUNTS), COUNTS, len(ids), "tokens")
        kept = to_kept_ids(batch.pop(KEPT), counts, "the batch: ")
        out.kept = (kept, counts)
        out.kept_offsets = _kept_offsets(counts, len(kept), offsets)
    if GROUP in batch:
        out.add_scalars(GROUP, _rows(_group_codes(batch.pop(GROUP)), GROUP, count, "samples"))
    for name, value in batch.items():
        _check_name(name)
        if name in per_token or (name in KNOWN_PER_TOKEN and name not in per_sample):
            convert = to_identity if name == IDENTITY else to_numpy
            array = _rows(convert(value, name), name, len(ids), "tokens")
            out.add_tokens(name, array, (array.dtype, array.shape[1:]))
        elif name in per_sample or name in KNOWN_PER_SAMPLE:
            out.add_scalars(name, _rows(to_scalars(value, name), name, count, "samples"))
        else:
            raise PackError(f"column {name!r} of a flat batch: say whether it is per token (per_token=[{name!r}]) or per sample")
    return out


def _rows(array: Array, name: str, count: int, what: str) -> Array:
    if array.ndim == 0 or len(array) != count:
        has = "no rows" if array.ndim == 0 else f"{len(array)} rows"
        raise PackError(f"{name} has {has}; the batch has {count} {what}")
    return array


def _offsets(value: Any, tokens: int) -> npt.NDArray[np.int64]:
    offsets = to_ids(value, "cu_seqlens")
    if len(offsets) == 0 or offsets[0] != 0:
        first = offsets[0] if len(offsets) else "missing"
        raise PackError(f"cu_seqlens[0] is {first}; offsets start at 0")
    backwards = np.flatnonzero(np.diff(offsets) < 0)
    if backwards.size:
        at = int(backwards[0])
        raise PackError(f"sample {at}: cu_seqlens runs backwards from {offsets[at]} to {offsets[at + 1]}; offsets never fall")
    if offsets[-1] != tokens:
        raise PackError(f"cu_seqlens ends at {offsets[-1]}; input_ids has {tokens} tokens")
    return offsets


def _kept_offsets(counts: npt.NDArray[np.int32], ids: int, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Offsets of the samples in the flat kept ids."""
    negative = np.flatnonzero(counts < 0)
    if negative.size:
        at = int(negative[0])
        sample = int(np.searchsorted(offsets, at, side="right")) - 1
        token = at - int(offsets[sample])
        raise PackError(f"sample {sample}: sampling_mask_counts[{token}] is {counts[at]}; a count is 0 or more")
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if ends[-1] != ids:
        raise PackError(f"sampling_mask has {ids} ids; sampling_mask_counts adds up to {ends[-1]} over all samples")
    return np.ascontiguousarray(ends[offsets])
