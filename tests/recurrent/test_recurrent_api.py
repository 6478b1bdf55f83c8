"""What the operators of recurrent layers refuse, and what they keep with a tree."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import recurrent_paths as alone  # noqa: E402

import treepack  # noqa: E402
from treepack.attention import tree_tiles  # noqa: E402
from treepack.recurrent import (  # noqa: E402
    TreeSegments,
    tree_conv1d,
    tree_gated_delta_rule,
    tree_kda,
    tree_linear_attention,
    tree_mamba2,
    tree_segments,
)

TREE = tree_tiles(torch.tensor([4, 2, 4, 4]))


def inputs(kind, **changes):
    return {**{name: x.detach() for name, x in alone.random_inputs(kind, 4).items()}, **changes}


REFUSED = [
    (tree_conv1d, "conv", {"x": torch.ones(2, 4, 5)}, ValueError, r"x must have 2 dimensions.*\(2, 4, 5\)"),
    (tree_conv1d, "conv", {"x": torch.ones(5, 5)}, ValueError, "x has 5 tokens, the tree 4"),
    (tree_conv1d, "conv", {"x": torch.ones(4, 5).long()}, TypeError, "x must hold floats, not torch.int64"),
    (tree_conv1d, "conv", {"x": np.ones((4, 5))}, TypeError, "x must be a torch tensor, not a ndarray"),
    (tree_conv1d, "conv", {"x": torch.ones(4, 5, device="meta")}, ValueError, "x is on meta, the tree on cpu"),
    (tree_conv1d, "conv", {"weight": torch.ones(3, 4)}, ValueError, r"weight must be \(5, W\).*not \(3, 4\)"),
    (tree_conv1d, "conv", {"bias": torch.ones(3)}, ValueError, r"bias must be \(5,\).*not \(3,\)"),
    (tree_conv1d, "conv", {"activation": "gelu"}, ValueError, "activation='gelu' is unknown"),
    (tree_conv1d, "conv", {"impl": "cuda"}, ValueError, "impl='cuda' is unknown; choose one of .*reference"),
    (tree_gated_delta_rule, "delta", {"q": torch.ones(4, 1, 5)}, ValueError, "q and k must have one shape"),
    (tree_gated_delta_rule, "delta", {"v": torch.ones(4, 3, 3)}, ValueError, "multiple of the heads of q and k"),
    (tree_gated_delta_rule, "delta", {"v": torch.ones(4, 4, 3).half()}, TypeError, "must have one dtype"),
    (tree_gated_delta_rule, "delta", {"g": torch.ones(4, 2)}, ValueError, r"g must be \(4, 4\).*not \(4, 2\)"),
    (tree_gated_delta_rule, "delta", {"beta": torch.ones(4, 2)}, ValueError, r"beta must be \(4, 4\)"),
    (tree_kda, "kda", {"g": torch.ones(4, 4, 3)}, ValueError, r"g must be \(4, 4, 5\).*channel of k"),
    (tree_kda, "kda", {"g": torch.ones(4, 4)}, ValueError, "g must have 3 dimensions"),
    (tree_linear_attention, "linear", {"g": torch.ones(4, 2)}, ValueError, r"g must be \(4, 4\)"),
    (tree_mamba2, "mamba2", {"A": torch.ones(2)}, ValueError, r"A must be \(4,\), one per head of x"),
    (tree_mamba2, "mamba2", {"D": torch.ones(4, 2)}, ValueError, r"D must be \(4, 3\)"),
    (tree_mamba2, "mamba2", {"dt": torch.ones(4, 1)}, ValueError, r"dt must be \(4, 4\)"),
    (tree_mamba2, "mamba2", {"dt_limit": (1.0, 0.0)}, ValueError, r"dt_limit must be \(least, most\)"),
]


@pytest.mark.parametrize(("operator", "kind", "changes", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(operator, kind, changes, error, message):
    with pytest.raises(error, match=message):
        operator(**inputs(kind, **changes), tree=TREE)


def test_not_a_tree():
    (packed,) = treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=8)
    ends = SimpleNamespace(subtree_end=torch.tensor([[2, 2]]))
    for tree, error, message in [
        (None, TypeError, "tree must be a PackedTree or a TreeTiles .*not a NoneType"),
        (packed, TypeError, r"the tree holds NumPy arrays: move it .*tree.to\(device\)"),
        (ends, TypeError, r"subtree_end must be \(N,\) int32 or int64, not \(1, 2\)"),
        (SimpleNamespace(subtree_end=torch.tensor([2, 9])), ValueError, "subtree_end of token 1 is 9, outside 1..2"),
        (SimpleNamespace(subtree_end=torch.tensor([2, 0])), ValueError, "subtree_end of token 1 is 0"),
        (
            SimpleNamespace(subtree_end=torch.tensor([2, 3, 3])),
            ValueError,
            "token 1 is 3, that of its ancestor 0 is 2.*not the subtrees of a forest",
        ),
    ]:
        with pytest.raises(error, match=message):
            tree_segments(tree)


def test_segments_of_a_packed_tree():
    #   1 2 3 -+- 4 5      a sample ends after 3 and one after 4: neither is a fork of states
    #          +- 6
    samples = [{"input_ids": ids} for ids in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 6], [7])]
    (packed,) = treepack.pack(samples, max_tokens=16, pad_to_multiple_of=8)
    tree = packed.to("cpu")
    segments = tree_segments(tree)
    assert tree_segments(tree) is segments
    assert tree_segments(segments) is segments
    assert segments.cu_segments.tolist() == [0, 3, 5, 6, 7]
    assert segments.segment_parent.tolist() == [-1, 0, 0, -1]
    assert segments.parent.tolist() == packed.parent.tolist()
    assert segments.real.tolist() == [True] * 7 + [False]
    assert segments.padded


def test_tiles_keep_their_segments():
    tiles = tree_tiles(torch.tensor([4, 2, 4, 4]))
    segments = tree_segments(tiles)
    assert isinstance(segments, TreeSegments)
    assert tree_segments(tiles) is segments
    assert not segments.padded


def test_a_tree_made_in_inference_mode_can_be_trained_on():
    (packed,) = treepack.pack([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}], max_tokens=8)
    tree = packed.to("cpu")
    values = alone.random_inputs("conv", tree.num_tokens)
    with torch.inference_mode():
        tree_conv1d(**values, tree=tree)
    tree_conv1d(**values, tree=tree).sum().backward()
    assert values["x"].grad.any()
