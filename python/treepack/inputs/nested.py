"""A batch of nested tensors -> the flat batch that it holds: values end to end, and where each sample begins.

    {"input_ids": nested (B, tokens), "old_log_probs": nested, "advantage": (B,)}  ->  cu_seqlens and flat columns

Jagged tensors without holes are borrowed as they are; what else torch calls nested is copied, part by part. Tensors are
known by what they have: torch is not imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import PackError, Where
from .columns import GROUP, IDS, KEPT, REAL
from .convert import Array, to_numpy

__all__ = ["flat_of_nested", "is_nested"]


def is_nested(value: Any) -> bool:
    """Whether a value is a nested tensor, of either layout."""
    return hasattr(value, "detach") and bool(getattr(value, "is_nested", False))


def flat_of_nested(batch: dict[str, Any]) -> tuple[dict[str, Any], frozenset[str], frozenset[str]]:
    """(the flat batch, its columns per token, its columns per sample) of a batch whose `input_ids` are nested.

    Raises:
        PackError: a column with other lengths than the ids; padding or offsets beside the nested tensor's own.
    """
    for name in (REAL, "cu_seqlens"):
        if name in batch:
            raise PackError(f"the batch has {name} beside a nested input_ids, which says itself where its samples lie")
    ids, offsets = _parts(batch[IDS], IDS)
    out: dict[str, Any] = {IDS: ids, "cu_seqlens": offsets}
    per_token, per_sample = set(), set()
    for name, value in batch.items():
        if name == IDS:
            continue
        if not is_nested(value):
            out[name] = value
            if name not in (GROUP, KEPT):
                per_sample.add(name)
            continue
        out[name], starts = _parts(value, name)
        if name != KEPT:  # as many as the counts say
            _check_lengths(name, np.diff(starts), np.diff(offsets))
            per_token.add(name)
    return out, frozenset(per_token), frozenset(per_sample)


def _parts(nested: Any, name: str) -> tuple[Array, Array]:
    """(values end to end, offsets) of a nested tensor."""
    if nested.ndim == 2 and hasattr(nested, "offsets") and nested.lengths() is None:
        return to_numpy(nested.values(), Where(name)), to_numpy(nested.offsets(), Where(name))
    parts = [to_numpy(part, Where(name, at)) for at, part in enumerate(nested.unbind())]
    offsets = np.cumsum([0, *map(len, parts)])
    try:
        values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    except ValueError:
        shapes = sorted({part.shape[1:] for part in parts})
        raise PackError(f"{name} is nested with rows of shapes {shapes}; one shape is needed") from None
    return values, offsets


def _check_lengths(name: str, rows: Array, tokens: Array) -> None:
    if len(rows) != len(tokens):
        raise PackError(f"{name} has {len(rows)} samples; input_ids has {len(tokens)}")
    for at in np.flatnonzero(rows != tokens)[:1].tolist():
        raise Where(name, at).error(f"has {rows[at]} rows; input_ids has {tokens[at]} tokens, so as many are needed")
