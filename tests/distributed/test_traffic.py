"""Bytes on the wire by formula, against a count of every value that a rank needs and has not."""

import numpy as np
import pytest
from helpers import id_lists
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack.distributed.split import split_rows
from treepack.distributed.traffic import AttentionShape, heads_traffic, ring_traffic, rows_traffic, ulysses_traffic

shapes = st.builds(
    AttentionShape, st.just(8), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.sampled_from([2, 4])
)


def owners(edges):
    """The rank that has each row."""
    return [rank for rank, count in enumerate(np.diff(edges).tolist()) for _ in range(count)]


def even_edges(tokens, ranks):
    return [tokens * rank // ranks for rank in range(ranks + 1)]


def counted(moves, ranks, shape):
    """Bytes that each rank receives: `moves` are (to, from, heads), one for a row of one of Q, K, V, out."""
    total = np.zeros(ranks, np.int64)
    for to, source, heads in moves:
        if to != source:
            total[to] += heads * shape.head_dim * shape.bytes_per_value
    return total.tolist()


def seen_elsewhere(tree, owner):
    """(reader, owner) of every row that a rank sees and has not."""
    mask = tree.attention_mask()
    for reader in set(owner):
        rows = mask[[rank == reader for rank in owner]].any(0)
        yield from ((reader, owner[row]) for row in np.flatnonzero(rows) if owner[row] != reader)


def all_to_all(owner, ranks, shape):
    """(to attention, from attention): Q, K and V heads that each rank computes with, and where their outputs belong."""
    group = shape.query_heads // shape.kv_heads
    inward, outward = [], []
    for source in owner:
        for rank in range(ranks):
            queries = range(rank * shape.query_heads // ranks, (rank + 1) * shape.query_heads // ranks)
            keys = {head // group for head in queries}  # K/V heads that these read
            inward += [(rank, source, len(queries)), (rank, source, len(keys)), (rank, source, len(keys))]
            outward.append((source, rank, len(queries)))
    return inward, outward


def around_a_ring(owner, ranks, shape):
    """Blocks of K and V step by step, and in the backward with the sums of their gradients, until these are home."""
    forward, backward = [], []
    for step in range(1, ranks + 1):
        for row_owner in owner:
            to, source = (row_owner + step) % ranks, (row_owner + step - 1) % ranks
            if step < ranks:  # no rank computes with its own block again
                forward.append((to, source, 2 * shape.kv_heads))
                backward.append((to, source, 2 * shape.kv_heads))
            backward.append((to, source, 2 * shape.kv_heads))
    return forward, backward


@given(id_lists(), st.sampled_from([1, 2, 4, 8]), shapes)
def test_trees(ids, ranks, shape):
    (tree,) = treepack.pack([{"input_ids": x} for x in ids], max_tokens=1000)
    split = split_rows(tree, ranks)
    owner = owners(split.edges)

    by_rows = rows_traffic(split, shape)
    read = list(seen_elsewhere(tree, owner))
    assert by_rows.forward.tolist() == counted([(a, b, 2 * shape.kv_heads) for a, b in read], ranks, shape)
    assert by_rows.backward.tolist() == counted([(b, a, 2 * shape.kv_heads) for a, b in read], ranks, shape)
    assert by_rows.total == by_rows.forward.sum() + by_rows.backward.sum()

    by_heads = heads_traffic(tree.num_tokens, ranks, shape)
    owner = owners(even_edges(tree.num_tokens, ranks))
    inward, outward = all_to_all(owner, ranks, shape)
    assert by_heads.forward.tolist() == counted(inward + outward, ranks, shape)
    back = [(source, to, heads) for to, source, heads in inward + outward]
    assert by_heads.backward.tolist() == counted(back, ranks, shape)


@given(st.integers(0, 40), st.sampled_from([1, 2, 4, 8]), shapes)
def test_samples_alone(tokens, ranks, shape):
    owner = owners(even_edges(tokens, ranks))
    assert len(owner) == tokens

    inward, outward = all_to_all(owner, ranks, shape)
    ulysses = ulysses_traffic(tokens, ranks, shape)
    assert ulysses.forward.tolist() == counted(inward + outward, ranks, shape)
    assert ulysses.total == 2 * ulysses.forward.sum()

    forward, backward = around_a_ring(owner, ranks, shape)
    ring = ring_traffic(tokens, ranks, shape)
    assert ring.forward.tolist() == counted(forward, ranks, shape)
    assert ring.backward.tolist() == counted(backward, ranks, shape)
    assert ring.forward.sum() == (ranks - 1) * tokens * shape.kv_bytes


@pytest.mark.parametrize(("heads", "ranks"), [((6, 2), 4), ((12, 6), 4), ((14, 2), 4), ((8, 8), 16)])
def test_heads_that_ranks_cannot_part_are_refused(heads, ranks):
    shape = AttentionShape(*heads, 4)
    for traffic in (heads_traffic, ulysses_traffic):
        with pytest.raises(ValueError, match=rf'the layer has .* {ranks} ranks .*"rows"'):
            traffic(40, ranks, shape)
    (tree,) = treepack.pack([{"input_ids": range(40)}], max_tokens=40)
    assert rows_traffic(split_rows(tree, ranks), shape).forward[0] == 0
