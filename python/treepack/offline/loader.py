"""A folder of shards -> a sequence of trees, read one by one when they are asked for.

Opening costs the footers' row counts; a tree costs one row group, which holds little else (`writer.ROW_GROUP_TOKENS`).
Needs no torch, and works as a map-style data set of a torch DataLoader: it can be pickled, and every worker process
opens the files for itself.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from .._core import PackError
from ..readers.source import first_line
from ..tree.layout import KEPT, LABELS, dummy_tree
from ..tree.packed import TreeSequence
from ..tree.tree import HostTree
from . import manifest as manifests
from .arrow import pa, pq
from .pairs import PAIR
from .rows import trees_of
from .schema import FIRST_SAMPLE, LAYOUT_VERSION, formats_in

#: Files that are kept open, with the rows of their row groups.
_OPEN_FILES = 16


def load(
    folder: str | os.PathLike[str],
    *,
    shuffle_seed: int | None = None,
    rank: SupportsIndex = 0,
    world_size: SupportsIndex = 1,
) -> Trees:
    """The trees of a folder that `treepack pack`, `pack_file` or `pack_batch` wrote.

    Tree i of rank r is tree `i * world_size + r` of all, in file order or shuffled. Every rank has the same number:
    where the trees do not go up, the last ranks end with a tree without samples (`treepack.distributed.align` does the
    same), so that every loss term is there exactly once.

    Arguments:
        folder: shards with their manifest, or any folder of Parquet files with these columns.
        shuffle_seed: None for file order; else a permutation of all trees, the same on every rank. Take another one
            for every epoch: `load` itself reads no tree.
        rank, world_size: of this process and of all.

    Raises:
        PackError: no shards there, an unfinished packing, a shard that is missing, or columns that are no trees.

    As a data set of torch, its order drawn anew for each epoch:

        trees = treepack.offline.load("packed", shuffle_seed=epoch)
        loader = torch.utils.data.DataLoader(trees, batch_size=None, num_workers=2)
    """
    path = Path(folder)
    ranks, mine = _number("world_size", world_size), _number("rank", rank)
    if ranks < 1:
        raise PackError(f"world_size is {ranks}; allowed is 1 or more")
    if not 0 <= mine < ranks:
        raise PackError(f"rank is {mine}; with world_size {ranks} allowed are 0 to {ranks - 1}")
    files, counts, multiple = _shards(path)
    order = np.arange(sum(counts))
    if shuffle_seed is not None:
        seed = _number("shuffle_seed", shuffle_seed)
        if seed < 0:
            raise PackError(f"shuffle_seed is {seed}; allowed is 0 or more")
        order = np.random.default_rng(seed).permutation(len(order))
    steps = -(-len(order) // ranks)
    share = order[mine::ranks]
    return Trees(files, counts, share, steps - len(share), multiple)


class Trees(TreeSequence):
    """Trees on disk, by number; made by `load`. Each access reads from disk. Not for two threads at once."""

    def __init__(
        self, files: list[Path], counts: list[int], order: npt.NDArray[np.int64], dummies: int, pad_to_multiple_of: int
    ):
        self.dummies = dummies
        """Trees at the end that have no sample: 1 on some ranks, else 0."""
        self._files = files
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._order = order
        self._multiple = pad_to_multiple_of
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._order) + self.dummies

    @overload
    def __getitem__(self, index: SupportsIndex) -> HostTree: ...
    @overload
    def __getitem__(self, index: slice) -> list[HostTree]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> HostTree | list[HostTree]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = self._place(index)
        if at >= len(self._order):
            return self._dummy()
        return trees_of(self._row(at))[0]

    def __iter__(self) -> Iterator[HostTree]:
        return (self[i] for i in range(len(self)))

    def sample_numbers(self, index: SupportsIndex) -> npt.NDArray[np.int64]:
        """(n,) int64: for each sample of a tree its row in the packed file; for pairs both samples have that of the
        pair. PackError where the shards do not say (`pack_batch` sees batches alone)."""
        at = self._place(index)
        if at >= len(self._order):
            return np.zeros(0, np.int64)
        row = self._row(at)
        tree = trees_of(row)[0]
        if PAIR in tree.samples:
            return np.array(tree.samples[PAIR], np.int64)
        first = row.column(FIRST_SAMPLE)[0].as_py() if FIRST_SAMPLE in row.schema.names else None
        if first is None:
            raise PackError(f"tree {at}: its shard does not say which rows of the input its samples are")
        numbers: npt.NDArray[np.int64] = tree.sample_index.astype(np.int64) + int(first)
        return numbers

    def _place(self, index: SupportsIndex) -> int:
        try:
            return range(len(self))[index]
        except IndexError:
            raise self._index_error(index) from None

    def _row(self, at: int) -> Any:
        """The table of one row that holds a tree."""
        number = int(self._order[at])
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._shard(shard).row(number - int(self._starts[shard]))

    def _shard(self, number: int) -> _Shard:
        if self._process != os.getpid():
            # A forked worker shares the file positions of its parent.
            self._open, self._process = OrderedDict(), os.getpid()
        if number not in self._open:
            self._open[number] = _Shard(self._files[number])
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _dummy(self) -> HostTree:
        first = self._shard(int(np.flatnonzero(np.diff(self._starts))[0])).row(0)
        formats, like = formats_in(first.schema, "the shard"), trees_of(first)[0]
        return dummy_tree(formats, LABELS in like.arrays, self._multiple, kept=KEPT[0] in like.arrays)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict(), "_process": -1}

    def __repr__(self) -> str:
        return f"Trees({len(self)} trees in {len(self._files)} shards)"


class _Shard:
    """An open Parquet file. Keeps the row group that was read last: in file order each is read once."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = pq.ParquetFile(path.absolute(), memory_map=True)  # absolute: see `readers.arrow`
        except (OSError, UnicodeError, pa.ArrowException) as error:
            raise PackError(f"{path}: it cannot be read: {first_line(error)}") from None
        metadata = self._file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._group = -1
        self._table: Any = None

    def row(self, at: int) -> Any:
        group = int(np.searchsorted(self._starts, at, side="right")) - 1
        if group != self._group:
            try:
                self._table, self._group = self._file.read_row_group(group, use_threads=False), group
            except (OSError, pa.ArrowException) as error:
                raise PackError(f"{self._path}, row {at}: it cannot be read: {first_line(error)}; pack again") from None
        return self._table.slice(at - int(self._starts[group]), 1)


def _shards(folder: Path) -> tuple[list[Path], list[int], int]:
    """Files of a folder, the trees of each, and what trees are padded to."""
    manifest = manifests.read(folder)
    if manifest is None:
        return _bare_shards(folder)
    if manifest.layout != LAYOUT_VERSION:
        raise PackError(
            f"{folder} holds trees of layout {manifest.layout}; this treepack reads layout {LAYOUT_VERSION}"
        )
    if not manifest.finished:
        raise PackError(
            f"{folder} holds an unfinished packing ({manifest.rows} rows in {len(manifest.shards)} shards): finish it "
            "with `treepack pack ... --resume`"
        )
    files = [folder / shard.file for shard in manifest.shards]
    for path, shard in zip(files, manifest.shards, strict=True):
        if not path.is_file():
            raise PackError(f"{path} is missing; {manifests.NAME} names it")
        if path.stat().st_size != shard.bytes:
            raise PackError(f"{path} has {path.stat().st_size} bytes; {manifests.NAME} says {shard.bytes}: pack again")
    return files, [shard.trees for shard in manifest.shards], manifest.options["pad_to_multiple_of"] or 1


def _bare_shards(folder: Path) -> tuple[list[Path], list[int], int]:
    """What other tools wrote from the rows of `pack_batch`: Parquet files alone."""
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not files:
        has = "holds no shards" if folder.is_dir() else "is no folder"
        raise PackError(f"{folder} {has}; `treepack pack FILE --out {folder}` makes them")
    counts = []
    for path in files:
        try:
            metadata = pq.read_metadata(path.absolute())
            formats_in(metadata.schema.to_arrow_schema(), str(path))
        except (OSError, UnicodeError, pa.ArrowException) as error:
            raise PackError(f"{path}: not a Parquet file that can be read: {first_line(error)}") from None
        counts.append(metadata.num_rows)
    return files, counts, 1


def _number(name: str, value: Any) -> int:
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError(f"{name} is {value!r}; an integer is needed") from None
