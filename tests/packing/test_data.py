"""Real rollouts under `$TREEPACK_DATA/data`: what first fit gives, and that every set comes back whole."""

import itertools

import numpy as np
import pytest
from helpers import first_fit

import treepack
from treepack.testing import check_packed

# set, max_tokens, trees, packed tokens
FIRST_FIT = [
    ("qwen_math_n8", 8192, 33, 260183),
    ("qwen_math_n8", 16384, 16, 256307),
    ("gsm8k_4models", 16384, 46, 739770),
    ("tau_airline_traj", 16384, 46, 733461),
    ("tau_airline_traj", 32768, 20, 632717),
    ("lats_agent_tree", 4096, 8, 32353),
    ("swe_gemini_comb", 32768, 6, 184101),
    ("tau_airline_turns", 32768, 12, 369186),
    ("game24_cot_n100", 8192, 26, 210659),
]
# set, distinct non-empty prefixes over all samples (README of the data)
TRIE = [
    ("lats_agent_tree", 15141),
    ("qwen_math_n8", 253357),
    ("swe_gemini_comb", 152273),
    ("tau_airline_turns", 307712),
]


def load(folder, name):
    """One set as a flat batch."""
    with np.load(folder / "data" / f"{name}.npz") as z:
        return {"input_ids": z["tokens"], "cu_seqlens": z["offsets"], "completion_mask": z["completion_mask"]}


def as_list(batch):
    """The same as a list of samples, each a view."""
    cu = batch["cu_seqlens"]
    return [
        {"input_ids": batch["input_ids"][a:b], "completion_mask": batch["completion_mask"][a:b]}
        for a, b in itertools.pairwise(cu)
    ]


@pytest.mark.parametrize(("name", "max_tokens", "trees", "tokens"), FIRST_FIT)
def test_first_fit(treepack_data, name, max_tokens, trees, tokens):
    batch = load(treepack_data, name)
    packed = first_fit(batch, max_tokens=max_tokens)
    assert (len(packed), sum(tree.num_tokens for tree in packed)) == (trees, tokens)
    stats = packed.stats
    assert (stats.trees, stats.packed_tokens, stats.padding, stats.skipped) == (trees, tokens, 0, 0)
    assert stats.raw_tokens == len(batch["input_ids"])
    assert stats.samples == len(batch["cu_seqlens"]) - 1
    first = batch["cu_seqlens"][:-1]
    trained = int(batch["completion_mask"].sum(dtype=np.int64)) - int(batch["completion_mask"][first].sum())
    assert stats.terms == trained == sum(len(tree.term_row) for tree in packed)


@pytest.mark.parametrize(("name", "nodes"), TRIE)
def test_one_tree_has_one_position_per_distinct_prefix(treepack_data, name, nodes):
    (tree,) = treepack.pack(load(treepack_data, name), max_tokens=1 << 20)
    assert tree.num_tokens == nodes


@pytest.mark.parametrize("branching", ["token", "label"])
@pytest.mark.parametrize(("name", "max_tokens"), [("lats_agent_tree", 4096), ("qwen_math_n8", 8192)])
def test_real_rollouts_come_back(treepack_data, name, max_tokens, branching):
    samples = as_list(load(treepack_data, name))
    options = {"max_tokens": max_tokens, "branching": branching, "pad_to_multiple_of": 128}
    check_packed(treepack.pack(samples, **options), samples, **options)


def partial_tiles(tree, tile=128):
    """Attention tiles that a kernel must mask: neither empty nor full, by the largest and smallest end in a tile."""
    starts = np.arange(0, tree.num_tokens, tile)
    stops = np.minimum(starts + tile, tree.num_tokens)
    last, first = np.maximum.reduceat(tree.subtree_end, starts), np.minimum.reduceat(tree.subtree_end, starts)
    reached = (starts[None] < stops[:, None]) & (last[None] > starts[:, None])
    full = (stops[None] <= starts[:, None] + 1) & (first[None] >= stops[:, None])
    return int((reached & ~full).sum())


def test_largest_first_leaves_fewer_partial_tiles_on_a_comb(treepack_data):
    batch = load(treepack_data, "swe_gemini_comb")
    tiles = {}
    for order in ("largest_first", "first_seen"):
        packed = first_fit(batch, max_tokens=32768, order=order)
        assert sum(tree.num_tokens for tree in packed) == 184101
        tiles[order] = sum(partial_tiles(tree) for tree in packed)
    assert 2 * tiles["largest_first"] < tiles["first_seen"]
