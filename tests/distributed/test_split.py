"""`split_rows` against what the dense mask and a search over all cuts say.

rank 0   0 1 2                0 ─ 1 ┬─ 2 ─ 3        [0, 3)
rank 1         3 4 5                └─ 4 ─ 5        [3, 6)  needs the ancestors of row 3: rows 0, 1, 2 of rank 0
"""

import numpy as np
import pytest
from helpers import as_arrays, sample_lists
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack import PackError
from treepack.distributed.split import RowSplit, even_edges, row_work, split_rows

ranks_of = st.integers(1, 9)


def one_tree(samples, **options):
    (tree,) = treepack.pack(samples, max_tokens=200_000, **options)
    return tree


def rows_of(split, rank):
    return range(split.edges[rank], split.edges[rank + 1])


def needed(tree, rows):
    """Rows outside a range that its rows see, by the dense mask."""
    seen = tree.attention_mask()[rows.start : rows.stop].any(0)
    return [row for row in range(tree.num_tokens) if seen[row] and row not in rows]


def best_cut(work, ranks):
    """Work of the slowest rank in the best of all cuts into so many ranges, by bisection: with a limit, a rank takes
    rows as long as they fit."""
    low, high = max(work), sum(work)
    while low < high:
        limit = (low + high) // 2
        used, load = 1, 0
        for one in work:
            load += one
            if load > limit:
                used, load = used + 1, one
        low, high = (low, limit) if used <= ranks else (limit + 1, high)
    return low


def check(tree, ranks):
    """Every row on one rank, and no rank above the best cut by more than one row's work."""
    split = split_rows(tree, ranks)
    assert isinstance(split, RowSplit)
    assert split.ranks == len(split.ancestors) == ranks
    assert split.edges.dtype == np.int32
    assert [row for rank in range(ranks) for row in rows_of(split, rank)] == list(range(tree.num_tokens))
    work = row_work(tree).tolist()
    slowest = max(sum(work[start:stop]) for start, stop in zip(split.edges, split.edges[1:], strict=False))
    assert slowest <= best_cut(work, ranks) + max(work)
    return split


def test_by_hand():
    tree = one_tree([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 5, 6]}])
    split = split_rows(tree, 2)
    assert split.edges.tolist() == [0, 3, 6]
    assert [x.tolist() for x in split.ancestors] == [[], [0, 1, 2]]
    assert [[x.tolist() for x in split.send(rank)] for rank in range(2)] == [[[], [0, 1, 2]], [[], []]]
    assert [split.receive(rank) for rank in range(2)] == [[0, 0], [3, 0]]
    three = split_rows(tree, 3)
    assert three.edges.tolist() == [0, 2, 4, 6]
    assert [x.tolist() for x in three.ancestors] == [[], [0, 1], [0, 1]]
    assert [x.tolist() for x in three.send(0)] == [[], [0, 1], [0, 1]]
    assert three.receive(2) == [2, 0, 0]


@given(sample_lists(), ranks_of, st.sampled_from(["token", "label"]), st.integers(1, 4))
def test_each_rank_gets_what_its_rows_see(samples, ranks, branching, multiple):
    tree = one_tree(as_arrays(samples), branching=branching, pad_to_multiple_of=multiple)
    split = check(tree, ranks)
    # The planner's rule; padding has no pairs and passes the layers like any row.
    assert row_work(tree).tolist() == (tree.attention_mask().sum(1) + 8192).tolist()
    for rank in range(ranks):
        rows = rows_of(split, rank)
        assert split.ancestors[rank].dtype == np.int32
        assert split.ancestors[rank].tolist() == needed(tree, rows)
        wanted = [[row - rows.start for row in needed(tree, rows_of(split, d)) if row in rows] for d in range(ranks)]
        assert [x.tolist() for x in split.send(rank)] == wanted
        assert split.receive(rank) == [len(split.send(source)[rank]) for source in range(ranks)]
        received = [split.edges[s] + row for s in range(ranks) for row in split.send(s)[rank]]  # in order of the ranks
        assert received == split.ancestors[rank].tolist()


@pytest.mark.parametrize("ranks", [3, 8, 16])
def test_deep_rows_weigh_more(ranks):
    """A sample of 30,000 tokens before short ones: the rank that has its end has far fewer rows than the first."""
    stem = np.arange(30_000) % 97
    tails = [np.concatenate([stem[:at], np.full(500, 100 + at % 7)]) for at in range(0, 3_000, 100)]
    tree = one_tree([{"input_ids": ids} for ids in (stem, *tails)])
    split = check(tree, ranks)
    work = row_work(tree)
    parts = np.add.reduceat(work, split.edges[:-1])
    assert parts.max() <= work.sum() / ranks + work.max()
    assert np.diff(split.edges).max() > 1.5 * np.diff(split.edges).min()
    assert [len(x) for x in split.ancestors] == tree.position_ids[split.edges[:-1]].tolist()


@given(st.integers(0, 50), ranks_of)
def test_even_edges(rows, ranks):
    edges = even_edges(rows, ranks)
    assert edges.dtype == np.int32
    assert (edges[0], edges[-1]) == (0, rows)
    assert {rows // ranks, -(-rows // ranks)} == set(np.diff(edges).tolist())


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_dummy_tree_is_rows_without_ancestors(ranks):
    for multiple in (1, 8):
        (_, dummy) = treepack.pack([{"input_ids": [1, 2]}], max_tokens=8, ranks=2, pad_to_multiple_of=multiple)
        split = check(dummy, ranks)
        assert not any(len(x) for x in split.ancestors)
        assert split.edges[-1] == multiple


def test_the_same_on_a_device_and_of_a_cut_tree():
    samples = [{"input_ids": [1, 2, 3, x, x]} for x in range(5)]
    tree = one_tree(samples)
    wanted = split_rows(tree, 3)
    (in_ranges,) = treepack.pack(samples, max_tokens=6, cut=True)
    pytest.importorskip("torch")
    for other in (tree.to("cpu"), in_ranges):
        found = split_rows(other, 3)
        assert found.edges.tolist() == wanted.edges.tolist()
        assert [x.tolist() for x in found.ancestors] == [x.tolist() for x in wanted.ancestors]


def test_a_number_of_ranks_that_makes_no_sense_is_refused():
    tree = one_tree([{"input_ids": [1, 2]}])
    for ranks in (0, -3):
        with pytest.raises(PackError, match=rf"^ranks is {ranks}; allowed is 1 or more$"):
            split_rows(tree, ranks)
    with pytest.raises(TypeError):
        split_rows(tree, 1.5)
    assert split_rows(tree, np.int64(2)).edges.tolist() == [0, 1, 2]
