"""A file of preference pairs, a pair per row: `treepack pack --pairs` and `treepack inspect --pairs` read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping

from ..inputs.account import joined
from ..readers import ReadError, Rollouts
from ..readers.columns import head_of
from ..readers.files import open_sources
from ..readers.names import form_of
from ..readers.rollouts import open_columns
from ..readers.sides import SIDES, columns_of_sides, given_columns
from .pairs import PAIR, Pair

CHOSEN, REJECTED = "chosen.", "rejected."


class Pairs:
    """Preference pairs of a file; made by `open_pairs`. Reads the file once for each side, in step."""

    def __init__(self, chosen: Rollouts, rejected: Rollouts):
        self._sides = chosen, rejected
        self.path, self.format, self.files = chosen.path, chosen.format, chosen.files
        self.places = chosen.places
        """Where each pair of the batch lies that `batches()` gave last, as of `Rollouts`."""
        self.size = chosen.size
        """Pairs, or None where only reading tells (JSONL)."""
        self.fingerprint = f"{chosen.fingerprint}-{rejected.fingerprint}"
        self.columns = {f"{CHOSEN}{name}": column for name, column in chosen.columns.items()} | {
            f"{REJECTED}{name}": column for name, column in rejected.columns.items()
        }
        """Canonical name -> name in the file."""
        self.account = joined([(CHOSEN, chosen.account), (REJECTED, rejected.account)])
        """Of every column of the file: what it is read or carried as, or that it is not read, and why."""
        if form_of(chosen.columns) == "ids" and not {"completion_mask", "labels"} & chosen.columns.keys():
            self.account.trains = "what comes after the common prefix of the two"
        for side in self._sides:
            side.all_meant = False  # a pair without a mask trains what comes after the common prefix

    @property
    def fraction(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return self._sides[0].fraction

    def batches(
        self,
        samples: int = 1024,
        *,
        start: int = 0,
        progress: Callable[[int], None] | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[list[Pair]]:
        """Pairs in file order, from number `start` on; `samples`, `progress` and `names` as of `Rollouts.batches`."""
        rejected = (sample for batch in self._sides[1].batches(samples, start=start, names=names) for sample in batch)
        for batch in self._sides[0].batches(samples, start=start, progress=progress, names=names):
            self.places = self._sides[0].places
            yield [Pair(sample, next(rejected)) for sample in batch]
        next(rejected, None)  # at its end a reader looks at what it has read

    def check_terms(self, whole: bool = True) -> None:
        """As of `Rollouts`, for both sides."""
        for side in self._sides:
            side.check_terms(whole)


def open_pairs(
    path: str | os.PathLike[str], *, columns: Mapping[str, str] | None = None, tokenizer: str | None = None
) -> Pairs:
    """Open preference pairs, a pair per row.

    Each side is `chosen_input_ids`, `chosen_ids`, `chosen_token_ids`, `chosen_tokens` or `chosen` (and the same for
    `rejected`): token ids of the whole sample; where the file has `prompt_ids` as well, of the completion, or of a
    whole sample that begins with them, whichever the first rows show; or, with a tokenizer, chat messages, whole or
    after those of `prompt`. Masks and labels of a side are found under its name (`chosen_labels`,
    `rejected_loss_mask`), `group_id` by its usual names; everything else is taken as named.

    Arguments:
        path: as for `open_rollouts`.
        columns: canonical name -> name in the file. "chosen" and "rejected" name the tokens, "chosen.NAME" and
            "rejected.NAME" a column of one side, any other name a column of both.
        tokenizer: a tokenizer folder, for chat messages.

    Raises ReadError.
    """
    given = dict(columns or {})
    if PAIR in given:
        raise ReadError(
            f"--column {PAIR}={given[PAIR]}: {PAIR} is the number of the pair; give the column another name"
        )
    _, (first, *_) = open_sources(os.fspath(path))
    sides = columns_of_sides(first.path, first.names, head_of(first), given, tokenizer)
    read = {side: {column for column in columns.values() if column} for side, columns in sides.items()}
    chosen, rejected = (
        open_columns(
            os.fspath(path), sides[side], tokenizer, given_columns(side, given), elsewhere=read[other], apart=True
        )
        for side, other in (SIDES, SIDES[::-1])
    )
    if set(chosen.columns) != set(rejected.columns):
        lone = sorted(set(chosen.columns) ^ set(rejected.columns))[0]
        raise ReadError(
            f"{path}: {lone} is a column of one side alone; name it for both: chosen.{lone}, rejected.{lone}"
        )
    return Pairs(chosen, rejected)
