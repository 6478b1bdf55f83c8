"""Units of trees -> Parquet shards and their manifest, in bounded memory; what is killed can be continued.

A shard is written under another name, flushed to disk, renamed and then entered into the manifest. Shards end where
units end, so a run continues at the first row that is in no finished shard, and writes the bytes that an uninterrupted
run writes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .._core import PackError
from .._version import __version__
from ..inputs.account import ColumnAccount
from ..readers.source import first_line
from ..tree.layout import formats_of
from . import manifest as manifests
from .arrow import pa, pq
from .lock import NAME as LOCK
from .lock import locked
from .manifest import Manifest, Shard
from .options import Options
from .rows import table_of
from .schema import LAYOUT_VERSION, arrow_schema, delta_columns, dictionary_columns, formats_in
from .units import Unit, units

#: A row group ends with the first tree with which it holds this many positions: a tree of usual size is read alone, and
#: small ones do not drown in footers.
ROW_GROUP_TOKENS = 1 << 14
#: Samples of a batch of the reader, at most; it has fewer where they are long.
_BATCH = 1024


#: What the metadata of every shard has.
_LAYOUT = "treepack.layout_version"


class Rows(Protocol):
    """Rows of an input, in order: samples, or pairs. `treepack.readers.open_rollouts` gives one."""

    @property
    def fingerprint(self) -> str: ...
    def batches(self, samples: int = ..., *, start: int = ...) -> Iterator[list[Any]]: ...


class Progress(NamedTuple):
    """How far a run is: over all finished shards and the open one."""

    rows: int
    raw_tokens: int
    packed_tokens: int
    trees: int
    shards: int
    """Finished ones."""


def write(
    rows: Rows,
    out: str | os.PathLike[str],
    options: Options,
    *,
    source: str = "",
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Pack rows and write the trees to a folder.

    Arguments:
        rows: samples as `treepack.pack` takes them, or `pairs.Pair` where `options.pairs`.
        out: the folder; made where there is none.
        options: how to pack.
        source: the name of the input, for the manifest.
        resume: continue what is there; without anything there, start.
        overwrite: drop what is there.
        progress: called after each unit and each shard.

    Raises:
        PackError: a sample that cannot be packed; a folder that holds shards, without `resume` or `overwrite`; shards
            of other options or another input.
    """
    folder = Path(out)
    wanted = Manifest(
        options=options.for_manifest(),
        source={"name": source, "fingerprint": rows.fingerprint, "columns": _account(rows)},
        treepack=__version__,
    )
    if resume and overwrite:
        raise PackError("resume and overwrite are both given; allowed is one of them")
    with _made(folder), locked(folder):
        manifest = _begin(folder, wanted, resume, overwrite)
        if manifest.finished:
            return manifest
        batches = rows.batches(_BATCH, start=manifest.rows)
        stream = (row for batch in batches for row in batch)
        _Writer(folder, manifest, options, progress).run(units(stream, options, manifest.rows))
    return manifest


def _account(rows: Rows) -> dict[str, Any] | None:
    """What became of the columns of the input, where it says so."""
    account = getattr(rows, "account", None)
    return account.to_json() if isinstance(account, ColumnAccount) else None


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder, made where there is none; what was made goes again where an error leaves it empty."""
    new: list[Path] = []
    try:
        _make(folder, new)
        yield
    except BaseException:
        with suppress(OSError):  # it holds shards, say, or another run's files
            for path in new:
                path.rmdir()
        raise


def _make(folder: Path, new: list[Path]) -> None:
    """The folder, where there is none; `new` takes what is not there yet, the innermost first. PackError where one
    holds other files, and no packing that could be continued or replaced: shards among them would be taken for a part
    of them, and they for a part of the shards."""
    try:
        new += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise PackError(f"{folder}: no folder can be made there: {error.strerror or error}") from None
    others = [name for name in names if not _OURS.fullmatch(name)]
    if others and manifests.NAME not in names:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise PackError(f"{folder} holds other files ({shown}); shards want a folder of their own: name another one")


#: What a run leaves in its folder, and what systems put into any.
_OURS = re.compile(
    rf"shard-\d+\.parquet|\.shard-\d+\.parquet\.part|\.?{re.escape(manifests.NAME)}(\.part)?|{re.escape(LOCK)}"
    r"|\.DS_Store|Thumbs\.db|desktop\.ini|lost\+found"
)


def _begin(folder: Path, wanted: Manifest, resume: bool, overwrite: bool) -> Manifest:
    """The manifest to go on from, written to the folder."""
    manifest = None if overwrite else manifests.read(folder)
    if manifest is not None and manifest.empty:
        manifest = wanted  # killed before its first shard
        resume = True
    shards = sorted(folder.glob("shard-*.parquet"))
    finished = {shard.file for shard in manifest.shards} if manifest else set()
    _only_ours(folder, [path for path in shards if path.name not in finished])
    if manifest is None and shards and not overwrite:
        raise PackError(
            f"{folder} holds shards without a {manifests.NAME}: start over with --overwrite, or name another folder"
        )
    if manifest is not None and not resume:
        state = "finished" if manifest.finished else f"begun, with {len(manifest.shards)} shards"
        raise PackError(
            f"{folder} holds a packing ({state}): continue it with --resume (resume=True), start over with "
            "--overwrite, or name another folder"
        )
    if manifest is None:
        manifest = wanted
    else:
        manifest.continues(wanted, folder)
        for shard in manifest.shards:
            path = folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise PackError(f"{path} is missing or was changed: start over with --overwrite")
    if not manifest.finished:
        # Before its files, so that what is killed in between never names a file that is gone.
        with _writing(folder / manifests.NAME):
            manifest.write(folder)
            for path in (*shards, *folder.glob(".shard-*.part"), *folder.glob(f".{manifests.NAME}.part")):
                if path.name not in finished:
                    path.unlink(missing_ok=True)
    return manifest


def _only_ours(folder: Path, shards: Iterable[Path]) -> None:
    """PackError for a file that treepack did not write and would be replaced: it may be the only copy of something."""
    manifests.check_kind(folder)
    for path in shards:
        try:
            metadata = pq.read_schema(path.absolute()).metadata or {}
        except (OSError, UnicodeError, pa.ArrowException):
            metadata = {}
        if _LAYOUT.encode() not in metadata:
            raise PackError(f"{path} was not written by treepack, and a shard would replace it: name another folder")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """PackError for what goes wrong while a file is written: a full disk, a folder that became read-only."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise PackError(
            f"{path}: it cannot be written: {first_line(error)}; what is finished stays, and --resume (resume=True) "
            "goes on from there"
        ) from None


class _Writer:
    """The open shard of a run and its counts."""

    def __init__(self, folder: Path, manifest: Manifest, options: Options, progress: Callable[[Progress], None] | None):
        self._folder, self._manifest, self._options, self._progress = folder, manifest, options, progress
        self._schema: Any = None
        self._file: Any = None
        self._sink: Any = None
        self._group: list[Any] = []
        self._counts = _no_counts()
        if manifest.shards:
            # Its columns alone: a schema that was read differs in what does not matter, and bytes would differ too.
            first = folder / manifest.shards[0].file
            self._schema = arrow_schema(formats_in(pq.read_schema(first.absolute()), str(first)), self._metadata())

    def run(self, made: Iterable[Unit]) -> None:
        try:
            for unit in made:
                self._add(unit)
                self._tell()
                if self._counts["packed_tokens"] >= self._options.shard_tokens:
                    self._close_shard()
                    self._tell()
            self._close_shard()
            self._manifest.finished = True
            self._write_manifest()
        finally:
            if self._sink is not None:
                for opened in filter(None, (self._file, self._sink)):
                    with suppress(OSError, pa.ArrowException):
                        opened.close()
                self._part.unlink(missing_ok=True)
            if self._manifest.empty:
                (self._folder / manifests.NAME).unlink(missing_ok=True)
        self._tell()

    @property
    def _part(self) -> Path:
        return self._folder / f".{self._name}.part"

    @property
    def _name(self) -> str:
        return f"shard-{len(self._manifest.shards):05}.parquet"

    def _add(self, unit: Unit) -> None:
        for tree in unit.trees:
            if self._schema is None:
                self._schema = arrow_schema(formats_of(tree), self._metadata())
            if self._sink is None:
                with _writing(self._part):
                    self._sink = self._part.open("wb")  # pyarrow would take a name with a colon for an address
                    self._file = parquet_writer(self._sink, self._schema)
            self._group.append((tree, unit.first_sample))
            if sum(pending.num_tokens for pending, _ in self._group) >= ROW_GROUP_TOKENS:
                self._write_group(unit)
        # Not later than here: a tree keeps the memory of its whole window.
        self._write_group(unit)
        counts = self._counts
        counts["rows"] += unit.rows
        counts["trees"] += len(unit.trees)
        unit.trees.clear()  # whoever holds the unit while the next one is made holds no memory
        counts["skipped"] += unit.skipped
        for stats in unit.stats:
            for name in _SUMMED:
                counts[name] += getattr(stats, name)

    def _write_group(self, unit: Unit) -> None:
        if not self._group:
            return
        trees, first_samples = zip(*self._group, strict=True)
        self._group = []
        try:
            table = table_of(trees, first_samples, self._schema)
        except PackError as error:
            what = "pairs" if self._options.pairs else "samples"
            error.source = f"{what} {unit.first} to {unit.first + unit.rows - 1}"
            raise
        with _writing(self._part):
            self._file.write_table(table, row_group_size=len(trees))

    def _close_shard(self) -> None:
        counts, manifest = self._counts, self._manifest
        if self._sink is not None:
            with _writing(self._part):
                self._file.close()
                self._sink.flush()
                os.fsync(self._sink.fileno())
                size = self._sink.tell()
                self._sink.close()
                os.replace(self._part, self._folder / self._name)
            self._file = self._sink = None
            manifest.shards.append(Shard(file=self._name, first_row=manifest.rows, bytes=size, **counts))
        manifest.rows += counts["rows"]
        manifest.skipped += counts["skipped"]
        self._counts = _no_counts()
        self._write_manifest()

    def _write_manifest(self) -> None:
        with _writing(self._folder / manifests.NAME):
            self._manifest.write(self._folder)

    def _tell(self) -> None:
        if self._progress is None:
            return
        shards, counts = self._manifest.shards, self._counts
        total = {name: counts[name] + sum(getattr(shard, name) for shard in shards) for name in _REPORTED}
        self._progress(Progress(rows=self._manifest.rows + counts["rows"], shards=len(shards), **total))

    def _metadata(self) -> dict[str, str]:
        """What a shard says about itself without its folder."""
        return {
            "treepack.version": self._manifest.treepack,
            _LAYOUT: str(LAYOUT_VERSION),
            "treepack.options": json.dumps(self._manifest.options),
            "treepack.source": json.dumps(self._manifest.source),
        }


_SUMMED = (
    "samples",
    "raw_tokens",
    "packed_tokens",
    "padding",
    "terms",
    "attention_pairs",
    "attention_pairs_alone",
)
_REPORTED = ("raw_tokens", "packed_tokens", "trees")


def _no_counts() -> dict[str, int]:
    return dict.fromkeys(("rows", "trees", "skipped", *_SUMMED), 0)


def parquet_writer(file: Any, schema: Any) -> Any:
    """A writer of one shard to an open file, with the encodings that keep integer arrays small."""
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=dictionary_columns(schema.names),
        column_encoding=delta_columns(),
        write_statistics=False,
    )
