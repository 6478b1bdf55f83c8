"""One tree over the ranks of a mesh dimension: what of it this rank runs.

    tree, mesh, "rows" or "heads" -> own rows, the tiles of attention, what is exchanged around it, values of all terms

Both forms run everything but attention on a rank's own rows.

    rows     attention of own rows with all heads; keys and values of the ancestors of the first row come from others
    heads    attention of all rows with a part of the heads

Costs one small all-gather for each object, which compares the trees of the ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention import TreeTiles, tree_attention
from ..tree.ranges import Range
from ..tree.tree import PackedTree
from .exchange import Wire, added_up, gathered
from .hooks import HeadsHook, RowsHook
from .rows import Blank, Index, Rows, terms_by_range
from .split import RowSplit, even_edges, split_rows

__all__ = ["FORMS", "Form", "TreeShard"]

Form = Literal["rows", "heads"]
FORMS: tuple[Form, ...] = ("rows", "heads")


class _Plan(NamedTuple):
    """What is the same on every rank."""

    edges: Index
    split: RowSplit | None
    digest: int
    columns: int


class TreeShard:
    """The part of a tree that one rank of a mesh dimension runs. All ranks of it make theirs at the same time.

    Attributes:
        tree: the whole tree. form: "rows" or "heads". wire: the ranks, and a count of what came from others.
        edges: (ranks + 1,) int32, rank r has the rows [edges[r], edges[r + 1]).
        split: of "rows", what each rank needs of others; else None.
        rows: what belongs to this rank, under the names of a tree, counted from its first row: `input_ids`,
            `position_ids`, `row_position`, `term_row`, `term_index` (which terms of the tree), `terms`. A rank without
            rows runs a row of padding.
        tiles: what attention runs on, the ancestors and own rows or the whole tree.
        hook: what attention exchanges (`hooks`); None where no rank needs anything of another.
    """

    def __init__(self, tree: PackedTree[Tensor], mesh: Any, shard: str = "rows"):
        """
        Args:
            tree: on the device of this rank; the same tree on every rank of the dimension.
            mesh: one dimension of a `torch.distributed.device_mesh.DeviceMesh`.
            shard: the form.

        Raises:
            TypeError: no mesh, not one tree, or one that is still on the host.
            ValueError: a mesh of several dimensions, another form, ranks with different trees, columns or forms.
                What one rank raises, every rank raises, so that none waits.
        """
        self.wire = Wire(mesh)
        trouble: Exception | None = None
        plan = _Plan(np.zeros(1, np.int32), None, 0, 0)
        try:
            plan = _plan(tree, self.wire.size, shard)
        except Exception as error:
            trouble = error
        _compare(self.wire, plan, tree, shard, trouble)
        self.tree, self.form = tree, shard
        self.edges, self.split = plan.edges, plan.split
        rank, device = self.wire.rank, tree.buffer.device
        start, stop = self.edges[rank : rank + 2].tolist()
        self._terms = terms_by_range(tree, self.edges)
        above = self.split.ancestors[rank] if self.split else np.zeros(0, np.int32)
        self.rows: Any = Rows(tree, Range(start, stop, above), self._terms[rank]) if start < stop else Blank(tree)
        self.num_rows: int = stop - start
        """0 where the rank runs a row of padding."""
        whole = TreeTiles(tree.subtree_end, tree.position_ids, tree.tiles), 0
        self.tiles, padding = self.rows.tiles() if self.split else whole
        self.hook: RowsHook | HeadsHook | None = None
        if self.split is None:
            self.hook = HeadsHook(self.wire, np.diff(self.edges).tolist())
        elif any(len(rows) for rows in self.split.ancestors):
            send = [torch.from_numpy(rows).to(device).long() for rows in self.split.send(rank)]
            self.hook = RowsHook(self.wire, send, self.split.receive(rank), padding)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """`treepack.tree_attention` of own rows, for models that call it themselves; every rank calls it for every
        layer.

        Args:
            q: (1, H, n, D) of own rows (one row of padding where there are none). k, v: (1, H_kv, n, D).
            sinks: (H,), of all heads. options: of `tree_attention`: scale, sliding_window, softcap, impl.

        Returns:
            (1, H, n, D), as `tree_attention` of the whole tree has it at these rows.
        """
        if self.hook is not None:
            q, k, v, sinks = self.hook.before(self, q, k, v, sinks)
        out: Any = tree_attention(q, k, v, self.tiles, sinks=sinks, **options)
        return out if self.hook is None else self.hook.after(out)

    def gather(self, values: Tensor) -> Tensor:
        """Values (m, ...) of the terms of this rank -> (M, ...) of all terms, on every rank, in the order of the tree.

        Differentiable: each rank takes its own part of the gradient, so where all ranks compute the same loss the
        gradients of their parameters add up to those of one process.
        """
        return gathered(values, self.wire, self._terms)

    def add_up(self, values: Tensor) -> Tensor:
        """Sums over own rows (n, ...) -> sums over all rows, on every rank; gradients as those of `gather`."""
        return added_up(values, self.wire)

    def __repr__(self) -> str:
        where = f"rows {self.edges[self.wire.rank]} to {self.edges[self.wire.rank + 1]} of {self.tree.num_tokens}"
        return f"TreeShard({self.form!r}, rank {self.wire.rank} of {self.wire.size}: {where})"


def _plan(tree: Any, ranks: int, shard: Any) -> _Plan:
    """Made once for a tree, and kept with it."""
    if shard not in FORMS:
        raise ValueError(f"shard={shard!r}; allowed are {' and '.join(map(repr, FORMS))}")
    if not isinstance(tree, PackedTree):
        many = f" of {len(tree)}: loop over it" if isinstance(tree, list | tuple) else ""
        raise TypeError(f"one PackedTree is needed, not a {type(tree).__name__}{many}")
    if not isinstance(tree.buffer, Tensor):
        raise TypeError("the tree holds NumPy arrays: move it to the model's device first, tree.to(device)")
    key = f"shard.{shard}.{ranks}"
    found: _Plan | None = tree.derived.get(key)
    if found is None:
        # Attention by heads is the same on every rank, so rows are shared out evenly.
        split = split_rows(tree, ranks) if shard == "rows" else None
        edges = even_edges(tree.num_tokens, ranks) if split is None else split.edges
        found = tree.derived[key] = _Plan(edges, split, *_digests(tree, edges))
    return found


#: Where a tree's samples were in the call that packed it, which may differ.
_PLACES = ("sample_index", "position_source")


def _digests(tree: Any, edges: Index) -> tuple[int, int]:
    """Two numbers that two trees have in common only if they are the same: of tokens, forks, terms, kept sets and the
    split; of the columns, with which ranks make their losses."""
    built, columns = (hashlib.blake2b(edges.tobytes(), digest_size=7) for _ in range(2))
    for name, array in tree.numpy().arrays.items():
        if name not in _PLACES:
            hashed = columns if "." in name else built
            hashed.update(f"{name} {array.dtype} {array.shape}".encode())
            hashed.update(array.tobytes())
    return int.from_bytes(built.digest(), "big"), int.from_bytes(columns.digest(), "big")


def _compare(wire: Wire, plan: _Plan, tree: Any, shard: Any, trouble: Exception | None) -> None:
    """Raises on every rank where one of them has another tree or cannot run it."""
    form = FORMS.index(shard) if shard in FORMS else -1
    sizes = (0, 0) if trouble else (tree.num_tokens, tree.num_terms)
    state = [trouble is None, form, *sizes, plan.digest, plan.columns]
    mine = torch.tensor([state], dtype=torch.int64, device=wire.device)
    ranks = wire.gather(mine)[:, 0].tolist()
    if trouble is not None:
        raise trouble
    for rank, (fine, its_form, tokens, terms, digest, columns) in enumerate(ranks):
        where = f"rank {rank} of {wire.name}"
        if not fine:
            raise ValueError(f"{where} could not take its part of the tree; its own error says why")
        if its_form != ranks[0][1]:
            raise ValueError(
                f"{where} has shard={FORMS[its_form]!r}, rank 0 {FORMS[ranks[0][1]]!r}; all ranks need the same"
            )
        if digest != ranks[0][4]:
            raise ValueError(
                f"{where} holds another tree than rank 0: its own has {tokens} positions and {terms} terms, that of "
                f"rank 0 {ranks[0][2]} and {ranks[0][3]}; all ranks of the dimension pass the same tree (data "
                "parallelism is another dimension of the mesh)"
            )
        if columns != ranks[0][5]:
            raise ValueError(
                f"{where} holds the tree of rank 0 with another value in one of its columns, "
                f"{list(tree.column_formats)}: each rank would make a loss of its own; all ranks of the dimension pack "
                "the same samples (what one of them computes or draws, it sends to the others)"
            )
