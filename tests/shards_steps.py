"""What the cases of `shards_worker.py` share: steps over several ranks and those of one process, compared."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from tiny_models import weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import treepack
from treepack.distributed import shard, sum_gradients
from treepack.distributed.split import RowSplit
from treepack.tree.ranges import ancestors_of

FORMS = ("rows", "heads")


class Ranks:
    """The ranks of one run, and what each case found on this one."""

    def __init__(self, world: int):
        self.world, self.rank = world, dist.get_rank()
        self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
        self.square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "sp"))
        self.found: dict[str, dict[str, float] | str] = {}
        self.turn = 0

    def compare(self, case, model, trees, loss_of, *, mesh=None, alone=None, **options):
        """Steps over trees with their rows over the mesh and in one process; differences of values and gradients."""
        mesh = self.mesh if mesh is None else mesh
        values, gradients = steps(model, trees, loss_of, mesh, **options)
        self.turn = (self.turn + 1) % self.world
        if self.turn == self.rank:
            options.pop("shard", None)
            wanted, expected = steps(alone or model, trees, loss_of, **options)
            self.found[case] = {"values": apart(values, wanted), "gradients": worst(gradients, expected)}

    def refused(self, case, call):
        try:
            call()
        except (ValueError, TypeError) as error:
            self.found[case] = f"{type(error).__name__}: {error}"
        else:
            self.found[case] = ""


def weighted(out, tree):
    """A loss of every value that was asked for, each term with a weight of its own."""
    if isinstance(out, torch.Tensor):
        return (out * weights_of(len(out))).sum()
    parts = [x for x in out[:3] if x is not None]
    total = sum(((i + 1) * x * weights_of(len(x)).roll(i)).sum() for i, x in enumerate(parts))
    return total if out.aux_loss is None else total + out.aux_loss


def steps(model, trees, loss_of, mesh=None, **options):
    """(values of every tree, gradients by name) of steps over trees, whose gradients are added up."""
    model.zero_grad()
    values = []
    for tree in trees:
        where = {} if mesh is None else {"mesh": mesh}
        out = treepack.term_log_probs(model, tree, **where, **options)
        loss_of(out, tree).backward()
        values += [out] if isinstance(out, torch.Tensor) else [x for x in (*out[:3], out.aux_loss) if x is not None]
    if mesh is not None:
        sum_gradients(model, mesh)
    gradients = {name: whole_gradient(x.grad).clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return [x.detach() for x in values], gradients


def whole_gradient(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def apart(a, b):
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1)) for x, y in zip(a, b, strict=True) if x.numel())


def worst(found, wanted):
    """Each gradient as a share of its own largest; a key's bias has none, but for rounding."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    return max(float((found[k] - x).abs().max()) / max(float(x.abs().max()), 1e-3 * largest) for k, x in wanted.items())


@contextlib.contextmanager
def split_at(*edges):
    """Trees within this block are split before these rows, wherever they are."""

    def split(tree, ranks):
        cuts = np.array([0, *edges, tree.num_tokens], np.int32)
        assert len(cuts) == ranks + 1
        above = ancestors_of(tree.numpy(), cuts[:-1])
        sizes = np.diff(cuts)
        return RowSplit(cuts, [rows if size else rows[:0] for rows, size in zip(above, sizes, strict=True)])

    with patch.object(shard, "split_rows", split):
        yield


def drawn_split(rng, tree, world):
    return split_at(*np.sort(rng.integers(0, tree.num_tokens + 1, world - 1)).tolist())
