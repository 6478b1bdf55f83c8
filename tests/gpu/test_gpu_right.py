"""The Triton kernels against the float64 reference: lengths, head sizes, groups, dtypes, features, layouts, trees
(CASES 18, 25-29, 31, 33)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import forests
import pytest
import torch
from compare import check, evaluate, leaves, random_tree, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treepack.attention import operator as triton_op
from treepack.attention import reference, tree_attention

pytestmark = pytest.mark.parametrize("kernels", ["hopper", "portable"], indirect=True)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 128, 129, 137, 257, 1025, 4099])
def test_lengths(n):
    check(random_tree(n), leaves(n, 2, 1, 64))


@pytest.mark.parametrize("n", [1, 65, 129, 1025])
def test_lengths_of_a_chain(n):
    check(tree(forests.chain(n)), leaves(n, 2, 1, 64))


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_head_sizes(size, dtype):
    check(random_tree(777, padding=30), leaves(807, 4, 2, size, dtype))


@pytest.mark.parametrize(("size", "values"), [(192, 128), (64, 128), (96, 64), (80, 256)])
@pytest.mark.parametrize("layout", ["columns", "latent"])
def test_two_head_sizes(size, values, layout):
    check(random_tree(777, padding=30), leaves(807, 4, 2, size, layout=layout, values=values))


@pytest.mark.parametrize("split", [False, True], ids=["looped", "split"])
def test_latent_attention(split):
    """The head sizes of DeepSeek-V3 and Kimi, with every option, in float16, and in both forms of dK/dV."""
    triton_op.split_heads_override = split
    check(random_tree(1100, padding=20), leaves(1120, 4, 4, 192, layout="latent", values=128), **FEATURES["all"])
    check(random_tree(700), leaves(700, 6, 2, 192, torch.float16, "latent", values=128))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_float32(size):
    check(random_tree(300, padding=5), leaves(305, 2, 1, size, torch.float32))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (12, 2), (7, 1)])
@pytest.mark.parametrize("split", [False, True], ids=["looped", "split"])
def test_groups(heads, kv_heads, split):
    triton_op.split_heads_override = split
    check(random_tree(700), leaves(700, heads, kv_heads, 64))


FEATURES = {
    "window": {"sliding_window": 100},
    "narrow window": {"sliding_window": 1},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": -0.2},
    "all": {"sliding_window": 77, "softcap": 3.0, "sinks": True, "scale": 0.3},
}


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("name", list(FEATURES))
def test_features(name, size):
    check(random_tree(1100, padding=20), leaves(1120, 4, 2, size), **FEATURES[name])


def test_window_on_a_long_chain():
    """Runs of full tiles inside the window, and whole tiles outside it."""
    check(tree(forests.chain(2500)), leaves(2500, 2, 1, 64), sliding_window=900)
    check(
        tree([(500, [(900, []), (700, [(300, []), (40, [])])])], padding=77), leaves(2517, 2, 1, 64), sliding_window=700
    )


@pytest.mark.parametrize("layout", ["columns", "rows", "fused", "strided", "misaligned"])
@pytest.mark.parametrize("size", [64, 80])
def test_layouts(layout, size):
    check(random_tree(400), leaves(400, 4, 2, size, layout=layout))


@pytest.mark.parametrize("layout", ["columns", "rows", "strided"])
def test_no_copy_of_the_inputs(layout, monkeypatch):
    """q, k and v are read where they lie: nobody calls contiguous() on them."""
    tensors = leaves(300, 4, 2, 64, layout=layout)
    pointers = {x.data_ptr() for x in tensors}
    original = torch.Tensor.contiguous

    def spy(self, *args, **kwargs):
        assert self.data_ptr() not in pointers or self.is_contiguous(), "an input was copied"
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "contiguous", spy)
    out = tree_attention(*tensors, subtree_end=random_tree(300))
    torch.autograd.grad(out.sum(), tensors)  # the gradient of a sum is an expanded scalar: strides of 0


def test_upstream_gradients_of_any_stride():
    end, tensors = random_tree(300), leaves(300, 4, 2, 64)
    out = tree_attention(*tensors, subtree_end=end)
    ones = torch.ones_like(out, memory_format=torch.contiguous_format)
    want = torch.autograd.grad(out, tensors, ones, retain_graph=True)
    for dout in (
        ones[..., :1].expand_as(out),
        ones.transpose(1, 2).contiguous().transpose(1, 2),
        ones.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        for a, b in zip(torch.autograd.grad(out, tensors, dout, retain_graph=True), want, strict=True):
            assert torch.equal(a, b)


TREES = {
    "agent": forests.agent(1, 4, 600, 120),
    "two groups": forests.agent(2, 4, 500, 90),
    "documents": forests.docs(9, 130),
    "turns": forests.multiturn(2, 4, 200, 90, 30, 40),
    "one-token segments": [(1, [(1, [(1, [(200, []), (1, [])])]), (1, [])]), (1, []), (1, [])] * 3,
    "long runs between branches": [(300, [(400, []), (300, [(500, []), (300, [])])])],
}


@pytest.mark.parametrize("name", list(TREES))
@pytest.mark.parametrize("size", [64, 128, 256])
def test_trees(name, size):
    end = tree(TREES[name], padding=37)
    check(end, leaves(len(end), 4, 2, size))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_drawn_forests(data):
    n = data.draw(st.integers(1, 900), "tokens")
    seed = data.draw(st.integers(0, 10**6), "seed")
    padding = data.draw(st.sampled_from([0, 0, 1, 70, 200]), "padding")
    branching = data.draw(st.integers(1, 6), "branching")
    options = data.draw(st.sampled_from([{}, {}, {"sliding_window": 100}, {"sinks": True}]), "options")
    end = tree(forests.random_nests(random.Random(seed), n, branching), padding)
    check(end, leaves(len(end), 4, 2, 64, seed=seed), **options)


def test_every_path_alone():
    """Packed against every root-to-leaf path run alone (float64), gradients summed over paths."""
    forest = forests.layout(forests.agent(2, 5, 300, 90))
    n = forest.tokens
    tensors = leaves(n, 4, 2, 64)
    g = torch.Generator("cuda").manual_seed(3)
    weights = [
        torch.randn(1, 4, len(path), 64, generator=g, device="cuda", dtype=torch.float64) for path in forest.paths
    ]

    def loss(attention, tensors, alone):
        total = 0.0
        whole = None if alone else attention(*tensors, torch.from_numpy(forest.subtree_end).cuda())
        for path, weight in zip(forest.paths, weights, strict=True):
            index = torch.from_numpy(path).cuda()
            if alone:
                end = torch.full((len(path),), len(path), device="cuda", dtype=torch.int32)
                out = attention(*(x[:, :, index] for x in tensors), end)
            else:
                out = whole[:, :, index]
            total = total + (out.double() * weight).sum()
        return torch.autograd.grad(total, tensors)

    ours = loss(lambda q, k, v, end: tree_attention(q, k, v, subtree_end=end), tensors, alone=False)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = loss(reference.tree_attention, wide, alone=True)
    eager = loss(lambda q, k, v, end: reference.tree_attention(q, k, v, end, upcast=False), tensors, alone=True)
    for a, b, c in zip(ours, want, eager, strict=True):
        # Eager alone sums the shared tokens' gradients in bfloat16, path by path: the packed kernel may only be better.
        assert (a - b).abs().max() <= 2 * (c - b).abs().max()
        assert (a - b).abs().mean() <= 1.1 * (c - b).abs().mean()


def test_a_dummy_tree_is_valid():
    """One token, and rows of padding only: forward and backward, no 0 / 0."""
    for end in (torch.tensor([1]), torch.tensor([0]), torch.tensor([1, 1, 2, 3]), torch.arange(200)):
        end = end.to("cuda", torch.int32)
        out, lse, *gradients = check(end, leaves(len(end), 2, 1, 64))
        assert all(x.isfinite().all() for x in (out, lse, *gradients))


def test_padding_does_not_change_the_rest():
    forest = forests.random_nests(random.Random(5), 500)
    plain = evaluate(
        lambda q, k, v: tree_attention(q, k, v, subtree_end=tree(forest), return_lse=True), leaves(500, 2, 1, 64)
    )
    grown = [
        torch.cat([x.detach(), torch.full_like(x[:, :, :140], 9.0)], 2).requires_grad_() for x in leaves(500, 2, 1, 64)
    ]
    out = tree_attention(*grown, subtree_end=tree(forest, padding=140))
    assert torch.equal(out[:, :, :500], plain[0])
    assert (out[:, :, 500:] == 0).all()


def test_real_rows():
    """Every .npz with `subtree_end` in the folder TREEPACK_GPU_TREES names (rows packed from real rollouts), cut to
    what float64 can check."""
    folder = os.environ.get("TREEPACK_GPU_TREES")
    files = sorted(Path(folder).glob("*.npz")) if folder else []
    if not files:
        pytest.skip("TREEPACK_GPU_TREES names no folder with .npz files")
    import numpy as np

    for file in files:
        end = torch.from_numpy(np.minimum(np.load(file)["subtree_end"][:6000], 6000)).to("cuda", torch.int32)
        check(end, leaves(len(end), 2, 1, 128))
