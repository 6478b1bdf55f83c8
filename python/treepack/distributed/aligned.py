"""Ranks that pack their own samples, made to take the same steps: the same number of micro-batches, one normaliser.

    trees of each rank -> one collective -> the same number of trees on every rank, and the loss terms of all ranks

    trees, terms = align(treepack.pack(mine, max_tokens=16384))
    for tree in trees:
        logits = model(tree)                                     # of the rows; a dummy tree has none
        loss = -(log_probs(logits, tree) * tree.terms["advantage"]).sum() * world_size / terms
        if len(tree.term_row) == 0:
            loss = connect(loss, logits)
        loss.backward()

`world_size`, since DistributedDataParallel and FSDP average gradients over ranks. The sum over all terms is divided
once, by all terms: a mean per micro-batch or per rank would weigh a term by how it was packed.

Costs one collective and, per missing tree, a buffer of about a kilobyte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .._core import PackError
from ..tree.layout import dummy_tree, formats_of
from ..tree.mesh import Mesh, group_of
from ..tree.tree import HostTree

if TYPE_CHECKING:
    from ..inputs.columns import Format

__all__ = ["Aligned", "align", "connect"]


class Aligned(NamedTuple):
    """The trees of this rank, as many as those of every other rank, and the normaliser."""

    trees: list[HostTree]
    """Dummies come last."""
    terms: int
    """Loss terms over all micro-batches and ranks. 0 where no rank has any: skip the step."""


class _Summary(NamedTuple):
    """What a rank tells the others. `formats` is None where it has no tree to tell them from."""

    trees: int
    terms: int
    formats: dict[str, Format] | None
    label: bool


def align(
    trees: Iterable[HostTree], group: dist.ProcessGroup | Mesh | None = None, *, pad_to_multiple_of: int = 1
) -> Aligned:
    """Append dummy trees until every rank has the same number, and count the loss terms of all ranks.

    One `all_gather_object`; every rank of the group must call this, one without samples (`[]`) too. Call it on host
    trees, before `.to(device)`. In a process of its own, without `torch.distributed.init_process_group`, there is one
    rank: the trees stay as they are.

    Args:
        trees: what this rank packed: `Packed`, or a list of trees.
        group: process group, or one dimension of a DeviceMesh; the default group where None. Where ranks run one tree
            together it is the dimension of data parallelism, `mesh["dp"]`: over all ranks the terms of a tree would
            count once for each rank that holds it.
        pad_to_multiple_of: positions of a dummy are rounded up to it, as in `pack`.

    Raises:
        PackError: ranks whose trees differ in branching or in their columns; on every rank, so that none waits. A
            process that was started as one of several (WORLD_SIZE) before `init_process_group`.
    """
    mine, of_ranks = list(trees), group_of(group)
    summary = _Summary(
        len(mine),
        sum(len(tree.term_row) for tree in mine),
        formats_of(mine[0]) if mine else None,
        bool(mine) and _is_label(mine[0]),
    )
    summaries = _gather(summary, of_ranks)
    model = _common(summaries)
    most = max(summary.trees for summary in summaries)
    if model is not None and model.formats is not None:
        mine += [dummy_tree(model.formats, model.label, pad_to_multiple_of) for _ in range(most - len(mine))]
    return Aligned(mine, sum(summary.terms for summary in summaries))


def connect(loss: Tensor, *outputs: Tensor) -> Tensor:
    """loss + 0 * (sum of outputs): the same value, with every parameter behind `outputs` in its graph, gradient 0.

    A dummy tree has no loss terms, so its loss may be a constant, and a rank whose backward skips a parameter keeps the
    others waiting for its gradient. Give what every parameter went into: for a language model its logits, which on a
    dummy are those of zero rows (run the head on zero rows rather than not at all).

    Not computed as a product: outputs that are infinite or NaN leave no trace. Any shapes, with any number of rows.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> connect(torch.tensor(0.0), weight * float("inf")).item()
    0.0
    """
    for output in outputs:
        loss = loss + (output if output.dim() else output[None])[:0].sum()
    return loss


def _gather(summary: _Summary, group: dist.ProcessGroup | None) -> list[_Summary]:
    """Those of all ranks."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if world != "1":
            raise PackError(
                f"WORLD_SIZE is {world} and torch.distributed is not initialized, so the other ranks cannot be asked: "
                "call torch.distributed.init_process_group() first"
            )
        return [summary]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, tuple(summary), group=group)
    return [_Summary(*values) for values in gathered]


def _common(summaries: list[_Summary]) -> _Summary | None:
    """The summary of the first rank that has trees, after a check that those of the others agree with it."""
    first: tuple[int, _Summary] | None = None
    for rank, summary in enumerate(summaries):
        if summary.formats is None:
            continue
        if first is None:
            first = rank, summary
        where, model = first
        if summary.label != model.label:
            kind = {True: "label", False: "token"}
            raise PackError(
                f"rank {rank} packs with branching={kind[summary.label]!r}, rank {where} with {kind[model.label]!r}"
            )
        if summary.formats != model.formats:
            has, other = _shown(summary.formats, model.formats), _shown(model.formats, summary.formats)
            raise PackError(f"rank {rank} has the columns {has}, rank {where} has {other}; all ranks need the same")
    return first[1] if first else None


def _shown(formats: Mapping[str, Format] | None, other: Mapping[str, Format] | None) -> str:
    """The columns of one rank that the other has not, or not with this dtype and row shape."""
    other = other or {}
    kept = {name: row for name, row in (formats or {}).items() if other.get(name) != row}
    return "[" + ", ".join(f"{name} {dtype}{list(tail) if tail else ''}" for name, (dtype, tail) in kept.items()) + "]"


def _is_label(tree: HostTree) -> bool:
    return "shift_labels" in tree.arrays
