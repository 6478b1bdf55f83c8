"""Log-probs that are no numbers where a loss reads them: NaN or infinite at a trained token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import PackError
from .columns import IDS, MASK
from .convert import Array

LOG_PROBS = ("old_log_probs", "ref_log_probs")


def targets(sample: Mapping[str, Any]) -> Array:
    """(L,) bool: the trained tokens of a sample that have a predecessor, each of them a loss term."""
    size = np.size(sample.get(IDS, ()))
    out: Array = np.ones(size, np.bool_) if sample.get(MASK) is None else np.asarray(sample[MASK]) != 0
    return out & (np.arange(len(out)) > 0)


def bad_log_probs(sample: Mapping[str, Any]) -> Iterator[tuple[str, Array, Array]]:
    """Name, tokens and values of each column of log-probs that is NaN or infinite at trained tokens."""
    for name in LOG_PROBS:
        try:
            values = np.asarray(sample.get(name, 0))
        except ValueError:  # ragged: `pack` says so
            continue
        if values.dtype.kind != "f" or np.isfinite(values).all():
            continue
        trained = targets(sample)
        if values.ndim and len(values) == len(trained):  # else `pack` says what is wrong
            finite = np.isfinite(values).reshape(len(values), -1).all(1)
            tokens = np.flatnonzero(trained & ~finite)
            if len(tokens):
                yield name, tokens, values[tokens]


class NonFiniteError(PackError):
    """A log-prob that is no number at a trained token."""


def check_log_probs(sample: Mapping[str, Any], number: int, called: str = "sample {}") -> None:
    """NonFiniteError for a sample with such log-probs, whose number is said as `called`."""
    for name, tokens, values in bad_log_probs(sample):
        many = f" and at {len(tokens) - 1} more" if len(tokens) > 1 else ""
        raise NonFiniteError(
            (name, f" is {values[0]} at a trained token{many}, and so would the loss be; allowed are finite numbers"),
            sample=number,
            token=int(tokens[0]),
            called=called,
            remedy="leave such samples out, train other tokens, or keep them with non_finite_log_probs='keep'",
        )
