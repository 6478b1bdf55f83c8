"""What of a tree belongs to one range of its rows, in the names of a `PackedTree`: views and gathered tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention import TreeTiles
from ..tree.ranges import Range
from ..tree.tree import PackedTree

__all__ = ["Blank", "Rows", "terms_by_range", "tiles_of"]

Index = npt.NDArray[np.int32]

#: Kernels want the queries to begin at a multiple of this among the keys.
_TILE = 128


class _Taken(Mapping[str, Tensor]):
    """Columns of the tree, of which each is taken at the places of a range when it is asked for."""

    def __init__(self, columns: Mapping[str, Tensor], places: Any):
        self._columns, self._places = columns, places

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name][self._places]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def terms_by_range(tree: PackedTree[Tensor], edges: Index) -> list[Tensor]:
    """For each range between two of the edges (K + 1,) the numbers of its terms, those that are scored at one of its
    positions, ascending; int64 on the device of the tree."""
    host = tree.numpy()
    place = host.row_position[host.term_row]
    of_range = np.searchsorted(edges, place, side="right") - 1
    order = torch.from_numpy(np.argsort(of_range, kind="stable")).to(tree.buffer.device)
    counts = np.bincount(of_range, minlength=len(edges) - 1)
    return list(torch.split(order, counts.tolist()))


class Rows:
    """Rows [start, stop) of a tree on its device. Positions and rows are counted from the first of the range."""

    def __init__(self, tree: PackedTree[Tensor], where: Range, term_index: Tensor):
        self._tree, self.where = tree, where
        self.term_index = term_index
        self._at = slice(where.start, where.stop)
        rows = tree.numpy().row_position
        first, last = np.searchsorted(rows, (where.start, where.stop)).tolist()
        self._rows = slice(first, last)

    # A tree may be moved, unpickled and looked at without any of these; each is made when it is asked for.

    @property
    def num_tokens(self) -> int:
        return self.where.stop - self.where.start

    @property
    def num_terms(self) -> int:
        return len(self.term_index)

    @property
    def input_ids(self) -> Tensor:
        return self._tree.input_ids[self._at]

    @property
    def position_ids(self) -> Tensor:
        return self._tree.position_ids[self._at]

    @cached_property
    def subtree_end(self) -> Tensor:
        """(n,) of the range alone, without the rows above it."""
        end: Tensor = self._tree.subtree_end[self._at].clamp(max=self.where.stop) - self.where.start
        return end

    @property
    def position_samples(self) -> Tensor:
        return self._tree.position_samples[self._at]

    @property
    def shift_labels(self) -> Tensor:
        return self._tree.shift_labels[self._at]

    @cached_property
    def row_position(self) -> Tensor:
        return self._tree.row_position[self._rows] - self.where.start

    @cached_property
    def term_row(self) -> Tensor:
        row: Tensor = self._tree.term_row[self.term_index] - self._rows.start
        return row

    @cached_property
    def term_target(self) -> Tensor:
        target: Tensor = self._tree.term_target[self.term_index]
        return target

    @cached_property
    def term_sample(self) -> Tensor:
        return self._tree.term_sample[self.term_index]

    @property
    def sampling_mask_counts(self) -> Tensor:
        return self._tree.sampling_mask_counts[self._rows]

    @cached_property
    def sampling_mask(self) -> Tensor:
        counts = self._tree.numpy().sampling_mask_counts
        start = int(counts[: self._rows.start].sum(dtype=np.int64))
        ids: Tensor = self._tree.sampling_mask[start : start + int(counts[self._rows].sum(dtype=np.int64))]
        return ids

    @property
    def terms(self) -> Mapping[str, Tensor]:
        return _Taken(self._tree.terms, self.term_index)

    @property
    def positions(self) -> Mapping[str, Tensor]:
        return _Taken(self._tree.positions, self._at)

    def numpy(self) -> Any:
        """What temperatures by sample are looked up in: the terms of the range and its rows, on the host."""
        host, index = self._tree.numpy(), self.term_index.cpu().numpy()
        return SimpleNamespace(
            term_sample=host.term_sample[index],
            term_row=host.term_row[index] - self._rows.start,
            sampling_mask_counts=host.sampling_mask_counts[self._rows],
        )

    def tiles(self) -> tuple[TreeTiles, int]:
        return tiles_of(self._tree, self.where, self.subtree_end)


class Blank:
    """One row of padding, without terms: a pass over it gives every parameter a gradient of 0."""

    num_tokens, num_terms = 1, 0

    def __init__(self, device: Any):
        none = torch.zeros(0, dtype=torch.int32, device=device)
        self.input_ids = self.position_ids = torch.zeros(1, dtype=torch.int64, device=device)
        self.subtree_end = self.position_samples = torch.zeros(1, dtype=torch.int32, device=device)
        self.shift_labels = torch.full((1,), -100, device=device)
        self.row_position = self.term_row = self.term_target = self.term_sample = none
        self.sampling_mask = self.sampling_mask_counts = none
        self.term_index = none.long()

    def numpy(self) -> Any:
        none = np.zeros(0, np.int32)
        return SimpleNamespace(term_sample=none, term_row=none, sampling_mask_counts=none)

    def tiles(self) -> tuple[TreeTiles, int]:
        return TreeTiles(self.subtree_end, self.position_ids), 0


def tiles_of(tree: PackedTree[Tensor], where: Range, subtree_end: Tensor) -> tuple[TreeTiles, int]:
    """What attention needs to know of a range behind its ancestors, and the rows of padding in front of them.

    Args:
        subtree_end: (n,) of the range, counted from its first row.
    """
    count = len(where.ancestors)
    if not count:
        return TreeTiles(subtree_end, tree.position_ids[where.start : where.stop]), 0
    padding = -count % _TILE
    device = subtree_end.device
    ancestors = torch.from_numpy(where.ancestors).to(device).long()
    above = tree.subtree_end[ancestors].clamp(max=where.stop) - where.start
    before = torch.arange(padding, dtype=torch.int32, device=device)
    end = torch.cat([before, above + (padding + count), subtree_end + (padding + count)])
    depth = torch.cat([before.long(), tree.position_ids[ancestors], tree.position_ids[where.start : where.stop]])
    return TreeTiles(end, depth), padding
