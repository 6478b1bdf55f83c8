"""The other implementations, and the kept-set table: the same rules, the same trees."""

from __future__ import annotations

import pytest
import torch
from compare import check, leaves, random_tree, tree
from forests import agent, chain

from treepack.attention import tree_attention
from treepack.tree.kept_sets import kept_set_table


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"sliding_window": 90}], ids=str)
def test_flex(options):
    for n, padding in ((700, 0), (513, 30)):
        check(random_tree(n, padding=padding), leaves(n + padding, 4, 2, 64), impl="flex", **options)


def _fa4():
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError as error:
        pytest.skip(f"FlashAttention-4 is not here: {error}")


@pytest.mark.parametrize(("size", "values"), [(192, 128), (64, 128)])
def test_flex_with_two_head_sizes(size, values):
    check(random_tree(700, padding=9), leaves(709, 4, 4, size, values=values), impl="flex")


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("options", [{"with_lse": False}, {"sinks": True}], ids=str)
def test_fa4(size, options):
    _fa4()
    for end in (random_tree(700), random_tree(513, padding=30), tree(chain(300)), tree(agent(1, 4, 600, 120))):
        check(end, leaves(len(end), 8, 2, size), impl="fa4", **options)


def test_fa4_says_what_it_does_not_take():
    q, k, v = leaves(64, 4, 2, 64)
    with pytest.raises(ValueError, match="sliding_window and softcap"):
        tree_attention(q, k, v, subtree_end=random_tree(64), impl="fa4", sliding_window=3, softcap=1.0)
    with pytest.raises(TypeError, match="float32"):
        tree_attention(q.float(), k.float(), v.float(), subtree_end=random_tree(64), impl="fa4")
    with pytest.raises(ValueError, match="one head size, not 64 for q and k and 32 for v"):
        tree_attention(q, k, v[..., :32], subtree_end=random_tree(64), impl="fa4")


@pytest.mark.parametrize(("rows", "widest"), [(1, 1), (5, 300), (4000, 60), (30_000, 1000)])
def test_scatter_is_bit_equal(rows, widest):
    g = torch.Generator("cuda").manual_seed(rows)
    counts = torch.randint(0, widest + 1, (rows,), generator=g, device="cuda", dtype=torch.int32)
    ids = torch.randint(0, 151_936, (int(counts.sum()),), generator=g, device="cuda", dtype=torch.int32)
    for width in (None, widest + 5):
        for dtype in (torch.int64, torch.int32):
            a, b = (kept_set_table(ids, counts, width, dtype=dtype, impl=impl) for impl in ("triton", "torch"))
            assert torch.equal(a, b)
            assert torch.equal(a.cpu(), kept_set_table(ids.cpu(), counts.cpu(), width, dtype=dtype))
