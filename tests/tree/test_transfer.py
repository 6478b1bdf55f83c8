"""The way to a device: one copy of one buffer, names and dtypes kept, tile lists taken along."""

import copy

import numpy as np
import pytest

import treepack
from treepack import synthetic

torch = pytest.importorskip("torch")


@pytest.fixture
def tree():
    return treepack.pack(synthetic.agent(prompt=300, answers=4, answer=50), max_tokens=4096)[0]


def test_one_copy(tree, monkeypatch):
    copies = []
    to = torch.Tensor.to

    def counted(self, *args, **kwargs):
        copies.append(self.numel())
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    moved = tree.to("cpu", pin_memory=False)
    assert copies == [moved.buffer.numel()]
    for name in tree.arrays:  # every array afterwards is a view: nothing is copied again
        _ = moved.arrays[name]
    assert moved.tiles
    assert len(copies) == 1


def test_arrays_keep_names_dtypes_and_values(tree):
    moved = tree.to("cpu")
    assert list(moved.arrays) == list(tree.arrays)
    for name, host in tree.arrays.items():
        there = moved.arrays[name]
        assert there.untyped_storage().data_ptr() == moved.buffer.untyped_storage().data_ptr()
        assert torch.empty(0, dtype=there.dtype).numpy().dtype == host.dtype
        np.testing.assert_array_equal(there.numpy(), host)
    assert moved.num_tokens == tree.num_tokens
    np.testing.assert_array_equal(moved.attention_mask().numpy(), tree.attention_mask())
    for ours, theirs in zip(tree.path_index(), moved.path_index(), strict=True):
        np.testing.assert_array_equal(theirs.numpy(), ours)


def test_tile_lists_travel(tree):
    moved = tree.to("cpu")
    for size, lists in tree.tiles.items():
        for ours, theirs in zip(lists, moved.tiles[size], strict=True):
            np.testing.assert_array_equal(theirs.numpy(), ours)
    again = moved.to("cpu")
    assert again.tiles.keys() == tree.tiles.keys()


def test_kept_set_table(tree):
    table = tree.to("cpu").sampling_mask_table()
    counts = tree.sampling_mask_counts
    assert table.shape == (len(counts), counts.max())
    at = 0
    for row, count in zip(table.tolist(), counts.tolist(), strict=True):
        assert row == tree.sampling_mask[at : at + count].tolist() + [-1] * (len(row) - count)
        at += count


def test_attention_keeps_its_metadata_with_the_tree(tree):
    """Layers that are given the tree share one TreeTiles; it is neither moved nor pickled along."""
    import pickle

    moved = tree.to("cpu")
    q = torch.randn(1, 2, tree.num_tokens, 16)
    first = treepack.tree_attention(q, q, q, moved)
    kept = moved.derived["attention"]
    assert torch.equal(treepack.tree_attention(q, q, q, moved), first)
    assert moved.derived["attention"] is kept
    assert kept.subtree_end.data_ptr() == moved.subtree_end.data_ptr()
    own = torch.arange(tree.num_tokens)  # positions of the caller's own are not the tree's
    treepack.tree_attention(q, q, q, moved, position_ids=own, sliding_window=5)
    assert moved.derived["attention"] is kept
    assert pickle.loads(pickle.dumps(moved)).derived == {}
    assert moved.to("cpu").derived == {}


def _copied(tree):
    moved = tree.to("cpu")
    with torch.inference_mode():
        return copy.deepcopy(moved)


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda tree: tree.to("cpu"), id="first read under it"),
        pytest.param(torch.inference_mode()(lambda tree: tree.to("cpu")), id="moved under it"),
        pytest.param(torch.inference_mode()(lambda tree: tree.to("cpu").to("cpu")), id="moved twice under it"),
        pytest.param(_copied, id="copied under it"),
    ],
)
def test_inference_mode_leaves_nothing_behind(move):
    """Log-probs of an old policy or a reference are taken under inference_mode; the same tree is then trained on."""
    samples = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -1.0, -2.0]},
        {"input_ids": [1, 2, 4], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -1.0, -3.0]},
    ]
    moved = move(treepack.pack(samples, max_tokens=8, branching="label")[0])
    with torch.inference_mode():
        read = [getattr(moved, name) for name, x in vars(treepack.PackedTree).items() if isinstance(x, property)]
        read += [*moved.path_index(), *moved.varlen_index()[:3], moved.attention_mask(), moved.sampling_mask_table()]
        read += [x for lists in moved.tiles.values() for x in lists]
        read += [columns[name] for columns in (moved.terms, moved.samples, moved.positions) for name in columns]
    tensors = [x for x in (moved.buffer, *read, *moved._views.values()) if isinstance(x, torch.Tensor)]
    assert len(tensors) > 30
    assert not [x for x in tensors if x.is_inference()]
    assert moved.terms["old_log_probs"].tolist() == [-1.0, -2.0, -1.0, -3.0]

    scale = torch.ones(moved.num_terms, dtype=torch.float64, requires_grad=True)
    (scale * moved.terms["old_log_probs"]).sum().backward()  # saves the column for its backward pass
    assert scale.grad.tolist() == [-1.0, -2.0, -1.0, -3.0]
