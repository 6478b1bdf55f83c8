"""Rows of token ids as trainers have them -> trees, and the place of each value in the shape of the rows.

    padded    (B, S) with an attention_mask        values of the last columns, (B, last)
    flat      (R,) or (1, R) with cu_seqlens       values in the shape of the ids
    jagged    a nested tensor, layout torch.jagged values nested with the same offsets

In flat and jagged batches, and in a padded one without its first column, entry t is the value of token t + 1. The host
does one copy of the ids, `pack`, and a look-up for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._core import token_spans
from ...errors import PackError, PackTypeError, Where
from ...inputs.convert import to_attention_mask
from ...packing import pack
from ...tree.packed import Packed
from ...tree.tree import HostTree

__all__ = ["RowBatch", "read_rows"]

Array = npt.NDArray[Any]


@dataclass
class RowBatch:
    """Rows on the host, as `pack` takes them."""

    batch: dict[str, Any]
    count: int
    """Number of rows."""
    rows: Array
    """(n,) the row of each sample: those without a token are no samples."""
    called: str
    """What a row is called in messages."""
    places: Callable[[Array, Array], Array]
    """(M,) the index of each target token in the flat input, and its sample -> where its value is among the values."""
    shape: tuple[int, ...]
    """Of the values."""
    shaped: Callable[[Tensor], Any]
    """Values (size,) in the shape of the rows."""

    def pack(self, max_tokens: int | None) -> Packed | list[HostTree]:
        """The trees of the rows; by default one, which has at most as many positions as the rows have tokens."""
        if not len(self.rows):
            return []
        try:
            return pack(self.batch, max_tokens=self.batch["input_ids"].size if max_tokens is None else max_tokens)
        except (PackError, PackTypeError) as error:
            error.rename(lambda sample: (int(self.rows[sample]), f"{self.called} {{}}"))
            raise

    def places_of(self, tree: HostTree) -> Array:
        """(M,) where the value of each term of a tree belongs."""
        return self.places(tree.term_source, tree.sample_index[tree.term_sample])

    def rows_of(self, tree: HostTree) -> Array:
        """(n,) the row of each sample of a tree."""
        rows: Array = self.rows[tree.sample_index]
        return rows


def read_rows(input_ids: Any, attention_mask: Any, cu_seqlens: Any, completion_mask: Any, last: int | None) -> RowBatch:
    """The rows of a batch in any of the three forms; PackError, ValueError or TypeError for what is none of them."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids is a {type(input_ids).__name__}; a tensor of ids is needed")
    if input_ids.is_nested or cu_seqlens is not None:
        form = "a nested input_ids" if input_ids.is_nested else "input_ids with cu_seqlens"
        if attention_mask is not None:
            raise ValueError(f"attention_mask is given beside {form}, which has no padding; leave it out")
        if last is not None:
            raise ValueError(
                f"last={last} is given beside {form}, whose values have the shape of the ids; leave it out"
            )
        if not input_ids.is_nested:
            return _flat(input_ids, cu_seqlens, completion_mask)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given beside a nested input_ids, which has offsets; leave one of them out")
        return _jagged(input_ids, completion_mask)
    return _padded(input_ids, attention_mask, completion_mask, last)


def _padded(input_ids: Tensor, attention_mask: Any, completion_mask: Any, last: int | None) -> RowBatch:
    if input_ids.ndim != 2:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; rows are (B, S) with an attention_mask, (R,) with "
            "cu_seqlens, or a nested tensor"
        )
    count, width = input_ids.shape
    most = max(width - 1, 0)
    if last is None:
        last = most
    if isinstance(last, bool) or not isinstance(last, int) or not 0 <= last <= most:
        raise ValueError(
            f"last is {last!r}; allowed is 0 to {most} for rows of {width} tokens: the first token of a row has no "
            "log-prob, since nothing precedes it"
        )
    batch = {"input_ids": _host(input_ids)}
    if completion_mask is not None:
        wanted = _beside(completion_mask, input_ids, "completion_mask")
        if last < most:
            wanted = wanted.copy()
            wanted[:, : width - last] = 0
        batch["completion_mask"] = wanted
    elif last < most:
        batch["completion_mask"] = np.zeros((count, width), np.uint8)
        batch["completion_mask"][:, width - last :] = 1
    if attention_mask is None:
        batch["attention_mask"] = np.ones((count, width), np.bool_)
    else:
        batch["attention_mask"] = _beside(attention_mask, input_ids, "attention_mask")
    rows, places = _places(batch["attention_mask"], last)
    if len(rows) < count:
        batch = {name: column[rows] for name, column in batch.items()}
    return RowBatch(batch, count, rows, "row", places, (count, last), lambda values: values.view(count, last))


def _places(attention_mask: Array, last: int) -> tuple[Array, Callable[[Array, Array], Array]]:
    """(the rows that have a token, `RowBatch.places`) of padded rows whose `last` columns have values."""
    width = attention_mask.shape[1]
    spans = token_spans(attention_mask) if attention_mask.dtype.kind in "biu" else None
    if spans is not None:
        # The tokens of a row lie side by side, so each of its values lies as far from its place in the flat input.
        starts, ends = spans
        rows = np.flatnonzero(ends > starts)
        first = np.concatenate([[0], np.cumsum((ends - starts)[rows])[:-1]]) if len(rows) else rows
        shift = starts[rows] - rows * width + rows * last - (width - last) - first
        return rows, lambda source, sample: source + shift[sample]
    try:
        real = to_attention_mask(attention_mask, Where("attention_mask"))
    except (PackError, PackTypeError) as error:
        error.rename(lambda row: (row, "row {}"))
        raise
    token = np.flatnonzero(real)  # what the packer counts: the tokens that are no padding

    def places(source: Array, sample: Array) -> Array:
        row, column = np.divmod(token[source], width)
        place: Array = row * last + (column - (width - last))
        return place

    return np.flatnonzero(real.any(1)), places


def _flat(input_ids: Tensor, cu_seqlens: Any, completion_mask: Any) -> RowBatch:
    if input_ids.ndim != 1 and (input_ids.ndim != 2 or input_ids.shape[0] != 1):
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; beside cu_seqlens it is (R,) or (1, R)")
    mask = None if completion_mask is None else _beside(completion_mask, input_ids, "completion_mask").reshape(-1)
    offsets = _host(cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.as_tensor(cu_seqlens))
    shape = tuple(input_ids.shape)
    return _of_offsets(_host(input_ids).reshape(-1), offsets, mask, shape, lambda values: values.view(shape))


def _jagged(input_ids: Tensor, completion_mask: Any) -> RowBatch:
    ids, offsets = _parts(input_ids, "input_ids")
    mask = None
    if completion_mask is not None:
        if not (isinstance(completion_mask, Tensor) and completion_mask.is_nested):
            raise ValueError("completion_mask is not nested; input_ids is, and a mask beside it has its offsets")
        values, other = _parts(completion_mask, "completion_mask")
        if other.shape != offsets.shape or not torch.equal(other, offsets):
            raise ValueError("completion_mask has other offsets than input_ids; each token has one value")
        mask = _host(values)
    shape = tuple(ids.shape)

    def nested(values: Tensor) -> Tensor:
        # The same offsets, not equal ones: torch then knows that both are of one shape.
        made: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
        return made

    return _of_offsets(_host(ids), _host(offsets), mask, shape, nested)


def _parts(nested: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(values, offsets) of a jagged tensor of one value for each token."""
    if nested.layout != torch.jagged:
        raise ValueError(f"{name} is nested with layout {nested.layout}; allowed is torch.jagged")
    part: Any = nested
    if nested.ndim != 2 or part.values().ndim != 1:
        raise ValueError(f"{name} is nested with {nested.ndim} axes; allowed are two, (B, tokens)")
    if part.lengths() is not None:
        raise ValueError(f"{name} is nested with holes (lengths beside its offsets); call .contiguous() first")
    return part.values(), part.offsets()


def _of_offsets(
    ids: Array, offsets: Array, mask: Array | None, shape: tuple[int, ...], shaped: Callable[[Tensor], Any]
) -> RowBatch:
    lengths = np.diff(offsets) if offsets.ndim == 1 and len(offsets) else np.zeros(0, np.int64)
    batch: dict[str, Any] = {"input_ids": ids, "cu_seqlens": offsets}
    if mask is not None:
        batch["completion_mask"] = mask
    rows = np.arange(len(lengths))
    if (lengths == 0).any():  # padded offsets, as attention by variable length has them
        rows = np.flatnonzero(lengths != 0)
        batch["cu_seqlens"] = np.append(offsets[:1], offsets[1:][rows])
    return RowBatch(batch, len(lengths), rows, "sample", lambda source, sample: source - 1, shape, shaped)


def _beside(value: Any, input_ids: Tensor, name: str) -> Array:
    """A mask in the shape of the ids, on the host."""
    mask = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if mask.is_nested or mask.shape != input_ids.shape:
        has = "is nested" if mask.is_nested else f"has shape {tuple(mask.shape)}"
        raise ValueError(f"{name} {has}; input_ids has shape {tuple(input_ids.shape)}")
    return _host(mask)


def _host(values: Tensor) -> Array:
    array: Array = values.detach().cpu().contiguous().numpy()
    return array
