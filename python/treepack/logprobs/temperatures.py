"""The temperature of a tree: one number, or one for each of its samples.

With one for each sample the LM head runs once for each distinct number, on the rows of the terms that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .terms import HeadTerms

__all__ = ["Temperature", "by_temperature", "check_temperature", "temperature_of"]

#: One number, or (n,) of them.
Temperature = float | npt.NDArray[np.float64]


def check_temperature(
    temperature: Any, count: int | None = None, what: str = "sample", named: Callable[[int], str] = "sample {}".format
) -> Temperature:
    """One positive number as a float, or an array of one for each sample; a float where all are equal.

    Args:
        count: number of samples, None where only one number is allowed. what: what they are called.
        named: the name of one of them, for a message.

    Raises:
        ValueError, TypeError: which sample, what it has, what is allowed.
    """
    if isinstance(temperature, list | tuple) or getattr(temperature, "ndim", 0) > 0:
        return _of_samples(temperature, count, what, named)
    if not isinstance(temperature, Real) and not hasattr(temperature, "item"):
        raise TypeError(f"temperature must be a number, not {temperature!r}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, not {temperature}")
    return float(temperature)


def temperature_of(tree: Any, temperature: Any) -> Temperature:
    """The same for a tree, whose samples are named by their numbers in the call that packed them."""
    count: int | None = getattr(tree, "num_samples", None)
    return check_temperature(temperature, count, named=lambda at: f"sample {tree.numpy().sample_index[at]}")


def _of_samples(temperature: Any, count: int | None, what: str, named: Callable[[int], str]) -> Temperature:
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().cpu().double().numpy()
    try:
        values = np.asarray(temperature, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"temperature must be numbers, not {temperature!r}") from None
    if values.shape != (count,):
        more = "" if count is None else f", or ({count},): one for each {what}"
        raise ValueError(f"temperature has shape {values.shape}; allowed is one number{more}")
    for at in np.flatnonzero(~(np.isfinite(values) & (values > 0)))[:1].tolist():
        raise ValueError(f"{named(at)}: temperature must be a positive number, not {values[at]}")
    if not count:
        return 1.0  # a dummy has no term that it would change
    return float(values[0]) if (values == values[0]).all() else values


def by_temperature(
    terms: HeadTerms, tree: Any, temperatures: npt.NDArray[np.float64]
) -> Iterator[tuple[HeadTerms, Tensor]]:
    """For each distinct temperature: the rows and terms that have it, and which terms of the tree these are."""
    host, device = tree.numpy(), terms.row_position.device
    distinct, code = np.unique(temperatures, return_inverse=True)
    of_term = code.reshape(-1)[host.term_sample]
    cu_kept = np.concatenate([[0], np.cumsum(host.sampling_mask_counts, dtype=np.int64)])
    for number, temperature in enumerate(distinct.tolist()):
        mine = np.flatnonzero(of_term == number)
        rows, term_row = np.unique(host.term_row[mine], return_inverse=True)
        counts = host.sampling_mask_counts[rows]
        # The ids of the row at place i of `rows` begin at cu_kept[rows[i]].
        first = np.repeat(cu_kept[rows] - (np.cumsum(counts) - counts), counts)
        kept = first + np.arange(len(first))
        row, term, slot, ids = (
            torch.from_numpy(x.reshape(-1).astype(np.int64)).to(device) for x in (rows, mine, term_row, kept)
        )
        part = replace(
            terms,
            row_position=terms.row_position[row],
            term_row=slot,
            term_target=terms.term_target[term],
            sampling_mask=terms.sampling_mask[ids],
            sampling_mask_counts=terms.sampling_mask_counts[row],
            temperature=temperature,
        )
        yield part, term
