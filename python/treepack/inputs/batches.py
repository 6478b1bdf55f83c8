"""Padded and flat batches -> flat columns and where the samples lie in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import PackError, Where, shown
from .columns import (
    BOTH,
    COUNTS,
    GROUP,
    IDENTITY,
    IDS,
    KEPT,
    KNOWN_PER_SAMPLE,
    KNOWN_PER_TOKEN,
    MASK,
    REAL,
    Flat,
    Inputs,
    check_name,
    group_codes,
)
from .convert import Array, to_attention_mask, to_identity, to_ids, to_int32, to_kept_ids, to_mask, to_numpy, to_scalars

Convert = Callable[[Any, Where], Array]
Offsets = npt.NDArray[np.int64]


def read_padded(batch: dict[str, Any]) -> Inputs:
    """A padded batch is the flat batch of what its attention mask marks. Columns are borrowed as they are, and their
    padding is never read; where a row has a hole between its tokens, they are copied without it."""
    ids = _ids(batch)
    if ids.ndim != 2:
        single = "a single sample goes in as a list of one, [sample]; " if ids.ndim == 1 else ""
        raise PackError(
            f"input_ids has shape {ids.shape}; {single}a padded batch is (B, S), a flat one comes with cu_seqlens"
        )
    if REAL not in batch:
        raise PackError(
            "a padded batch needs an attention_mask (B, S), of ones where nothing is padding: lengths, never ids, say "
            "what is padding"
        )
    if len(ids) and not ids.size:  # of rows without width there may be more than there is memory for
        raise PackError(f"input_ids has shape {ids.shape}; a sample needs at least one token", sample=0)
    tokens = _Padded(to_numpy(batch.pop(REAL), Where(REAL)), ids.shape)
    empty = np.flatnonzero(np.diff(tokens.offsets) == 0)
    if empty.size:
        raise PackError(
            "its row of attention_mask is all padding; a sample needs at least one token",
            sample=int(empty[0]),
            remedy="leave such rows out",
        )
    columns: dict[str, Any] = {IDS: ids}
    per_token, per_sample = set(), set()
    for name, value in batch.items():
        check_name(name, Where("the batch"))
        if name in (KEPT, GROUP):
            columns[name] = value
            continue
        columns[name] = array = to_numpy(value, Where(name))
        only_per_token = name in (MASK, COUNTS)
        if array.shape == ids.shape or (array.shape[:2] == ids.shape and not only_per_token):
            if name == COUNTS and (array[~tokens.real] != 0).any():
                row = int(np.argwhere((array != 0) & ~tokens.real)[0, 0])
                raise Where(COUNTS, row).error("is not 0 at padding")
            per_token.add(name)
        elif array.shape == ids.shape[:1] and not only_per_token:
            per_sample.add(name)
        else:
            raise PackError(_wrong_shape(name, array.shape, ids.shape, only_per_token))
    return _read(columns, tokens, frozenset(per_token), frozenset(per_sample))


def _ids(batch: dict[str, Any]) -> Array:
    return to_numpy(batch.pop(IDS), Where(IDS), "integers", "tokenize it first")


def _wrong_shape(name: str, shape: tuple[int, ...], ids: tuple[int, ...], only_per_token: bool) -> str:
    size, width = ids
    wanted = f"{ids}" if only_per_token else f"({size}, {width}, ...) per token or ({size},) per sample"
    hint = ""
    if shape == (size, 1):
        hint = f"; one value per sample is ({size},): take [:, 0]"
    elif shape[:1] == (size,) and len(shape) > 1 and shape[1] != width:
        hint = "; columns per token are as wide as input_ids, with 0 (say) at the prompt and at padding"
    return f"{shown(name)} has shape {shape}; a column of this batch has {wanted}{hint}"


def read_flat(batch: dict[str, Any], per_token: frozenset[str], per_sample: frozenset[str]) -> Inputs:
    ids = _ids(batch)
    if ids.ndim != 1:
        raise PackError(f"input_ids has shape {ids.shape}; beside cu_seqlens it is flat, (R,)")
    offsets = _offsets(batch.pop("cu_seqlens"), len(ids))
    return _read(batch | {IDS: ids}, _Tokens(offsets), per_token, per_sample)


class _Tokens:
    """The tokens of a flat batch: those of sample i are `offsets[i] : offsets[i + 1]`."""

    def __init__(self, offsets: Offsets):
        self.offsets = offsets

    def column(self, value: Any, name: str, convert: Convert) -> Flat:
        """A per-token column as it is, by a `convert` that looks at no values."""
        return self.packed(value, name, convert)

    def packed(self, value: Any, name: str, convert: Convert) -> Flat:
        """A per-token column without padding."""
        array = _rows(to_numpy(value, Where(name)), name, int(self.offsets[-1]), "tokens")
        try:
            return self.flat(convert(array, Where(name)))
        except PackError:
            # Again sample by sample, since the message has to name one.
            for sample, (start, end) in enumerate(pairwise(self.offsets.tolist() if array.ndim == 1 else [])):
                convert(array[start:end], Where(name, sample))
            raise

    def flat(self, values: Array) -> Flat:
        """One value per token, end to end."""
        return Flat(values, self.offsets[:-1], self.offsets[1:])

    def mask(self, value: Any) -> Flat:
        """The completion mask, a byte per token."""
        array = to_numpy(value, Where(MASK))
        if array.dtype in (np.uint8, np.bool_):
            flat = self.column(array, MASK, to_mask)
        elif (found := self._mask_bytes(array)) is not None:
            flat = self.flat(found)
        else:
            flat = self.packed(array, MASK, to_mask)  # says what is wrong
        if flat.values.ndim != 1:
            raise PackError(f"{MASK} has shape {flat.values.shape}; one value per token is needed")
        return flat

    def _mask_bytes(self, array: Array) -> Array | None:
        """A mask of integers as bytes, without padding; None if it holds something else."""
        if array.dtype.kind not in "iu":
            return None
        flat = self.column(array, MASK, to_numpy)
        return _core.mask_bytes(*flat) if flat.values.ndim == 1 else None


class _Padded(_Tokens):
    """The tokens of a padded batch: what its attention mask marks. `spans`: (starts, ends), where those of each row lie
    in the flattened batch; None where a row has holes."""

    def __init__(self, mask: Array, shape: tuple[int, ...]):
        self.shape = shape
        self.attention_mask = mask
        spans = _core.token_spans(mask) if mask.dtype.kind in "biu" and mask.shape == shape else None
        if spans is None and self.real.shape != shape:
            raise PackError(f"attention_mask has shape {mask.shape}; input_ids has shape {shape}")
        self.spans = spans
        lengths = self.real.sum(1, dtype=np.int64) if spans is None else spans[1] - spans[0]
        super().__init__(np.concatenate([[0], np.cumsum(lengths)]))

    @cached_property
    def real(self) -> npt.NDArray[np.bool_]:
        """(B, S); made only where something has to be copied."""
        return to_attention_mask(self.attention_mask, Where(REAL))

    def column(self, value: Any, name: str, convert: Convert) -> Flat:
        if self.spans is None:
            return self.packed(value, name, convert)
        flat = value.reshape(prod(self.shape), *value.shape[2:])
        return Flat(convert(flat, Where(name)), *self.spans)

    def packed(self, value: Any, name: str, convert: Convert) -> Flat:
        return super().packed(value[self.real], name, convert)


def _read(batch: dict[str, Any], tokens: _Tokens, per_token: frozenset[str], per_sample: frozenset[str]) -> Inputs:
    offsets = tokens.offsets
    count = len(offsets) - 1
    ids = batch.pop(IDS)
    out = Inputs(ids=(tokens.packed if ids.dtype == np.uint64 else tokens.column)(ids, IDS, to_ids))
    if MASK in batch:
        out.mask = tokens.mask(batch.pop(MASK))
    if (KEPT in batch) != (COUNTS in batch):
        has, lacks = (KEPT, COUNTS) if KEPT in batch else (COUNTS, KEPT)
        raise PackError(f"the batch has {has} and no {lacks}; {BOTH}")
    if KEPT in batch:
        counts = tokens.packed(batch.pop(COUNTS), COUNTS, to_int32)
        out.kept = (_kept_ids(batch.pop(KEPT), counts.values, offsets), counts)
    if GROUP in batch:
        out.add_scalars(GROUP, _rows(group_codes(batch.pop(GROUP)), GROUP, count, "samples"))
    for name in batch:
        check_name(name, Where("the batch"))
    for name, value in sorted(batch.items()):
        if name == IDENTITY and name in per_sample:
            # One for all tokens of a sample, as in a list of dicts.
            scalars = to_identity(_rows(to_scalars(value, name), name, count, "samples"), Where(name))
            out.add_tokens(name, tokens.flat(np.repeat(scalars, np.diff(offsets))), (scalars.dtype, ()))
        elif name in per_token or (name in KNOWN_PER_TOKEN and name not in per_sample):
            flat = tokens.column(value, name, to_identity if name == IDENTITY else to_numpy)
            out.add_tokens(name, flat, (flat.values.dtype, flat.values.shape[1:]))
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
        raise PackError(f"{shown(name)} has {has}; the batch has {count} {what}")
    return array


def _offsets(value: Any, tokens: int) -> Offsets:
    offsets = to_ids(value, Where("cu_seqlens"))
    if len(offsets) == 0 or offsets[0] != 0:
        first = offsets[0] if len(offsets) else "missing"
        raise PackError(f"cu_seqlens[0] is {first}; offsets start at 0")
    backwards = np.flatnonzero(np.diff(offsets) < 0)
    if backwards.size:
        at = int(backwards[0])
        text = f"cu_seqlens runs backwards from {offsets[at]} to {offsets[at + 1]}; offsets never fall"
        raise PackError(text, sample=at)
    if offsets[-1] != tokens:
        raise PackError(f"cu_seqlens ends at {offsets[-1]}; input_ids has {tokens} tokens")
    return offsets


def _kept_ids(value: Any, counts: npt.NDArray[np.int32], offsets: Offsets) -> Flat:
    """The kept ids of all samples, end to end."""
    array = to_numpy(value, Where(KEPT))
    if array.ndim != 1:
        raise PackError(f"{KEPT} has shape {array.shape}; in a batch it is flat, the sets of all tokens end to end")
    cuts = _kept_offsets(counts, len(array), offsets)
    try:
        ids = to_kept_ids(array, counts, Where(KEPT))
    except PackError:
        # Again sample by sample, since the message has to name one.
        for sample in range(len(cuts) - 1):
            tokens = counts[offsets[sample] : offsets[sample + 1]]
            to_kept_ids(array[cuts[sample] : cuts[sample + 1]], tokens, Where(KEPT, sample))
        raise
    return Flat(ids, cuts[:-1], cuts[1:])


def _kept_offsets(counts: npt.NDArray[np.int32], ids: int, offsets: Offsets) -> Offsets:
    """Offsets of the samples in the flat kept ids."""
    negative = np.flatnonzero(counts < 0)
    if negative.size:
        at = int(negative[0])
        sample = int(np.searchsorted(offsets, at, side="right")) - 1
        token = at - int(offsets[sample])
        raise Where(COUNTS, sample).error(f"is {counts[at]}; a count is 0 or more", token)
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if ends[-1] != ids:
        raise PackError(f"sampling_mask has {ids} ids; sampling_mask_counts adds up to {ends[-1]} over all samples")
    return np.ascontiguousarray(ends[offsets])
