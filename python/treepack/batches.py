"""Padded and flat batches -> flat columns with the offsets of the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._core import PackError
from .arrays import Array, to_attention_mask, to_identity, to_ids, to_int32, to_kept_ids, to_mask, to_numpy, to_scalars
from .columns import (
    COUNTS,
    GROUP,
    IDENTITY,
    IDS,
    KEPT,
    KNOWN_PER_SAMPLE,
    KNOWN_PER_TOKEN,
    MASK,
    REAL,
    Inputs,
    check_name,
    group_codes,
)


def read_padded(batch: dict[str, Any]) -> Inputs:
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
        check_name(name)
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
    return read_flat(flat, frozenset(per_token), frozenset(per_sample))


def read_flat(batch: dict[str, Any], per_token: frozenset[str], per_sample: frozenset[str]) -> Inputs:
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
        out.add_scalars(GROUP, _rows(group_codes(batch.pop(GROUP)), GROUP, count, "samples"))
    for name in batch:
        check_name(name)
    for name, value in sorted(batch.items()):
        if name in per_token or (name in KNOWN_PER_TOKEN and name not in per_sample):
            convert = to_identity if name == IDENTITY else to_numpy
            array = _rows(convert(value, name), name, len(ids), "tokens")
            out.add_tokens(name, array, (array.dtype, array.shape[1:]))
        elif name in per_sample or name in KNOWN_PER_SAMPLE:
            out.add_scalars(name, _rows(to_scalars(value, name), name, count, "samples"))
        else:
            raise PackError(
                f"column {name!r} of a flat batch: say whether it is per token (per_token=[{name!r}]) or per sample"
            )
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
        raise PackError(
            f"sample {at}: cu_seqlens runs backwards from {offsets[at]} to {offsets[at + 1]}; offsets never fall"
        )
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
