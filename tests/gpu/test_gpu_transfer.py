"""A packed tree on the device; needs the native extension (`treepack._core`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("treepack._core", reason="the checkout has no native extension")

import treepack
from treepack import synthetic
from treepack.attention import tree_attention


def test_a_tree_moves_in_one_copy_and_runs(monkeypatch):
    tree = treepack.pack(synthetic.multi_turn(), max_tokens=65_536)[0]
    copies = []
    to = torch.Tensor.to

    def counted(self, *args, **kwargs):
        copies.append(self.is_pinned())
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    moved = tree.to("cuda")
    monkeypatch.undo()
    assert copies == [True]
    for name in tree._fields:
        assert torch.equal(moved._array(name).cpu(), torch.from_numpy(tree._array(name)))
    q, k, v = (torch.randn(1, heads, tree.num_tokens, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    by_host_lists = tree_attention(q, k, v, moved)
    by_device_lists = tree_attention(q, k, v, subtree_end=moved.subtree_end)
    assert torch.equal(by_host_lists, by_device_lists)
