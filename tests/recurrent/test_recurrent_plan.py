"""The walk over a forest: every chunk once, parents before the paths that wait for them, children in a fixed order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import forests  # noqa: E402
import recurrent_paths as alone  # noqa: E402

from treepack.recurrent import tree_segments  # noqa: E402
from treepack.recurrent.plan import Sizes, chunk_size, walk  # noqa: E402

FORESTS = alone.drawn(10)


def segments_of(nests, padding=0):
    end = torch.from_numpy(forests.layout(nests, padding).subtree_end)
    return tree_segments(SimpleNamespace(subtree_end=end))


@pytest.mark.parametrize("size", [2, 16, 32, 64])
@pytest.mark.parametrize("name", FORESTS)
def test_every_chunk_once_and_nothing_waits_for_what_comes_later(name, size):
    tree = segments_of(*FORESTS[name])
    way = walk(tree, size)
    chunks, paths = way.chunks.tolist(), way.paths.tolist()
    tokens = sorted(t for a, n, _, _ in chunks for t in range(a, a + n))
    assert tokens == list(range(way.tokens))
    assert all(0 < n <= size for _, n, _, _ in chunks)
    assert [a for a, *_ in paths] + [len(chunks)] == [0, *(b for _, b, *_ in paths)]

    parent = tree.parent.tolist()
    cuts, indices = way.cu_seqlens.tolist(), way.chunk_indices.tolist()
    assert [cuts[s] + i * size for s, i in indices] == [a for a, *_ in chunks]
    stored = {}  # fork: (the token whose state it has, the path that stores it)
    for number, (first, last, fork, _) in enumerate(paths):
        before = None if fork < 0 else stored[fork][0]  # a KeyError: it would wait for a later path
        for a, n, at, _ in chunks[first:last]:
            assert parent[a] == (-1 if before is None else before)
            before = a + n - 1
            if at >= 0:
                stored[at] = (before, number)
    assert len(stored) == way.forks

    # Backward, the last path first: each path adds its gradient in its turn, and a fork has all before it is read.
    added = [0] * way.forks
    for first, last, fork, turn in reversed(paths):
        for _, _, at, count in reversed(chunks[first:last]):
            assert at < 0 or added[at] == count > 0
        if fork >= 0:
            assert added[fork] == turn
            added[fork] += 1


def test_by_hand():
    #   0 .. 4 -+- 5 6        in chunks of 2: the longer child goes on in the path of its parent
    #           +- 7 8 9
    way = walk(segments_of([(5, [(2, []), (3, [])])]), 2)
    assert way.paths.tolist() == [[0, 5, -1, 0], [5, 6, 0, 0]]
    assert way.chunks.tolist() == [[0, 2, -1, 0], [2, 2, -1, 0], [4, 1, 0, 1], [7, 2, -1, 0], [9, 1, -1, 0],
                                   [5, 2, -1, 0]]  # fmt: skip
    assert way.chunk_indices.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [1, 0]]
    assert way.narrow


def test_the_walk_is_kept_with_the_tree():
    tree = segments_of([(3, [])])
    assert walk(tree, 16) is walk(tree, 16)


def test_short_segments_get_short_chunks():
    few = Sizes((16, 32, 64), 24)
    assert chunk_size(segments_of([(6000, [(400, [])] * 8)]), few) == 64
    short = segments_of([(200, [(13, [(12, [])] * 3)] * 40)])
    assert chunk_size(short, few) == 16
    assert chunk_size(short, Sizes((32, 64), 24)) == 32


def test_where_a_chunk_itself_costs_more_there_are_fewer():
    # 213 chunks of 16 tokens, 167 of 32
    tree = segments_of([(200, [(20, [(12, [])] * 3)] * 40)])
    assert chunk_size(tree, Sizes((16, 32, 64), 24)) == 16
    assert chunk_size(tree, Sizes((16, 32, 64), 68)) == 32


def test_padding_between_trees_is_refused():
    tree = tree_segments(SimpleNamespace(subtree_end=torch.tensor([2, 2, 2, 5, 5])))
    with pytest.raises(ValueError, match="rows of padding must come after all trees"):
        walk(tree, 16)
