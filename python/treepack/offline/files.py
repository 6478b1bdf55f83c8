"""A file of rollouts or of preference pairs -> a folder of shards: `treepack pack` as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..inputs.account import joined
from ..readers import ReadError, Rollouts, open_rollouts
from ..readers.columns import head_of
from ..readers.files import open_sources
from ..readers.names import form_of
from ..readers.rollouts import open_columns
from ..readers.sides import SIDES, columns_of_sides, told_of
from .manifest import Manifest
from .options import Options
from .pairs import PAIR, Pair
from .writer import Progress, write

CHOSEN, REJECTED = "chosen.", "rejected."


def pack_file(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Manifest:
    """Pack a file of rollouts into a folder of Parquet shards, in bounded memory.

    Arguments:
        path, columns, tokenizer: as for `treepack.readers.open_rollouts`; of pairs as for `open_pairs`.
        out: the folder.
        resume: continue what is there. overwrite: drop it. Without either, a folder with shards is refused.
        progress: called after each window and each shard.
        **options: see `Options`; max_tokens is needed.

    Returns what manifest.json holds: the shards and their counts.

    Raises:
        ReadError: the file cannot be read.
        PackError, TypeError: options, samples or the folder; says which, what it has, what is allowed.
        KeyboardInterrupt, or whatever `progress` raises: finished shards are there, `resume` continues.
    """
    told = Options(**options)
    rows = open_input(path, told.pairs, columns, tokenizer)
    return write(rows, out, told, source=Path(path).name, resume=resume, overwrite=overwrite, progress=progress)


def open_input(
    path: str | os.PathLike[str], pairs: bool, columns: Mapping[str, str] | None, tokenizer: str | None
) -> Rollouts | Pairs:
    """The rows of a file: samples, or pairs."""
    if pairs:
        return open_pairs(path, columns=columns, tokenizer=tokenizer)
    return open_rollouts(path, columns=columns, tokenizer=tokenizer)


class Pairs:
    """Preference pairs of a file; made by `open_pairs`. Reads the file once for each side, in step."""

    def __init__(self, chosen: Rollouts, rejected: Rollouts):
        self._sides = chosen, rejected
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

    def batches(self, samples: int = 1024, *, start: int = 0) -> Iterator[list[Pair]]:
        """Pairs in file order, from number `start` on."""
        rejected = (sample for batch in self._sides[1].batches(samples, start=start) for sample in batch)
        for batch in self._sides[0].batches(samples, start=start):
            yield [Pair(sample, next(rejected)) for sample in batch]


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
        open_columns(os.fspath(path), sides[side], tokenizer, told_of(side, given), elsewhere=read[other], apart=True)
        for side, other in (SIDES, SIDES[::-1])
    )
    if set(chosen.columns) != set(rejected.columns):
        lone = sorted(set(chosen.columns) ^ set(rejected.columns))[0]
        raise ReadError(
            f"{path}: {lone} is a column of one side alone; name it for both: chosen.{lone}, rejected.{lone}"
        )
    return Pairs(chosen, rejected)
