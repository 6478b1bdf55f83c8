"""`pack(..., cut=True)`: one tree of all samples, in ranges of rows.

sample 0   0 1 2 3 4          0 ─ 1 ─ 2 ┬─ 3 ─ 4           [0, 5)  the stem and a branch, which wait
sample 1   0 1 2 5 6 7                  └─ 5 ─ 6 ─ 7       [5, 10) with the ancestors 0, 1, 2
sample 2   8 9                8 ─ 9
"""

import pickle
import re

import naive
import numpy as np
import pytest
from helpers import as_arrays, assert_same, id_lists, plain, sample_lists, says
from hypothesis import given, settings
from hypothesis import strategies as st

import treepack
from treepack.testing import check_packed

#: Distinct non-empty prefixes over all samples of a set (README of the data).
TRIE = {
    "crosswords_tot_dfs": 22_252,
    "game24_cot_n100": 192_261,
    "game24_tot_tree": 152_482,
    "gsm8k_4models": 734_888,
    "lats_agent_tree": 15_141,
    "qwen_math_n8": 253_357,
    "swe_gemini_comb": 152_273,
    "swe_gemini_traj": 858_663,
    "swe_gemini_turns": 168_616,
    "tau_airline_traj": 558_671,
    "tau_airline_turns": 307_712,
}
THREE = [{"input_ids": ids} for ids in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7], [8, 9])]


def test_by_hand():
    (tree,) = treepack.pack(THREE, max_tokens=5, order="first_seen", cut=True)
    assert tree.cu_ranges.tolist() == [0, 5, 10]
    assert [(x.start, x.stop, x.ancestors.tolist()) for x in tree.ranges] == [(0, 5, []), (5, 10, [0, 1, 2])]
    (whole,) = treepack.pack(THREE, max_tokens=100, cut=True)
    assert whole.cu_ranges.tolist() == [0, 10]
    (uncut,) = treepack.pack(THREE, max_tokens=100)
    assert [(x.start, x.stop, len(x.ancestors)) for x in uncut.ranges] == [(0, 10, 0)]


@settings(deadline=None)
@given(sample_lists(), st.sampled_from(["token", "label"]), st.integers(1, 12), st.integers(1, 8) | st.none())
def test_the_tree_is_that_without_a_budget_and_the_cut_the_cheapest(samples, branching, max_tokens, max_ancestors):
    forest = naive.pack(plain(samples), max_tokens=10_000, branching=branching)
    wanted = naive.cheapest_cut(forest.trees[0], max_tokens, 10_000 if max_ancestors is None else max_ancestors)
    options = {"max_tokens": max_tokens, "branching": branching, "cut": True, "max_ancestors": max_ancestors}
    if wanted is None:
        with pytest.raises(treepack.PackError) as error:
            treepack.pack(as_arrays(samples), **options)
        says(error, f"max_tokens={max_tokens}", f"max_ancestors={max_ancestors}", "sample")
        assert len(samples[error.value.sample]["input_ids"]) > max_ancestors
        tokens, ancestors = map(int, re.findall(r"to (\d+)", str(error.value)))
        assert error.value.needs == ancestors
        whole = forest.trees[0]
        assert naive.cheapest_cut(whole, tokens, max_ancestors) is not None
        assert naive.cheapest_cut(whole, max_tokens, ancestors) is not None
        assert naive.cheapest_cut(whole, tokens - 1, max_ancestors) is None
        assert naive.cheapest_cut(whole, max_tokens, ancestors - 1) is None
        return
    packed = treepack.pack(as_arrays(samples), **options)
    assert_same(packed, forest, branching)
    check_packed(packed, as_arrays(samples))
    costs = [naive.cost_of_range(forest.trees[0], x.start, x.stop, max_tokens) for x in packed[0].ranges]
    assert tuple(map(sum, zip(*costs, strict=True))) == wanted


@settings(deadline=None)
@given(id_lists(max_samples=9), st.integers(1, 5), st.integers(2, 4))
def test_ranks(ids, max_tokens, ranks):
    samples = [{"input_ids": x} for x in ids]
    packed = treepack.pack(samples, max_tokens=max_tokens, ranks=ranks, cut=True)
    assert len(packed) == ranks
    check_packed(packed, samples)
    distinct = naive.pack(samples, max_tokens=10_000).stats["packed_tokens"]
    assert packed.stats.packed_tokens == distinct + packed.stats.balance_tokens


def test_ranges_travel():
    torch = pytest.importorskip("torch")
    packed = treepack.pack(THREE, max_tokens=5, cut=True)
    for tree in (
        packed[0].to("cpu"),
        packed[0].to("cpu").to(torch.device("cpu")),
        pickle.loads(pickle.dumps(packed[0])),
        pickle.loads(pickle.dumps(packed))[0],
        pickle.loads(pickle.dumps(packed[0].to("cpu"))).numpy(),
    ):
        assert tree.cu_ranges.tolist() == packed[0].cu_ranges.tolist()
        assert [x.ancestors.tolist() for x in tree.ranges] == [x.ancestors.tolist() for x in packed[0].ranges]


def test_no_way_to_cut():
    with pytest.raises(treepack.PackError) as error:
        treepack.pack([{"input_ids": [9, 9]}, {"input_ids": np.arange(100)}], max_tokens=20, cut=True, max_ancestors=30)
    says(error, "sample 1: 70 rows lie below its first 30 tokens", "max_tokens=20", "max_ancestors=30")
    says(error, "raise max_tokens to 70 or max_ancestors to 80")
    assert error.value.budget == "max_ancestors"
    (tree,) = treepack.pack([{"input_ids": np.arange(100)}], max_tokens=20, cut=True, max_ancestors=80)
    assert max(len(x.ancestors) for x in tree.ranges) == 80


@pytest.mark.parametrize("name", TRIE)
def test_the_rows_of_all_ranges_are_the_distinct_tokens(name, treepack_data):
    with np.load(treepack_data / "data" / f"{name}.npz") as z:
        batch = {"input_ids": z["tokens"], "cu_seqlens": z["offsets"], "completion_mask": z["completion_mask"]}
    (tree,) = treepack.pack(batch, max_tokens=16_384, cut=True)
    rows = np.diff(tree.cu_ranges)
    assert rows.min() > 0
    assert rows.max() <= 16_384
    assert rows.sum() == tree.num_tokens == TRIE[name]
    assert all(len(x.ancestors) == tree.position_ids[x.start] for x in tree.ranges)
    inside = ~np.isin(tree.cu_ranges[:-1], tree.cu_segments)
    assert inside.any() == (np.diff(tree.cu_segments).max() > 16_384)
