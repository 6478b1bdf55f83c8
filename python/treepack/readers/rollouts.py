"""open_rollouts(): a path -> samples, whatever the format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..inputs.account import ColumnAccount
from .chat import ChatEncoder
from .columns import Watch, account_of, halves, head_of, numbers_in, says_all
from .files import open_sources
from .jsonl import JsonElements, JsonLines
from .memory import Table
from .names import CHATS, MAY_LACK, NEEDED, form_of, has_chat, resolve, unexpected
from .nested import Nested, chats_in, unfold
from .samples import build
from .source import Chunk, ReadError, Source
from .terms import Terms


class Rollouts:
    """Rollouts in a file, a folder or several shards; made by `open_rollouts`. Nothing but heads of files is kept."""

    def __init__(
        self,
        path: str,
        format: str,
        columns: dict[str, str],
        fingerprint: str,
        sources: list[Source],
        encode: ChatEncoder | None,
        account: ColumnAccount,
        watch: Watch,
        all_meant: bool,
        apart: bool,
    ):
        self.path = path
        self.format = format
        """"jsonl", "parquet", "npz", "datasets" or, in memory, "table"."""
        self.columns = columns
        """Canonical name -> name in the file, of every column that is read."""
        self.account = account
        """Of every column of the file: what it is read or carried as, or that it is not read, and why."""
        self.all_meant = all_meant
        """Samples get a `completion_mask` of ones: a column per token was asked for, and so is no mask."""
        sizes = [source.size for source in sources]
        self.size: int | None = None if None in sizes else sum(size for size in sizes if size is not None)
        """Samples, or None where only reading tells (JSONL)."""
        self.fingerprint = fingerprint
        """Changes when a file (size, time), the format, the columns or the tokenizer does."""
        self.files = [source.path for source in sources if format != "table"]
        """What is read; a data set on disk is one folder. Empty for a table in memory."""
        self.places: list[tuple[Path, str, int | str]] = []
        """Where each sample of the batch lies that `batches()` gave last: file, "line" (from 1) or "row" (from 0),
        number; "3, steps[1]" where a row holds several samples."""
        self._sources = sources
        self._encode = encode
        self._terms = Terms(path)
        self._watch = watch
        self._apart = apart
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
            wanted = {name: column for name, column in self.columns.items() if name in names or name in NEEDED}
        done, whole = start, start == 0
        self._terms = Terms(self.path)
        watch = self._watch.copy()
        for number, source in enumerate(self._sources):
            self._current = number
            if source.size is not None and start >= source.size:
                start -= source.size
                continue
            where = f"{source.path}, {source.unit}"
            watched = [name for name in watch.columns if name in source.names]
            optional = [*watched, *(name for known, name in wanted.items() if known in MAY_LACK)]
            for chunk in source.chunks(list(dict.fromkeys([*wanted.values(), *watched])), samples, start, optional):
                start = 0
                batch = build(chunk, wanted, where, self._encode, self._apart)
                watch.look(chunk, where, batch)
                if self.all_meant:
                    for sample in batch:
                        sample["completion_mask"] = np.ones(len(sample["input_ids"]), np.uint8)
                for place, sample in zip(chunk.numbers, batch, strict=True):
                    self._terms.add(sample, f"{source.unit} {place}")
                self.places = [(source.path, source.unit, number) for number in chunk.numbers]
                done += len(batch)
                if progress is not None:
                    progress(done)
                yield batch
            if start and source.size is not None:  # all of it was skipped; a JSONL file knows its size by now
                start -= source.size
        self._current = len(self._sources)
        if whole or self._encode:
            self.check_terms(whole)

    def check_terms(self, whole: bool = True) -> None:
        """Look at what the running `batches()` has read, which does so itself at its end: ReadError where it holds no
        loss term, a ReadWarning where some conversations hold none. `whole`: it is all that is wanted."""
        roles = self._encode.untrained if self._encode else ()
        self._terms.check(whole, self.columns.get("completion_mask", "the mask"), roles)

    def __repr__(self) -> str:
        size = "samples" if self.size is None else f"{self.size} samples"
        return f"Rollouts({self.path!r}, {self.format}, {size}; {self.account})"


def open_rollouts(
    path: str | os.PathLike[str] | Any, *, columns: Mapping[str, str] | None = None, tokenizer: str | None = None
) -> Rollouts:
    """Open rollouts for reading; bounded memory, whatever the size.

    Arguments:
        path: a JSON file (.jsonl, .ndjson, .json, and with .gz or .zst: an object per line, or one array), a Parquet
            or NPZ file, a folder of `datasets.Dataset.save_to_disk`, a folder of such files and folders, or a glob of
            files of one format. Or a table in memory: a pandas DataFrame, a pyarrow Table, a Dataset of `datasets` or
            a slice of one, a list of dicts.
        columns: canonical name -> name in the file, where `readers.USUAL` does not find it; an empty name leaves a
            column out. Any other canonical name adds a further column. Where rows hold several samples, a path:
            "trajectory[].tokens.prompt_ids".
        tokenizer: a tokenizer folder, for chat messages; see `readers.chat.ChatEncoder` for what is trained.

    Raises:
        ReadError: nothing there, nothing that can be read, no token ids.
        ModuleNotFoundError: a format whose package is not installed.

    >>> rollouts = open_rollouts("rollouts.jsonl")                                         # doctest: +SKIP
    >>> for samples in rollouts.batches():                                                 # doctest: +SKIP
    ...     packed = treepack.pack(samples, max_tokens=16384)
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else Table(path)
    return open_columns(name, columns or {}, tokenizer, columns or {})


def open_columns(
    name: str | Table,
    columns: Mapping[str, str],
    tokenizer: str | None,
    named: Mapping[str, str],
    *,
    elsewhere: Collection[str] = (),
    apart: bool = False,
) -> Rollouts:
    """What `open_rollouts` opens.

    columns: canonical name -> column. named: those of them that a user named. elsewhere: columns that somebody else
    reads, which are not looked at. apart: a completion that begins with its prompt is refused.
    """
    sources: list[Source]
    if isinstance(name, Table):
        label, format, sources, digest = str(name.path), "table", [name], name.digest()
    else:
        label, digest = name, ""
        format, sources = open_sources(name)
    head = head_of(sources[0])
    chats = chats_in(head)
    sources, given = unfold(sources, columns, head, tokenizer is not None and has_chat(sources[0].names, chats))
    first = sources[0]
    if isinstance(first, Nested):
        head = head_of(first)
    found = resolve(first.path, first.names, given, tokenizer, numbers_in(head), chats)
    found = halves(first.path, first.names, found, given, head)
    _check_alike(sources, found, given)
    watch = _watched(sources, found, named, head, elsewhere)
    encode = ChatEncoder(tokenizer) if tokenizer and form_of(found) in CHATS else None
    files = [source.path for source in sources if not digest]
    fingerprint = _fingerprint(digest or format, files, found, tokenizer if encode else None)
    account = account_of(first.names, found, named, head)
    if tokenizer and encode is None:
        account.notes.append(f"the tokenizer {tokenizer} makes no ids: the file has token ids, and no chat is read")
    return Rollouts(label, format, found, fingerprint, sources, encode, account, watch, says_all(found, head), apart)


def _watched(
    sources: list[Source], found: Mapping[str, str], given: Mapping[str, str], head: Chunk, elsewhere: Collection[str]
) -> Watch:
    """What has to be looked at in all rows. ReadError where the first rows of a file, or of the first of several with
    the same columns, tell already."""
    names = list(dict.fromkeys(name for source in sources for name in source.names if name not in elsewhere))
    watch = Watch(found, given, names)
    seen: set[tuple[str, ...]] = set()
    for source in sources:
        key = tuple(sorted(source.names))
        if key not in seen:
            seen.add(key)
            watch.look(head if source is sources[0] else head_of(source), f"{source.path}, {source.unit}")
    return watch


def _check_alike(sources: list[Source], found: Mapping[str, str], given: Mapping[str, str]) -> None:
    """ReadError for a file that lacks a column of the first one, or has one that says what is trained or merged where
    the first one has none; rows of JSON are checked for that when they are read."""
    more = unexpected(found, given)
    for source in sources:
        for name in found.values():
            if name not in source.names:
                raise ReadError(f"{source.path}: no column {name!r}, which {sources[0].path} has")
        for name in source.names:
            if name in more:
                raise ReadError(
                    f"{source.path}: it has the column {name!r}, which {sources[0].path} has not; give it in every "
                    f"file, or leave it out with --column {more[name]}="
                )
        rows = source.source if isinstance(source, Nested) else source
        if isinstance(rows, JsonLines | JsonElements):
            rows.unexpected = more


def _fingerprint(format: str, files: list[Path], columns: dict[str, str], tokenizer: str | None) -> str:
    """Of names, sizes and times, nothing that has to be read."""
    folders = [*files, *([Path(tokenizer)] if tokenizer else [])]
    members = [file for path in folders for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in members]
    text = json.dumps([format, sorted(columns.items()), tokenizer, stats])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
