"""Samples in any of the forms that `treepack.pack` takes, as a list of samples. NumPy alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..inputs.tables import rows_of

__all__ = ["as_array", "as_samples"]

Array = npt.NDArray[Any]
_TOKEN = ("input_ids", "completion_mask", "old_log_probs", "identity", "sampling_mask_counts")
_SAMPLE = ("advantage", "group_id")


def as_samples(samples: Any, per_token: Sequence[str] = (), per_sample: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A padded or flat batch or a table as the list of samples it stands for; a list of samples as it is.

    Args:
        samples: list of dicts; `input_ids` (B, S) with `attention_mask` (B, S); or `input_ids` (R,) with `cu_seqlens`.
        per_token, per_sample: the further columns of a flat batch, as for `treepack.pack`.

    >>> as_samples({"input_ids": [[0, 7, 8]], "attention_mask": [[0, 1, 1]]})
    [{'input_ids': array([7, 8])}]
    """
    if (rows := rows_of(samples)) is not None:
        return rows
    if not isinstance(samples, Mapping):
        return list(samples)
    columns = {name: value if name == "group_id" else as_array(value) for name, value in samples.items()}
    if "cu_seqlens" in columns:
        cu = columns.pop("cu_seqlens")
        pieces: list[Any] = [slice(a, b) for a, b in itertools.pairwise(cu)]
        token = {name for name in columns if name in (*_TOKEN, *per_token) and name not in per_sample}
    else:
        real = columns.pop("attention_mask").astype(bool)
        pieces = [(b, real[b]) for b in range(len(real))]
        token = {name for name, x in columns.items() if name not in _SAMPLE and x.shape[:2] == real.shape}
    kept = columns.pop("sampling_mask", None)
    out, at = [], 0
    for s, piece in enumerate(pieces):
        sample = {name: x[piece] if name in token else x[s] for name, x in columns.items()}
        if kept is not None:
            count = int(sample["sampling_mask_counts"].sum())
            sample["sampling_mask"], at = kept[at : at + count], at + count
        out.append(sample)
    return out


def as_array(value: Any) -> Array:
    """NumPy, from a tensor too, without naming torch."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
