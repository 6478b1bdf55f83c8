"""Columns of a call that would be carried along and are more than that: masks under any name, positions and lengths of
packed rows, halves of a pair. Refused by what they hold (`lookalikes`), and by a few names where values cannot tell.

Costs a look at the first samples of each per-token column of integers or booleans; nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Where
from .aliases import USUAL
from .columns import IDENTITY, Inputs
from .convert import Array
from .lookalikes import MASK_NAMES, ONE_SAMPLE, SHOWN, Suspect, candidate, labels_of_own_tokens, packing_remedy

#: Columns that mean what their name says, whatever they hold: 0 and 1 may be rewards, or what a tokenizer says.
MEANT = frozenset(
    [
        IDENTITY,
        *(n for known in ("old_log_probs", "ref_log_probs", "advantage", "reward") for n in USUAL[known]),
        "token_type_ids",
        "mm_token_type_ids",
        "special_tokens_mask",
    ]
)
#: Names of masks and labels, which a second one beside the `completion_mask` may have.
SECOND_MASKS = MASK_NAMES | set(USUAL["completion_mask"]) | set(USUAL["labels"])


def check(columns: Inputs, first: int = 0, known: Mapping[str, Suspect] | None = None) -> dict[str, Suspect]:
    """PackError for a column that is more than a column.

    first: the number of sample 0, for messages. known: what this returned for the samples before; of the columns only
    these are looked at.

    Returns the columns that nothing has cleared so far; they have to be looked at again.
    """
    _check_second_masks(columns, first)
    uncleared = {}
    if known is None:
        known = {name: Suspect(name, columns.mask is not None) for name in looked_at(columns)}
    for name, _, values in columns.token_columns:
        if name not in known:
            continue
        suspect = known[name].copy()
        found = None
        for sample, (one, ids) in enumerate(zip(_rows(values), _rows(columns.ids), strict=True)):
            if suspect.cleared:
                break
            suspect.look(one, ids)
            if found is None and suspect.found:
                found = sample
        if suspect.found:
            raise _where(columns, first + (found or 0)).error(f"has {packing_remedy(name, suspect.found)}")
        if not suspect.cleared:
            uncleared[name] = suspect
    return uncleared


def looked_at(columns: Inputs) -> list[str]:
    """The columns whose values are looked at: integers or booleans, one for each token."""
    formats = ((name, *columns.formats[name]) for name, _, _ in columns.token_columns)
    return [name for name, dtype, tail in formats if dtype.kind in "biu" and not tail and name not in MEANT]


def harmless(samples: Sequence[Any], names: Iterable[str], masked: bool) -> bool:
    """Whether these columns of ready samples are cleared at once, as `check` cleared them in an earlier call."""
    for name in names:
        suspect = Suspect(name, masked)
        for sample in samples:
            if suspect.cleared:
                break
            try:
                values, ids = candidate(sample[name]), sample["input_ids"]
                if values is None:
                    return False
                suspect.look(values, ids)
            except (KeyError, TypeError):
                return False
        if not suspect.cleared:
            return False
    return True


def has_second_mask(columns: Inputs) -> bool:
    """Whether a mask of the field's names is carried beside the `completion_mask`."""
    return columns.mask is not None and any(name in SECOND_MASKS for name, _, _ in columns.token_columns)


def packed_rows(name: str, values: Array, ids: Array) -> str | None:
    """What to say of a column of another length than the ids whose name and values are those of lengths or offsets of
    packed rows."""
    suspect = Suspect(name, masked=True)
    if (array := candidate(values)) is not None:
        suspect.look(array, ids)
    if suspect.found not in ("lengths", "offsets"):
        return None
    return f"its values are {SHOWN[suspect.found]}; {ONE_SAMPLE}"


def _check_second_masks(columns: Inputs, first: int) -> None:
    """PackError where another mask disagrees with a `completion_mask` that is not ones, on a token that is a target."""
    if not has_second_mask(columns) or all(mask.all() for mask in _rows(columns.mask)):
        return
    for name, _, values in columns.token_columns:
        if name not in SECOND_MASKS or columns.formats[name][1]:
            continue
        rows = zip(_rows(columns.ids), _rows(columns.mask), _rows(values), strict=True)
        for sample, (ids, mask, other) in enumerate(rows):
            token = disagreement(ids, mask, other, name in USUAL["labels"])
            if token is not None:
                raise _where(columns, first + sample).error(
                    f"has a completion_mask and a column {name!r} that disagree: "
                    f"token {token} has {mask[token]:d} and {other[token]}; allowed is one mask of what is trained: "
                    f"leave {name!r} out, or put what both say into completion_mask"
                )


def disagreement(ids: Array, mask: Array, other: Array, labels: bool) -> int | None:
    """The first token that may be a target and is trained by one of two masks alone; None where they agree, or where
    the other one is no mask (weights, labels that are classes)."""
    if labels:
        if not labels_of_own_tokens(other, ids):
            return None
        trained = other >= 0
    elif not ((other == 0) | (other == 1)).all():
        return None
    else:
        trained = other != 0
    differ = np.flatnonzero(trained[1:] != (mask[1:] != 0))
    return int(differ[0]) + 1 if len(differ) else None


def _where(columns: Inputs, sample: int) -> Where:
    return Where("it", sample) if isinstance(columns.ids, list) else Where("the batch")


def _rows(values: Any) -> Iterator[Array]:
    """A column (a list, or `Flat`) sample by sample."""
    if isinstance(values, list):
        yield from values
    else:
        for start, end in zip(values.starts.tolist(), values.ends.tolist(), strict=True):
            yield values.values[start:end]
