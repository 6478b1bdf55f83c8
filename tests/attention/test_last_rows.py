"""Queries that are the last rows of a forest: as a range of a tree behind the keys of its ancestors."""

from __future__ import annotations

import random

import forests
import pytest

torch = pytest.importorskip("torch")

from treepack.attention import tree_attention, tree_tiles  # noqa: E402

OPTIONS = ({}, {"sliding_window": 7, "softcap": 2.0, "scale": 0.4})


def drawn(seed: int, tokens: int, padding: int = 0) -> torch.Tensor:
    nests = forests.random_nests(random.Random(seed), tokens)
    return torch.from_numpy(forests.layout(nests, padding=padding).subtree_end)


def leaves(n: int, queries: int, seed: int = 0, values: int = 8) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((queries, 4, 8), (n, 2, 8), (n, 2, values))
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def both(end: torch.Tensor, queries: int, values: int = 8, **options) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output, lse and gradients of the last rows alone, and of all rows where only the last ones give a loss."""
    n = len(end)
    q, k, v = leaves(n, queries, values=values)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    rows = [torch.randn(n - queries, 4, 8, dtype=torch.float64), q]
    weight = torch.randn(queries, 4, values, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for query in (q, torch.cat(rows)):
        out, lse = tree_attention(query, k, v, subtree_end=end, sinks=sinks, return_lse=True, **options)
        out, lse = out[-queries:], lse[:, -queries:]
        loss = (out * weight).sum() + (lse.T * weight[..., 0]).sum()
        found.append([out, lse, *torch.autograd.grad(loss, (q, k, v, sinks))])
    return found[0], found[1]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_the_last_rows_are_those_of_all_rows(seed, options):
    draw = random.Random(seed)
    end = drawn(seed, draw.randint(2, 90), draw.randint(0, 9))
    for found, wanted in zip(*both(end, draw.randint(1, len(end)), draw.choice((8, 6, 12)), **options), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_range_needs_itself_and_its_ancestors(seed):
    """Rows [a, b) of a tree behind the ancestors of row a give what they give in the whole tree."""
    draw = random.Random(seed)
    end = drawn(seed, 80)
    n = len(end)
    a, b = sorted(draw.sample(range(n + 1), 2))
    above = [row for row in range(a) if end[row] > a]
    q, k, v = leaves(n, n, seed)
    whole = tree_attention(q, k, v, subtree_end=end)[a:b]
    keys = torch.tensor([*above, *range(a, b)])
    p = len(above)
    part_end = torch.tensor([p + min(int(end[row]), b) - a for row in keys], dtype=torch.int32)
    part = tree_attention(q[a:b], k[keys], v[keys], subtree_end=part_end)
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


def test_metadata_are_made_once_for_all_layers():
    tiles = tree_tiles(drawn(0, 300))
    part = tiles.last_rows(100)
    assert part is tiles.last_rows(100)
    assert part.above == 256
    assert len(part.subtree_end) == 356
    assert part.subtree_end[:56].tolist() == list(range(56))
    assert (part.subtree_end[56:] == tiles.subtree_end + 56).all()
    exact = tiles.last_rows(300 - 128)
    assert exact.above == 128
    assert exact.lists(128) is not None
    assert all(a is b for a, b in zip(exact.lists(128), tiles.lists(128), strict=True))


def test_the_schedule_lists_the_tiles_of_the_queries_first():
    part = tree_tiles(drawn(1, 700)).last_rows(250)
    tiles = len(part.subtree_end) // 128 + (len(part.subtree_end) % 128 > 0)
    first = part.above // 128
    order = part.schedule()[:, 0].tolist()
    assert sorted(order[: tiles - first]) == list(range(first, tiles))
    assert sorted(order[tiles - first :]) == list(range(first))


def test_an_item_of_dkv_counts_the_queries_of_its_tile():
    """A prompt of eight tiles, the queries in the last: all key tiles take as long, so none is split."""
    end = torch.full((1024,), 1024, dtype=torch.int32)
    whole, part = tree_tiles(end), tree_tiles(end).last_rows(128)
    from treepack.attention.tiles import backward_items

    assert backward_items(whole.schedule(), 8, 2, 12)[0] > 0
    items = backward_items(part.schedule(), 8, 2, 12, above=part.above)
    assert items[0] == 0
    assert sorted(items[1:17].tolist()) == list(range(16))


def test_more_queries_than_keys_are_refused():
    q, k, v = leaves(5, 6)
    with pytest.raises(ValueError, match=r"q that or a shorter one.*q \(6, 4, 8\), k \(5, 2, 8\)"):
        tree_attention(q, k, v, subtree_end=drawn(0, 5))
    with pytest.raises(ValueError, match=r"subtree_end is \(4,\) for 5 tokens"):
        tree_attention(q[:2], k, v, subtree_end=drawn(0, 4))


@pytest.mark.parametrize("impl", ["flex", "fa4"])
def test_other_implementations_take_whole_forests(impl):
    q, k, v = leaves(5, 2)
    with pytest.raises(ValueError, match="takes whole forests: q has 2 rows, k and v 5"):
        tree_attention(q, k, v, subtree_end=drawn(0, 5), impl=impl)
