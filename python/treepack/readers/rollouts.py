"""open_rollouts(): a path -> samples, whatever the format."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import jsonl
from .names import resolve
from .samples import Encode, build
from .source import ReadError, Source, first_line

_FORMATS = ("jsonl", "parquet", "npz", "datasets")
_ALLOWED = ".jsonl (.gz, .zst), .parquet, .npz, or a folder of one of them or of datasets.save_to_disk"


class Rollouts:
    """Rollouts in a file, a folder or several shards; made by `open_rollouts`. Nothing but heads of files is held."""

    def __init__(
        self,
        path: str,
        format: str,
        columns: dict[str, str],
        fingerprint: str,
        sources: list[Source],
        encode: Encode | None,
    ):
        self.path = path
        self.format = format
        """"jsonl", "parquet", "npz" or "datasets"."""
        self.columns = columns
        """Canonical name -> name in the file, of every column that is read."""
        sizes = [source.size for source in sources]
        self.size: int | None = None if None in sizes else sum(size for size in sizes if size is not None)
        """Samples, or None where only reading tells (JSONL)."""
        self.fingerprint = fingerprint
        """Changes when a file (size, time), the format, the columns or the tokenizer does."""
        self._sources = sources
        self._encode = encode
        self._current = 0

    @property
    def fraction(self) -> float:
        """How much of the files the running `batches()` has read, 0 to 1."""
        if self._current == len(self._sources):
            return 1.0
        return (self._current + self._sources[self._current].fraction) / len(self._sources)

    def batches(
        self,
        samples: int = 1024,
        *,
        start: int = 0,
        progress: Callable[[int], None] | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[list[dict[str, Any]]]:
        """Samples in file order, as dicts for `treepack.pack` or `treepack.Packer`.

        Arguments:
            samples: most samples of a batch; where they are long it has fewer (about 10^6 tokens).
            start: leave out this many samples at the front.
            progress: called after each batch with the number of samples read so far, `start` included.
            names: of the columns beside the tokens, only these (canonical names).

        Raises:
            ReadError: file, line or row, column, what it has, what is allowed.
        """
        wanted = self.columns
        if names is not None:
            ids = ("input_ids", "prompt_ids", "completion_ids", "messages", "tools", "labels", "attention_mask")
            wanted = {name: column for name, column in self.columns.items() if name in names or name in ids}
        done = start
        for number, source in enumerate(self._sources):
            self._current = number
            if source.size is not None and start >= source.size:
                start -= source.size
                continue
            for chunk in source.chunks(list(dict.fromkeys(wanted.values())), samples, start):
                start = 0
                batch = build(chunk, wanted, f"{source.path}, {source.unit}", self._encode)
                done += len(batch)
                if progress is not None:
                    progress(done)
                yield batch
            if start and source.size is not None:  # all of it was skipped; a JSONL file knows its size by now
                start -= source.size
        self._current = len(self._sources)

    def __repr__(self) -> str:
        size = "samples" if self.size is None else f"{self.size} samples"
        return f"Rollouts({self.path!r}, {self.format}, {size}, columns {self.columns})"


def open_rollouts(
    path: str | os.PathLike[str], *, columns: Mapping[str, str] | None = None, tokenizer: str | None = None
) -> Rollouts:
    """Open rollouts for reading; bounded memory, whatever the size.

    Arguments:
        path: a JSONL file (.jsonl, .ndjson, .json, and with .gz or .zst), a Parquet or NPZ file, a folder of
            `datasets.Dataset.save_to_disk`, a folder of such files, or a glob of files of one format.
        columns: canonical name -> name in the file, where `readers.USUAL` does not find it; an empty name leaves a
            column out. Any other canonical name adds a further column.
        tokenizer: a tokenizer folder, for chat messages; see `readers.chat.ChatEncoder` for what is trained.

    Raises:
        ReadError: nothing there, nothing that can be read, no token ids.

    >>> rollouts = open_rollouts("rollouts.jsonl")                                         # doctest: +SKIP
    >>> for samples in rollouts.batches():                                                 # doctest: +SKIP
    ...     packed = treepack.pack(samples, max_tokens=16384)
    """
    name = os.fspath(path)
    format, files = _files(name)
    sources = [_open(format, file) for file in files]
    given = dict(columns or {})
    found = resolve(sources[0].path, sources[0].names, given, tokenizer)
    for source in sources[1:]:
        missing = [column for column in found.values() if column not in source.names]
        if missing:
            raise ReadError(f"{source.path}: no column {missing[0]!r}, which {sources[0].path} has")
    encode: Encode | None = None
    if "messages" in found and tokenizer:
        from .chat import ChatEncoder

        encode = ChatEncoder(tokenizer)
    fingerprint = _fingerprint(format, files, found, tokenizer if encode else None)
    return Rollouts(name, format, found, fingerprint, sources, encode)


def _files(name: str) -> tuple[str, list[Path]]:
    """Format and files of a path, folder or glob; files by name."""
    path = Path(name)
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _format(path), [path]
    except OSError as error:
        raise ReadError(f"{name}: it cannot be read: {first_line(error)}") from None
    shards = sorted(Path(found) for found in glob.glob(name, recursive=True))
    shards = [shard for shard in shards if shard.is_file()]
    if not shards:
        raise ReadError(f"{name}: no such file or folder")
    return _one_format(name, shards)


def _folder(path: Path) -> tuple[str, list[Path]]:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise ReadError(f"{path}: a dataset with the splits {splits}; name one of them: {path}/SPLIT")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return "datasets", [path]
    shards = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith((".", "_")))
    shards = [shard for shard in shards if _suffix(shard)]
    if not shards:
        raise ReadError(f"{path}: nothing to read in this folder; allowed are {_ALLOWED}")
    return _one_format(str(path), shards)


def _one_format(name: str, shards: list[Path]) -> tuple[str, list[Path]]:
    formats = sorted({_format(shard) for shard in shards})
    if len(formats) > 1:
        raise ReadError(f"{name}: files of more than one format ({', '.join(formats)}); name one, say {name}/*.parquet")
    return formats[0], shards


def _suffix(path: Path) -> str | None:
    name = path.name.lower()
    if name.endswith(jsonl.SUFFIXES):
        return "jsonl"
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    return "npz" if name.endswith(".npz") else None


def _format(path: Path) -> str:
    found = _suffix(path)
    if found is None:
        raise ReadError(f"{path}: unknown format {path.suffix or 'without a suffix'!r}; allowed are {_ALLOWED}")
    return found


def _open(format: str, path: Path) -> Source:
    try:
        if format == "jsonl":
            return jsonl.JsonLines(path)
        if format == "npz":
            from .npz import Npz

            return Npz(path)
        from .arrow import Dataset, Parquet

        return Dataset(path) if format == "datasets" else Parquet(path)
    except OSError as error:
        raise ReadError(f"{path}: it cannot be read: {first_line(error)}") from None


def _fingerprint(format: str, files: list[Path], columns: dict[str, str], tokenizer: str | None) -> str:
    """Of names, sizes and times, nothing that has to be read."""
    folders = [*files, *([Path(tokenizer)] if tokenizer else [])]
    held = [file for path in folders for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in held]
    text = json.dumps([format, sorted(columns.items()), tokenizer, stats])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
