"""A sample and its place in a file to the values that a page shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..inputs.finite import targets

#: File, "line" or "row", number.
Place = tuple[Path, str, int | str]
#: Columns per token that are shown where they have one value at all trained tokens.
_ONE_EACH = ("advantage", "reward")


def said(sample: dict[str, Any], place: Place, files: bool) -> dict[str, Any]:
    """Where the sample lies (`files`: its file as well), and its columns that have one value."""
    path, unit, number = place
    out: dict[str, Any] = {"file": path.name} if files else {}
    out[unit] = number
    for name, value in sample.items():
        if np.ndim(value) == 0:
            out[name] = value
        elif name in _ONE_EACH and np.shape(value) == np.shape(sample["input_ids"]):
            trained = np.asarray(value)[targets(sample)]
            if len(trained) and (trained == trained[0]).all():
                out[name] = trained[0]
    return out
