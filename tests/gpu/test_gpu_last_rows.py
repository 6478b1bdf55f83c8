"""Queries that are the last rows of a forest: both sets of kernels, every feature, equal bits, nothing outside."""

from __future__ import annotations

import pytest
import torch
from compare import check, evaluate, leaves, random_tree, tree

from treepack.attention import tree_attention, tree_tiles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# (tokens, queries, padding): on and off the tiles' edges, one row, almost all, a whole tile above that nothing sees.
SHAPES = [(300, 100, 0), (384, 128, 0), (640, 256, 17), (700, 1, 0), (700, 699, 5), (1500, 333, 40), (130, 2, 0)]


@pytest.mark.parametrize("impl", ["triton", "triton_plain"])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("tokens", "queries", "padding"), SHAPES)
def test_right(impl, size, tokens, queries, padding):
    end = random_tree(tokens, padding=padding)
    check(end, leaves(tokens + padding, 8, 2, size, queries=queries + padding), impl, sinks=queries % 2 == 0)


@pytest.mark.parametrize("layout", ["columns", "rows", "strided", "misaligned"])
@pytest.mark.parametrize("impl", ["triton", "triton_plain"])
def test_layouts(impl, layout):
    check(random_tree(500, 1), leaves(500, 4, 2, 64, layout=layout, queries=220), impl)


@pytest.mark.parametrize("size", [80, 96, 256])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 70}, {"softcap": 3.0}, {"sliding_window": 150, "softcap": 2}]
)
def test_features(size, options):
    check(random_tree(600, 2), leaves(600, 4, 2, size, queries=311), sinks=True, **options)


@pytest.mark.parametrize("layout", ["columns", "latent"])
def test_two_head_sizes(layout):
    check(random_tree(600, 2), leaves(600, 4, 4, 192, layout=layout, queries=311, values=128), sinks=True)


@pytest.mark.parametrize("split", [True, False])
def test_both_forms_of_dkv(monkeypatch, split):
    from treepack.attention import operator

    monkeypatch.setattr(operator, "split_heads_override", split)
    for impl in ("triton", "triton_plain"):
        check(random_tree(900, 3), leaves(900, 8, 2, 128, queries=400), impl)


@pytest.mark.parametrize("impl", ["triton", "triton_plain"])
def test_equal_bits_and_those_of_the_whole_forest(impl):
    """Where the queries begin a tile, their output has the bits that it has in a call with all rows."""
    end = tree([(400, [(300, [(200, [])]), (150, [])]), (200, [])])
    n, queries = len(end), len(end) - 512
    q, k, v = leaves(n, 8, 2, 128)
    tiles = tree_tiles(end)

    def attend(q, k, v):
        return tree_attention(q, k, v, tiles, return_lse=True, impl=impl)

    last = [q.detach()[:, :, 512:].requires_grad_(), k, v]
    found = [evaluate(attend, last) for _ in range(3)]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))
    with torch.no_grad():
        out, lse = attend(q, k, v)
    assert torch.equal(found[0][0], out[:, :, 512:])
    assert torch.equal(found[0][1], lse[..., 512:])
    assert found[0][0].shape[2] == queries


def test_one_compilation_for_all_ranges():
    from treepack.attention.hopper import launch as hopper

    def compiled() -> int:
        return sum(len(x.compiled) for x in (hopper.forward_launch, hopper.dq_launch, hopper.dkv_launch))

    def run(tokens, queries):
        end = random_tree(tokens)
        return evaluate(lambda q, k, v: tree_attention(q, k, v, subtree_end=end, return_lse=True),
                        leaves(tokens, 4, 2, 64, queries=queries))  # fmt: skip

    run(300, 300)
    before = compiled()
    for tokens, queries in ((300, 100), (513, 300), (900, 17)):
        run(tokens, queries)
    assert compiled() == before
