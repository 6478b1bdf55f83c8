"""Every row of the list of known faults that concerns the host: labels, forks, empty things, limits (1-14, 34-43).

One function per row, named by its number; `test_cases_ids.py` holds the rows on padding, ids and kept sets (45-55).
The tree that most rows use, with packed indexes:

        A = 5 6 7 8     5₀ ── 6₁ ┬─ 7₂ ── 8₃
        B = 5 6 9                └─ 9₄
        C = 4 3         4₅ ── 3₆
"""

import sys
import time

import naive
import numpy as np
import pytest
from helpers import as_arrays, assert_same, sample_lists, says
from hypothesis import given
from hypothesis import strategies as st

import treepack

A, B, C = [5, 6, 7, 8], [5, 6, 9], [4, 3]


def one(samples, **kwargs):
    """The only tree of a call with a budget that is large enough."""
    (tree,) = treepack.pack(samples, max_tokens=kwargs.pop("max_tokens", 1 << 20), **kwargs)
    return tree


def ids(*lists):
    return [{"input_ids": x} for x in lists]


def scored(tree):
    """(sample, id that predicts, its depth, target) of every term."""
    at = tree.row_position[tree.term_row]
    sample = tree.sample_index[tree.term_sample]
    columns = (sample, tree.input_ids[at], tree.position_ids[at], tree.term_target)
    return list(zip(*(x.tolist() for x in columns), strict=True))


# ------------------------------------------------------------------------------------- labels, positions, forks


def test_case_01_last_token_predicts_nothing():
    assert scored(one(ids(A, B, C))) == [
        *[(0, 5, 0, 6), (0, 6, 1, 7), (0, 7, 2, 8)],
        *[(1, 5, 0, 6), (1, 6, 1, 9)],
        (2, 4, 0, 3),
    ]


@pytest.mark.parametrize("branching", ["token", "label"])
def test_case_01_no_label_crosses_samples_for_any_neighbours(branching):
    samples = ids([1, 2], [3], [1, 2, 3], [2], [3, 1])
    for kind in (samples, samples[::-1]):
        pairs = {(a, b) for x in kind for a, b in zip(x["input_ids"], x["input_ids"][1:], strict=False)}
        assert {(a, b) for _, a, _, b in scored(one(kind, branching=branching))} == pairs


def test_case_02_positions_restart_with_every_sample():
    assert one(ids(A, B, C)).position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1]
    packed = treepack.pack(ids(A, B, C), max_tokens=5)
    assert [tree.position_ids.tolist() for tree in packed] == [[0, 1, 2, 3, 2], [0, 1]]


def test_case_03_positions_are_depth_and_not_the_packed_index():
    tree = one(ids([1, 2, 3], [1, 4, 5], [1, 4, 6]))
    depth = np.zeros(tree.num_tokens, np.int64)
    for k, parent in enumerate(tree.parent):
        depth[k] = 0 if parent < 0 else depth[parent] + 1
    assert tree.position_ids.tolist() == depth.tolist()
    assert tree.position_ids.tolist() != list(range(tree.num_tokens))
    for x, path in zip(([1, 2, 3], [1, 4, 5], [1, 4, 6]), tree.path_index(), strict=True):
        assert tree.position_ids[path].tolist() == list(range(len(x)))


def test_case_04_masks_of_any_depth():
    """P -> A -> R0, R1 and on to five forks below one another."""
    samples = ids(*([*[1, 2, 3, 4, 5][:depth], 7, end] for depth in range(5) for end in (8, 9)))
    plain = [dict(sample) for sample in samples]
    for order in ("largest_first", "first_seen"):
        for branching in ("token", "label"):
            tree = one(samples, order=order, branching=branching)
            (expected,) = naive.pack(plain, max_tokens=1000, order=order, branching=branching).trees
            mask = naive.visible(plain, range(len(plain)), expected, branching, order)
            k = np.arange(tree.num_tokens)
            assert ((k[None] <= k[:, None]) & (k[:, None] < tree.subtree_end[None])).tolist() == mask
            assert tree.attention_mask().tolist() == mask


def test_case_05_the_last_shared_token_has_several_labels():
    tree = one(ids(A, B))
    fork = int(np.flatnonzero(tree.input_ids == 6)[0])
    row = tree.row_position.tolist().index(fork)
    assert tree.term_target[tree.term_row == row].tolist() == [7, 9]
    assert tree.row_position.tolist() == [0, 1, 2]  # one row each, however many labels


def test_case_06_shared_targets_are_not_deduplicated():
    samples = [{"input_ids": A, "completion_mask": [0, 1, 1, 1]} for _ in range(5)] + [
        {"input_ids": B, "completion_mask": [0, 1, 1]}
    ]
    tree = one(samples)
    assert len(tree.term_row) == 5 * 3 + 2
    assert tree.cu_terms.tolist() == [0, 3, 6, 9, 12, 15, 17]
    assert len(tree.row_position) == 3


def test_case_07_the_first_completion_token_is_scored_off_the_prompt():
    prompt = [1, 2, 3]
    samples = [{"input_ids": [*prompt, x, 0], "completion_mask": [0, 0, 0, 1, 1]} for x in (7, 8, 9)]
    tree = one(samples)
    firsts = tree.cu_terms[:-1]
    at = tree.row_position[tree.term_row[firsts]]
    assert at.tolist() == [2, 2, 2]
    assert tree.input_ids[2] == 3
    assert tree.term_target[firsts].tolist() == [7, 8, 9]


def test_case_08_a_wide_tree_is_limited_by_positions_alone():
    samples = ids(*([1, 2, 3, 4, 5] + [10 + j] * 5 for j in range(100)))
    tree = one(samples, max_tokens=505)  # far more than any path, which has 10
    assert tree.num_tokens == 505
    assert tree.position_ids.max() == 9
    assert len(treepack.pack(samples, max_tokens=504)) == 2


def test_case_09_multi_axis_positions_are_a_column():
    axes = [np.stack([np.arange(len(x)), np.arange(len(x)) // 2, np.zeros(len(x))], 1).astype(np.int64) for x in (A, B)]
    samples = [{"input_ids": x, "mrope": m} for x, m in zip((A, B), axes, strict=True)]
    tree = one(samples)
    assert tree.positions["mrope"].shape == (5, 3)
    assert tree.positions["mrope"].dtype == np.int64
    for path, m in zip(tree.path_index(), axes, strict=True):
        assert tree.positions["mrope"][path].tolist() == m.tolist()
    assert tree.terms["mrope"].tolist() == [*axes[0][1:].tolist(), *axes[1][1:].tolist()]


def test_case_10_a_strict_prefix():
    tree = one(ids([1, 2], [1, 2, 3]))
    assert tree.input_ids.tolist() == [1, 2, 3]
    assert tree.cu_segments.tolist() == [0, 2, 3]
    assert tree.sample_last_segment.tolist() == [0, 1]
    tree = one(ids([1, 2], [1, 2, 3]), branching="label", order="first_seen")
    assert tree.input_ids.tolist() == [1, 2, 2, 3]
    assert tree.shift_labels.tolist() == [2, -100, 3, -100]
    chain = ids(*([1, 2, 3, 4, 5][:n] for n in (5, 1, 3, 2, 4, 3)))
    assert one(chain).num_tokens == 5
    assert one(chain, branching="label").num_tokens == 5 + 4  # one more for each strict prefix, none for a duplicate


def test_case_11_duplicates_with_other_advantages():
    samples = [{"input_ids": A, "advantage": x} for x in (1.5, -2.0)]
    for branching in ("token", "label"):
        tree = one(samples, branching=branching)
        assert tree.num_tokens == 4
        assert len(tree.term_row) == 6
        assert len(tree.row_position) == 3
        assert tree.terms["advantage"].tolist() == [1.5] * 3 + [-2.0] * 3
        assert tree.samples["advantage"].tolist() == [1.5, -2.0]
        assert tree.position_samples.tolist() == [2, 2, 2, 2]


def test_case_12_same_tokens_other_masks():
    samples = [{"input_ids": A, "completion_mask": m} for m in ([0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0])]
    tree = one(samples)
    assert tree.num_tokens == 4
    assert scored(tree) == [(0, 5, 0, 6), (1, 6, 1, 7), (1, 7, 2, 8)]
    assert one(samples, branching="label").shift_labels.tolist() == [6, 7, 8, -100]


def test_case_13_trained_in_one_sample_context_in_another():
    turn = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
    later = {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 0, 0, 0, 1]}
    tree = one([turn, later])
    assert tree.num_tokens == 5
    assert scored(tree) == [(0, 1, 0, 2), (0, 2, 1, 3), (1, 4, 3, 5)]
    assert scored(one([later, turn])) == [(0, 4, 3, 5), (1, 1, 0, 2), (1, 2, 1, 3)]


def test_case_14_a_mask_on_the_first_token_counts_for_nothing():
    samples = [{"input_ids": [1, 2, 3], "completion_mask": [1, 0, 1]}, {"input_ids": [4], "completion_mask": [1]}]
    tree = one(samples, max_terms=1)  # no charge to the budget either
    assert scored(tree) == [(0, 2, 1, 3)]
    assert tree.sample_index.tolist() == [0, 1]


# -------------------------------------------------------------------------- empty things, budgets, depth, width


@pytest.mark.parametrize("place", [0, 1, 2])
def test_case_34_an_empty_sample_is_an_error(place):
    samples = ids(A, B)
    samples.insert(place, {"input_ids": []})
    for overlong in ("raise", "skip"):
        with pytest.raises(treepack.PackError) as error:
            treepack.pack(samples, max_tokens=100, overlong=overlong)
        says(error, f"sample {place}", "input_ids")
    batch = {"input_ids": np.arange(4), "cu_seqlens": [0, 2, 2, 4]}
    with pytest.raises(treepack.PackError, match=r"sample 1\b"):
        treepack.pack(batch, max_tokens=100)
    padded = {"input_ids": np.ones((2, 3), int), "attention_mask": [[1, 1, 0], [0, 0, 0]]}
    with pytest.raises(treepack.PackError, match=r"sample 1\b"):
        treepack.pack(padded, max_tokens=100)


def test_case_35_a_tree_without_a_trained_token():
    tree = one([{"input_ids": x, "completion_mask": [0] * len(x)} for x in (A, B)])
    assert tree.num_tokens == 5
    assert tree.row_position.shape == tree.term_row.shape == tree.term_target.shape == (0,)
    assert tree.cu_terms.tolist() == [0, 0, 0]
    assert tree.terms.get("advantage") is None
    single = one(ids([7], [7]))  # nothing masked, and still nothing to predict
    assert single.num_tokens == 1
    assert single.cu_terms.tolist() == [0, 0, 0]
    assert single.sampling_mask.shape == single.sampling_mask_counts.shape == (0,)


def test_case_39_long_samples_raise_or_are_reported():
    samples = ids([1] * 9, A, [2] * 12, B)
    with pytest.raises(treepack.PackError) as error:
        treepack.pack(samples, max_tokens=8)
    says(error, "sample 0", 9, 8)
    packed = treepack.pack(samples, max_tokens=8, overlong="skip")
    assert [(x.sample, x.tokens) for x in packed.skipped] == [(0, 9), (2, 12)]
    assert all("max_tokens" in x.reason for x in packed.skipped)
    assert packed.stats.skipped == 2
    assert packed.stats.packed_tokens == 5
    (tree,) = packed
    assert tree.sample_index.tolist() == [1, 3]
    assert tree.position_source[0] == 9  # offsets count the tokens of samples that were left out
    every = treepack.pack(samples, max_tokens=1, overlong="skip")  # nothing fits, and nothing hangs
    assert len(every) == 0
    assert [x.sample for x in every.skipped] == [0, 1, 2, 3]


@given(sample_lists(max_samples=12), st.integers(1, 12), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3))
def test_case_40_budgets_are_hard(samples, max_tokens, max_terms, max_kept, multiple):
    limits = {"max_tokens": max_tokens, "max_terms": max_terms, "max_kept": max_kept, "overlong": "skip"}
    limits["pad_to_multiple_of"] = min(multiple, max_tokens)
    for placement in ("shared", "first_fit"):
        packed = treepack.pack(as_arrays(samples), placement=placement, **limits)
        for tree in packed:
            assert tree.num_tokens <= max_tokens
            assert len(tree.term_row) <= max_terms
            assert len(tree.sampling_mask) <= max_kept
    assert_same(packed, naive.pack(samples, **limits))


def test_case_42_nested_forks_far_below_the_recursion_limit():
    depth = 3 * sys.getrecursionlimit()
    base = np.arange(depth)
    forks = [{"input_ids": np.append(base[: i + 1], depth)} for i in range(depth)]  # each ends in an id of its own
    tree = one(forks)
    assert tree.num_tokens == 2 * depth
    assert tree.position_ids.max() == depth
    assert len(tree.cu_segments) - 1 == 2 * depth - 1  # the deepest end goes on from the last base token


def test_case_42_depth_one_hundred_thousand():
    depth, step = 100_000, 200
    base, mask = np.arange(depth), np.zeros(depth, np.uint8)
    mask[-1] = 1
    prefixes = [{"input_ids": base[:n], "completion_mask": mask[:n]} for n in range(step, depth + 1, step)]
    tree = one(prefixes)
    assert tree.num_tokens == depth
    assert (tree.subtree_end == depth).all()
    assert len(tree.cu_segments) == depth // step + 1
    assert len(tree.term_row) == 1
    assert one(prefixes, branching="label").num_tokens == depth + depth // step - 1


def test_case_43_a_wide_fork_is_linear():
    """40,000 children of one node cost no more than as many samples in forks of eight; a scan over the children costs
    some fifty times as much. The two take turns, so that a busy machine slows both or neither."""
    children = 40_000
    number = np.random.default_rng(0).permutation(children)

    def batch(tails):
        ids = np.concatenate([np.zeros((children, 1), np.int64), tails], 1)
        return {"input_ids": ids.ravel(), "cu_seqlens": np.arange(children + 1) * ids.shape[1]}

    digits = number[:, None] // 8 ** np.arange(5, -1, -1) % 8
    batches = {"wide": batch(number[:, None]), "narrow": batch(digits)}
    best = dict.fromkeys(batches, np.inf)
    for _ in range(5):
        for name, samples in batches.items():
            start = time.perf_counter()
            tree = one(samples)
            best[name] = min(best[name], time.perf_counter() - start)
            if name == "wide":
                assert tree.num_tokens == children + 1
                assert (tree.parent[1:] == 0).all()
            del tree
    assert best["wide"] < 5 * best["narrow"]
