"""A file of rollouts or of preference pairs -> a folder of shards: `treepack pack` as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..inputs.account import joined
from ..readers import USUAL, ReadError, Rollouts, open_rollouts
from ..readers.files import open_sources
from ..readers.names import form_of
from .manifest import Manifest
from .options import Options
from .pairs import PAIR, Pair
from .writer import Progress, write

CHOSEN, REJECTED = "chosen.", "rejected."
#: Where the tokens of a side come from, most telling first.
_SIDES = ("{0}_input_ids", "{0}_ids", "{0}_token_ids", "{0}_tokens", "{0}")
#: Columns that the reader finds by itself and that say nothing of one side of a pair.
_ALONE = (
    "completion_mask",
    "labels",
    "attention_mask",
    "old_log_probs",
    "ref_log_probs",
    "advantage",
    "reward",
    "identity",
    "sampling_mask",
    "sampling_mask_counts",
)


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
    `rejected`): token ids of the whole sample; or of the completion where the file has `prompt_ids` as well; or chat
    messages where there is a tokenizer. `group_id` is found by its usual names, everything else is taken as named.

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
    names = _names(path)
    shared = dict.fromkeys(_ALONE, "")
    own = ("chosen", "rejected")
    shared |= {n: column for n, column in given.items() if n not in own and not n.startswith((CHOSEN, REJECTED))}
    chosen, rejected = (_open_side(path, side, names, given, shared, tokenizer) for side in ("chosen", "rejected"))
    if set(chosen.columns) != set(rejected.columns):
        lone = sorted(set(chosen.columns) ^ set(rejected.columns))[0]
        raise ReadError(
            f"{path}: {lone} is a column of one side alone; name it for both: chosen.{lone}, rejected.{lone}"
        )
    return Pairs(chosen, rejected)


def _open_side(
    path: str | os.PathLike[str],
    side: str,
    names: list[str],
    given: dict[str, str],
    shared: dict[str, str],
    tokenizer: str | None,
) -> Rollouts:
    tokens = given.get(side) or next((name for form in _SIDES if (name := form.format(side)) in names), None)
    if tokens is None:
        raise ReadError(
            f"{path}: no column of {side} tokens; it has {', '.join(names)}. Looked for "
            f"{', '.join(form.format(side) for form in _SIDES)}; name yours with --column {side}=NAME"
        )
    own = {name.split(".", 1)[1]: column for name, column in given.items() if name.startswith(f"{side}.")}
    if tokenizer:
        form = {"messages": tokens, "input_ids": "", "prompt_ids": "", "completion_ids": ""}
        if "prompt" in names:  # the messages before, where a side only goes on from them
            form |= {"prompt_messages": "prompt"}
    elif _has_prompt(path, names, given):
        form = {"completion_ids": tokens, "input_ids": "", "messages": ""}
    else:
        form = {"input_ids": tokens, "prompt_ids": "", "completion_ids": "", "messages": ""}
    return open_rollouts(path, columns=shared | form | own, tokenizer=tokenizer)


def _has_prompt(path: str | os.PathLike[str], names: list[str], given: dict[str, str]) -> bool:
    return bool(given.get("prompt_ids", any(name in names for name in USUAL["prompt_ids"])))


def _names(path: str | os.PathLike[str]) -> list[str]:
    """The columns of a file, or of the first of several."""
    return list(open_sources(os.fspath(path))[1][0].names)
