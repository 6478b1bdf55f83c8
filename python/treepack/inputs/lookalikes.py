"""What the values of a column look like, whatever its name: a mask of what is trained, labels, positions that start
again, offsets or lengths of packed rows, half of a prompt/answer pair.

    Suspect("env_mask"): look(values, ids) of sample after sample -> .found, "mask", or .cleared

A column is what every sample allows and at least one shows; the first sample that allows nothing clears it, so that a
column of many values costs a look at one sample. NumPy alone; called where samples come in, whatever they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import shown

Array = npt.NDArray[Any]
Look = Literal["mask", "labels", "offsets", "positions", "lengths", "segments"]
Pairing = Literal["whole", "apart", "mixed"]

#: Names that the field has for a mask of trained tokens, beside those that are read as one.
MASK_NAMES = frozenset(
    f"{what}_{mask}"
    for what in ("completion", "response", "loss", "assistant", "action", "tool", "env", "train", "trainable", "target")
    for mask in ("mask", "masks")
)
_POSITIONS = frozenset(["pos", "position", "positions"])
_PACKED = frozenset(
    f"{what}{many}"
    for what in ("seq", "seqlen", "sequence", "doc", "document", "seg", "segment", "pack")
    for many in ("", "s")
) | {"cu", "packed", "packing"}
#: A prompt of fewer tokens may stand at the front of a completion by chance.
CHANCE = 4


def candidate(value: Any) -> Array | None:
    """A value that may be one of these as an array, (n,) of integers or booleans; None for whatever else, floats and
    numbers for the whole sample among it."""
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(x, int | np.integer | np.bool_) for x in value):
            return None
        array = np.asarray(value)
    elif getattr(value, "ndim", 0) != 1:
        return None
    elif isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "detach") and getattr(value.device, "type", "") == "cpu":
        try:
            array = np.asarray(value.detach())
        except (TypeError, RuntimeError):  # of a dtype that NumPy has not
            return None
    else:
        return None
    return array if array.dtype.kind in "biu" and len(array) else None


class Suspect:
    """One column, sample by sample.

    name: tells positions and packed rows even where there is a `completion_mask`, beside which `masked` is True and
    values alone say nothing: whoever gives one knows what is trained.
    """

    def __init__(self, name: str, masked: bool = False):
        words = set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
        packed, positions = bool(words & _PACKED), bool(words & _POSITIONS)
        looks: dict[Look, bool] = {
            "mask": not masked,
            "labels": not masked,
            "offsets": packed or not masked,
            "positions": positions or not masked,
            "lengths": packed or not masked,
            "segments": packed,
        }
        self.name = name
        self._positions = positions  # named so: positions of one sample are 0..L-1 and nothing else
        self._may = [look for look, tried in looks.items() if tried]
        self._shown: set[Look] = set()

    def copy(self) -> Suspect:
        """The same suspect, for a look that may be taken back."""
        return copy(self)

    @property
    def cleared(self) -> bool:
        """Whether the samples so far leave nothing that the column may be."""
        return not self._may

    @property
    def found(self) -> Look | None:
        """What the column looks like after the samples so far."""
        return next((look for look in self._may if look in self._shown), None)

    def clear(self) -> None:
        """Take a sample in which the column is something else altogether."""
        self._may = []

    def look(self, values: Array, ids: Array, lengths: Iterable[int] = ()) -> None:
        """Take the column (n,), integers or booleans, and the token ids (L,) of one sample.

        lengths: numbers of values, beside L, that count as one for each token: those of the completion alone.
        """
        if not (len(values) and len(ids)):
            return
        per_token = len(values) == len(ids) or (len(values) < len(ids) and len(values) in lengths)
        left, shown = [], set(self._shown)
        for look in self._may:
            fits, shows = self._test(look, values, ids, per_token)
            if fits:
                left.append(look)
            if shows:
                shown.add(look)
        self._may, self._shown = left, shown  # replaced, never changed: a copy of a suspect is one of its own

    def _test(self, look: Look, values: Array, ids: Array, per_token: bool) -> tuple[bool, bool]:
        """Whether the values may be that, and whether they show it."""
        if look == "mask":
            fits = per_token and (values.dtype.kind == "b" or bool(((values == 0) | (values == 1)).all()))
            return fits, fits and not _all_targets(values != 0, ids)
        if values.dtype.kind == "b":
            return False, False
        values = values.astype(np.int64, copy=False)
        if look == "labels":
            return _labels(values, ids) if per_token else (False, False)
        if look == "positions":
            return _positions(values, self._positions) if len(values) == len(ids) else (False, False)
        steps = np.diff(values)
        if look == "segments":
            fits = len(values) == len(ids) and values[0] in (0, 1) and bool(((steps == 0) | (steps == 1)).all())
            return fits, bool(steps.any() and not steps.all())
        if look == "offsets":
            fits = values[0] == 0 and values[-1] == len(ids) and bool((steps >= 0).all())
            return bool(fits), len(values) > 2
        fits = bool((values > 0).all()) and int(values.sum()) == len(ids)
        return fits, 1 < len(values) < len(ids)


def _all_targets(trained: Array, ids: Array) -> bool:
    """Whether a mask trains all that no mask would: every token but the first, which is never a target. Such a sample
    does not tell a mask from other numbers, and loses nothing where it is one."""
    return len(trained) == len(ids) and bool(trained[1:].all())


def _labels(values: Array, ids: Array) -> tuple[bool, bool]:
    """Own tokens, or the next ones, and one negative number where nothing is trained; -100 beside any ids is enough. A
    copy of the ids shows nothing: it trains every token, as no mask does."""
    negative = values < 0
    ignored = values[negative]
    if len(ignored) and (ignored != ignored[0]).any():
        return False, False
    shows = not _all_targets(~negative, ids)
    if len(ignored) and ignored[0] == -100:
        return True, shows
    own = np.asarray(ids[-len(values) :], np.int64)
    fits = bool((negative | (values == own)).all() or (negative[:-1] | (values[:-1] == own[1:])).all())
    return fits, fits and shows


def labels_of_own_tokens(values: Array, ids: Array) -> bool:
    """Whether values are labels: the token itself, or one negative number where nothing is trained; some of each."""
    negative = values < 0
    own = bool((negative | (values == ids)).all())
    return own and bool(negative.any()) and len(np.unique(values[negative])) == 1


def _positions(values: Array, named: bool) -> tuple[bool, bool]:
    """Rising by one from 0 or 1, and starting again; under a name that says positions, any but 0..L-1."""
    if named:
        return True, not np.array_equal(values, np.arange(len(values)))
    rises = np.diff(values) == 1
    again = (values[1:] == values[0]) & ~rises
    fits = values[0] in (0, 1) and bool((again | rises).all())
    return bool(fits), bool(again.any() and rises.any())


def pairing(rows: Iterable[tuple[Array, Array]], half: Literal["prompt", "completion"]) -> Pairing:
    """How ids and a half of a pair lie to each other: ids hold it, at the front a prompt, at the end a completion
    ("whole"); they are the other half ("apart"); or now this and now that ("mixed"). `rows`: ids and the half."""
    whole = apart = 0
    for ids, part in rows:
        if holds(ids, part, half):
            whole += len(part) >= CHANCE
        else:
            apart += 1
    return "whole" if not apart else "mixed" if whole else "apart"


def holds(ids: Array, part: Array, half: Literal["prompt", "completion"]) -> bool:
    """Whether the ids begin with a prompt, or end with a completion."""
    n = len(part)
    there = ids[:n] if half == "prompt" else ids[len(ids) - n :]
    return n <= len(ids) and bool(np.array_equal(there, part))


# --- what to say ----------------------------------------------------------------------------------------------------

#: What such values are, after "its values are".
SHOWN: dict[Look, str] = {
    "mask": "0 and 1, as of a mask of what is trained",
    "labels": "token ids and one negative number, as of labels",
    "positions": "positions that start again, as of several samples in one row",
    "offsets": "offsets up to the number of tokens, as of several samples in one row",
    "lengths": "lengths that add up to the number of tokens, as of several samples in one row",
    "segments": "numbers of segments, as of several samples in one row",
}


ONE_SAMPLE = "a row is one sample: leave this column out, and give a dict for each sample, or a batch with cu_seqlens"


def packing_remedy(name: str, look: Look) -> str:
    """What to say of a column in a call of `pack`; starts after "it has"."""
    if look in ("mask", "labels"):
        given = shown(name) + (" (1 = trained)" if look == "mask" else " >= 0 where a label is its own token")
        return (
            f"a column {name!r} and no completion_mask, so every token would be trained; its values are "
            f"{SHOWN[look]}: give completion_mask = {given}, or completion_mask = ones to train every token and carry "
            f"{name!r} along"
        )
    return f"a column {name!r} whose values are {SHOWN[look]}; {ONE_SAMPLE}"
