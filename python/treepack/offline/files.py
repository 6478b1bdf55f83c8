"""A file of rollouts or of preference pairs -> a folder of shards: `treepack pack` as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..readers import Rollouts, open_rollouts
from .manifest import Manifest
from .options import Options
from .pair_files import Pairs, open_pairs
from .writer import Progress, write


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
    given = Options(**options)
    rows = open_input(path, given.pairs, columns, tokenizer)
    return write(rows, out, given, source=Path(path).name, resume=resume, overwrite=overwrite, progress=progress)


def open_input(
    path: str | os.PathLike[str], pairs: bool, columns: Mapping[str, str] | None, tokenizer: str | None
) -> Rollouts | Pairs:
    """The rows of a file: samples, or pairs."""
    if pairs:
        return open_pairs(path, columns=columns, tokenizer=tokenizer)
    return open_rollouts(path, columns=columns, tokenizer=tokenizer)
