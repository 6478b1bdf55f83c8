"""The account of a file: which of its columns are read as what, and no silence about the others.

    names found by `names.resolve`, the first rows of all columns -> ColumnAccount, or a ReadError with a remedy

A column that is not read is looked at by its values (`lookalikes`), in the first rows, and in all rows as long as they
leave open what it is: a mask of what is trained, labels, positions, lengths or offsets of packed rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import shown
from ..inputs.account import ColumnAccount
from ..inputs.aliases import USUAL
from ..inputs.column_checks import MEANT, SECOND_MASKS, disagreement
from ..inputs.lookalikes import SHOWN, Look, Suspect, candidate, pairing
from .names import CHATS, FORMS, IDS, PER_TOKEN, form_of
from .source import Chunk, ReadError, Source

Array = npt.NDArray[Any]
#: Rows that are read first, to see what the columns are.
HEAD = 64
_MASKS = ("completion_mask", "labels")


def head_of(source: Source) -> Chunk:
    """The first rows of a file, all columns; None where a row lacks one."""
    fraction, size = source.fraction, source.size
    names = [name for name in source.names if source.names.count(name) == 1]
    chunks = source.chunks(names, HEAD, 0, optional=names)
    head = next(chunks, Chunk((), {}))
    source.fraction, source.size = fraction, size  # nothing was read yet, as far as anybody else can see
    return head


def account_of(names: Sequence[str], found: Mapping[str, str], given: Mapping[str, str], head: Chunk) -> ColumnAccount:
    """What becomes of each column of a file. `found`: canonical name -> name in the file, of what is read."""
    account = ColumnAccount(trains=_trains(found))
    uses: dict[str, list[str]] = {}
    for canonical, name in found.items():
        uses.setdefault(name, []).append(canonical)
    for name in dict.fromkeys(names):
        for canonical in uses.get(name, ()):
            why = "given" if given.get(canonical) == name else ""
            (account.read if canonical in _KNOWN else account.carry)(name, canonical, why)
        if name not in uses:
            account.leave(name, _why_not(name, found, given, head.columns.get(name, ())))
    return account


_KNOWN = {*USUAL, *(name for form in FORMS.values() for name in form)}


def _trains(found: Mapping[str, str]) -> str:
    for mask in _MASKS:
        if mask in found:
            name = shown(found[mask])
            return f"what {name} marks" if mask == "completion_mask" else f"what {name} has, but -100"
    form = form_of(found)
    if form in CHATS:
        return f"the assistant's turns of {shown(found['messages' if form == 'chat' else 'completion_messages'])}"
    if form in ("pair", "answered"):
        return f"all of {shown(found['completion_ids'])}"
    if form == "prompted":
        return f"what follows {shown(found['prompt_ids'])} in {shown(found['input_ids'])}"
    length = next((found[name] for name in ("response_length", "prompt_length") if name in found), None)
    if length is not None:
        return f"the response, by {shown(length)}"
    return "every token, as there is no mask of what is trained (completion_mask)"


def _why_not(name: str, found: Mapping[str, str], given: Mapping[str, str], values: Sequence[Any]) -> str:
    if name in left_out(given):
        return "left out"
    for canonical, usual in USUAL.items():
        if name in usual:
            if found.get(canonical):
                return f"{canonical} is {shown(found[canonical])}"
            if form_of(found) in CHATS and canonical in PER_TOKEN:
                return "the template says what the tokens are"
            if canonical == "labels" and "completion_mask" in found:
                return f"completion_mask is {shown(found['completion_mask'])}"
    first = next((value for value in values if value is not None), None)
    return "text" if isinstance(first, str) else "objects" if isinstance(first, dict) else ""


def says_all(found: Mapping[str, str], head: Chunk) -> bool:
    """Whether every token is trained and integers are carried for each: `pack` then knows they are no mask."""
    if form_of(found) != "ids" or any(mask in found for mask in _MASKS):
        return False
    further = [name for canonical, name in found.items() if canonical not in _KNOWN]
    return any(candidate(value) is not None for name in further for value in head.columns.get(name, ()))


def left_out(given: Mapping[str, str]) -> set[str]:
    """Columns of the file that the user leaves out, by their own names (`--column env_mask=`)."""
    return {canonical for canonical, name in given.items() if not name}


class Watch:
    """The columns of a file that are not read and that nothing has cleared, row by row; second masks beside the one
    that is read."""

    def __init__(self, found: Mapping[str, str], given: Mapping[str, str], names: Collection[str]):
        self._found = dict(found)
        self._masked = any(mask in found for mask in _MASKS)
        self._chat = form_of(found) in CHATS  # how a template cuts tokens is not known to what was stored for each
        unread = [name for name in names if name not in found.values() and name not in left_out(given)]
        self._suspects = {name: Suspect(name, self._masked) for name in unread if not self._chat and name not in MEANT}
        self._comparing = self._masked and not given.get("completion_mask")
        self._second = [name for name in unread if name in SECOND_MASKS] if self._comparing else []
        self._noted = {*names, *left_out(given)}
        for name in self._second:
            self._suspects.pop(name, None)

    def copy(self) -> Watch:
        """The same, for one pass through the rows."""
        out = copy(self)
        out._suspects = {name: suspect.copy() for name, suspect in self._suspects.items()}
        out._second, out._noted = list(self._second), set(self._noted)
        return out

    @property
    def columns(self) -> list[str]:
        """Columns that have to be read to be looked at."""
        return [*self._suspects, *self._second]

    def look(self, chunk: Chunk, where: str, samples: Sequence[Mapping[str, Any]] | None = None) -> None:
        """ReadError where a column of these rows is more than one that is not read. `where`: "FILE, line"; `samples`:
        what was made of the rows, for second masks."""
        columns = chunk.columns
        if chunk.more:  # of which the first row of the file knows nothing
            size = len(chunk.numbers)
            columns = {**columns, **{name: [late.get(at) for at in range(size)] for name, late in chunk.more.items()}}
            self._note(chunk.more)
        for name in [name for name in self._suspects if name in columns]:
            suspect, shown = self._suspects[name], None
            for at, value in enumerate(columns[name]):
                if suspect.cleared:
                    break
                if value is None or (hasattr(value, "__len__") and not len(value)):
                    continue  # says nothing
                values, row = candidate(value), _row(columns, self._found, at)
                if values is None:
                    suspect.clear()
                elif row is not None:
                    suspect.look(row.cut(values), row.cut(row.ids), row.lengths)
                if shown is None and suspect.found:
                    shown = at
            if suspect.found:
                number = chunk.numbers[shown or 0]
                raise ReadError(f"{where} {number}: {_refusal(name, suspect.found, self._masked)}")
            if suspect.cleared:
                del self._suspects[name]
        if samples is not None and not all(sample["completion_mask"].all() for sample in samples if self._second):
            for name in (name for name in self._second if name in columns):  # ones say that everything is meant
                for at, sample in enumerate(samples):
                    self._compare(name, columns, at, sample, f"{where} {chunk.numbers[at]}")

    def _note(self, more: Collection[str]) -> None:
        """Take names that came up in a later row among those that are looked at."""
        for name in (name for name in more if name not in self._noted):
            self._noted.add(name)
            if name in SECOND_MASKS and self._comparing:
                self._second.append(name)
            elif not self._chat and name not in MEANT:
                self._suspects[name] = Suspect(name, self._masked)

    def _compare(
        self, name: str, columns: Mapping[str, Sequence[Any]], at: int, sample: Mapping[str, Any], where: str
    ) -> None:
        """ReadError where a second mask disagrees with that of a sample."""
        other, row = _numbers(columns[name][at]), _row(columns, self._found, at)
        mask, ids = sample["completion_mask"], sample["input_ids"]
        if other is not None and row is not None:
            other = row.cut(other)
        if other is None or len(other) > len(ids):
            return
        labels = name in USUAL["labels"]
        other = np.concatenate([np.full(len(ids) - len(other), -100 if labels else 0, other.dtype), other])
        token = disagreement(ids, mask, other, labels)
        if token is not None:
            read = self._found.get("completion_mask") or self._found["labels"]
            raise ReadError(
                f"{where}: {shown(read)} and {shown(name)} disagree on token {token}, {mask[token]:d} and "
                f"{other[token]}; allowed is one mask of what is trained: --column completion_mask={read} or "
                f"--column completion_mask={name}"
            )


class _Row(NamedTuple):
    """What a row has to be looked at by."""

    ids: Array
    """Its token ids, as they lie in the file."""
    lengths: set[int]
    """Numbers of values, beside theirs, that count as one for each token."""
    real: Array | None
    """What its attention mask says is no padding."""

    def cut(self, values: Array) -> Array:
        """Values for each token, without those of padding."""
        return values if self.real is None or len(values) != len(self.real) else values[self.real]


def _row(columns: Mapping[str, Sequence[Any]], found: Mapping[str, str], at: int) -> _Row | None:
    """None where there are no ids, which is said elsewhere."""
    parts = {name: _ids(columns[found[name]][at]) for name in IDS if name in found}
    log_probs = (columns[found[name]][at] for name in ("old_log_probs", "ref_log_probs") if name in found)
    lengths = {len(value) for value in log_probs if hasattr(value, "__len__")}
    ids, prompt, completion = (parts.get(name) for name in IDS)
    if ids is None:
        if prompt is None or completion is None:
            return None
        ids = np.concatenate([prompt, completion])
    if completion is not None:
        lengths.add(len(completion))
    elif prompt is not None:
        lengths.add(len(ids) - len(prompt))
    for name, rest in (("response_length", 0), ("prompt_length", len(ids))):
        if name in found and isinstance(counted := columns[found[name]][at], int):
            lengths.add(abs(rest - counted))
    real = candidate(columns[found["attention_mask"]][at]) if found.get("attention_mask") in columns else None
    return _Row(ids, lengths, real != 0 if real is not None and len(real) == len(ids) else None)


def _ids(value: Any) -> Array | None:
    return np.zeros(0, np.int64) if isinstance(value, list) and not value else candidate(value)


def _numbers(value: Any) -> Array | None:
    """A list of numbers as an array; None for anything else."""
    if not isinstance(value, list | np.ndarray) or not len(value):
        return None
    array = np.asarray(value) if all(isinstance(x, int | float | np.number | np.bool_) for x in value) else None
    return array if array is not None and array.ndim == 1 else None


def _refusal(name: str, look: Look, masked: bool) -> str:
    here = f"column {name!r} is not read, and its values are {SHOWN[look]}"
    carry = f"--column {name}={name} carries it along"
    if look == "mask":
        return (
            f"{here}; without a completion_mask it would not be heeded: --column completion_mask={name} trains what it "
            f"marks with 1, {carry}, --column {name}= leaves it out (in Python columns=)"
        )
    if look == "labels":
        return (
            f"{here}; without a completion_mask they would not be heeded: --column labels={name} trains the tokens "
            f"that are their own labels, {carry}, --column {name}= leaves it out (in Python columns=)"
        )
    return (
        f"{here}; a row is one sample here: cut such rows apart, a sample for each, or --column {name}= where it means "
        "something else (in Python columns=)"
    )


def halves(
    path: Path, names: Collection[str], found: Mapping[str, str], given: Mapping[str, str], head: Chunk
) -> dict[str, str]:
    """`found` where the file has token ids and a prompt or a completion beside them: whether the ids hold it, or are
    the other half, is in the first rows. ReadError where they do not agree, or where names and rows contradict."""
    out = dict(found)
    if form_of(found) != "ids" or any(name in given for name in IDS):
        return out
    ids = found["input_ids"]
    numbers = numbers_in(head)
    sides: tuple[tuple[str, Literal["prompt", "completion"]], ...]
    sides = (("prompt_ids", "prompt"), ("completion_ids", "completion"))
    for half, side in sides:
        name = next((name for name in USUAL[half] if name in names and name not in numbers), None)
        rows = list(_id_rows(head, ids, name)) if name is not None else []
        if name is None or not rows:
            continue
        how = pairing(rows, side)
        other = "completion_ids" if side == "prompt" else "prompt_ids"
        if how == "whole":
            if not any(mask in found for mask in _MASKS):
                out[half] = name
        elif how == "mixed" or ids.startswith("input") != (side == "completion"):
            place = "at the front" if side == "prompt" else "at the end"
            has = f"some rows of {ids!r} hold {name!r} {place} and some do not"
            raise ReadError(
                f"{path}: {has if how == 'mixed' else f'{ids!r} do not hold {name!r} {place}'}, so what is one sample "
                f"cannot be determined: --column {half}= reads {ids!r} alone as whole samples, --column {half}={name} "
                f"--column {other}={ids} takes the two for halves of one (in Python columns=)"
            )
        else:
            del out["input_ids"]
            out |= {half: name, other: ids}
        return out
    return out


def numbers_in(head: Chunk) -> set[str]:
    """Columns that hold one number for each row: never token ids, whatever they are called (`prompt_tokens: 3`)."""
    out = set()
    for name, values in head.columns.items():
        present = [value for value in values if value is not None]
        if present and all(isinstance(value, int | float | np.number) for value in present):
            out.add(name)
    return out


def _id_rows(head: Chunk, ids: str, half: str) -> Iterator[tuple[Array, Array]]:
    """Token ids and a half of a pair of the first rows, where both are lists of integers."""
    for a, b in zip(head.columns[ids], head.columns[half], strict=True):
        one, other = _ids(a), _ids(b)
        if one is not None and other is not None and len(one) and len(other):
            yield one, other
