"""`pack` against the oracle and against what must hold whatever the oracle says.

sample 0   0 1 2                  0 ── 1 ┬─ 2            position = prefix, row = (position, kept set),
sample 1   0 1 0 0                       └─ 0 ── 0       term = (row, target, sample)
"""

import itertools
import pickle
from collections import Counter

import naive
import numpy as np
import pytest
from helpers import arrays_of, as_arrays, assert_same, first_fit, id_lists, image, plain, sample_lists
from hypothesis import given, settings
from hypothesis import strategies as st

import treepack
from treepack.testing import check_packed

branchings = st.sampled_from(["token", "label"])
orders = st.sampled_from(["largest_first", "first_seen"])
roomy = 1000


@st.composite
def budgets(draw):
    """Any mix of the three budgets, of padding, and of what happens to a sample that fits nowhere."""
    out = {"max_tokens": draw(st.sampled_from([1, 2, 3, 5, 7, 8, 9, 12, 16, 40])), "overlong": draw(overlongs)}
    if draw(st.booleans()):
        out["max_terms"] = draw(st.integers(1, 12))
    if draw(st.booleans()):
        out["max_kept"] = draw(st.integers(1, 16))
    if draw(st.booleans()):
        out["pad_to_multiple_of"] = draw(st.integers(1, min(4, out["max_tokens"])))
    return out


overlongs = st.sampled_from(["raise", "skip", "skip"])

# ------------------------------------------------------------------------------------------------ with the oracle


@given(sample_lists(), branchings, orders)
def test_one_tree_equals_the_oracle(samples, branching, order):
    forest = naive.pack(samples, max_tokens=roomy, branching=branching, order=order)
    packed = treepack.pack(as_arrays(samples), max_tokens=roomy, branching=branching, order=order)
    assert_same(packed, forest, branching)


@given(sample_lists(max_samples=10), branchings, orders, budgets())
def test_every_budget_equals_the_oracle(samples, branching, order, limits):
    try:
        forest = naive.pack(samples, branching=branching, order=order, **limits)
    except naive.TooLong as long:
        with pytest.raises(treepack.PackError, match=rf"sample {long.sample}\b"):
            first_fit(as_arrays(samples), branching=branching, order=order, **limits)
        return
    packed = first_fit(as_arrays(samples), branching=branching, order=order, **limits)
    assert_same(packed, forest, branching)


@given(sample_lists(sets=True), branchings, st.integers(1, 10))
def test_kept_sets_equal_the_oracle(samples, branching, max_kept):
    limits = {"max_tokens": 16, "max_kept": max_kept, "branching": branching, "overlong": "skip"}
    assert_same(first_fit(as_arrays(samples), **limits), naive.pack(samples, **limits), branching)


@given(sample_lists(identity=1), branchings)
def test_identity_equals_the_oracle(samples, branching):
    forest = naive.pack(samples, max_tokens=16, branching=branching)
    assert_same(first_fit(as_arrays(samples), max_tokens=16, branching=branching), forest, branching)


@given(sample_lists(), branchings)
def test_plain_lists_equal_the_oracle(samples, branching):
    forest = naive.pack(samples, max_tokens=16, branching=branching)
    assert_same(first_fit(samples, max_tokens=16, branching=branching), forest, branching)


@given(
    sample_lists(),
    st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4", ">i8"]),
    st.sampled_from([np.uint8, np.bool_, np.int8, np.int64, ">i2"]),
    st.sampled_from([np.int32, np.int64, np.uint16, ">i4"]),
)
def test_every_integer_dtype_gives_the_same_bytes(samples, ids, mask, kept):
    usual = treepack.pack(as_arrays(samples), max_tokens=12)
    other = treepack.pack(as_arrays(samples, ids=ids, mask=mask, kept=kept, counts=kept), max_tokens=12)
    assert image(usual) == image(other)


# ---------------------------------------------------------------------------------------------- without the oracle


@given(sample_lists(max_samples=10), branchings, orders, budgets())
def test_every_sample_is_rebuilt_exactly(samples, branching, order, limits):
    limits["overlong"] = "skip"
    packed = treepack.pack(as_arrays(samples), branching=branching, order=order, **limits)
    found = [x.sample for x in packed.skipped]
    for tree in packed:
        for s, last in zip(tree.sample_index, tree.sample_last_segment, strict=True):
            pieces, segment = [], last
            while segment >= 0:
                pieces.insert(0, tree.input_ids[tree.cu_segments[segment] : tree.cu_segments[segment + 1]].tolist())
                segment = tree.segment_parent[segment]
            assert [token for piece in pieces for token in piece] == samples[s]["input_ids"]
            found.append(int(s))
    assert sorted(found) == list(range(len(samples)))


@given(sample_lists(max_samples=10), branchings, orders, budgets())
def test_a_query_sees_depth_plus_one_keys(samples, branching, order, limits):
    limits["overlong"] = "skip"
    for tree in treepack.pack(as_arrays(samples), branching=branching, order=order, **limits):
        n, end = tree.num_tokens, tree.subtree_end
        real = tree.position_source >= 0
        seen = [[k for k in range(n) if k <= q < end[k]] for q in range(n)]
        assert [len(x) for x in seen] == np.where(real, tree.position_ids + 1, 0).tolist()
        for q in np.flatnonzero(real):  # and these are its ancestors and itself
            ancestors, k = [], int(q)
            while k >= 0:
                ancestors.insert(0, k)
                k = int(tree.parent[k])
            assert seen[q] == ancestors


@given(sample_lists(max_samples=10), branchings, budgets())
def test_no_loss_term_is_lost(samples, branching, limits):
    limits["overlong"] = "skip"
    packed = treepack.pack(as_arrays(samples), branching=branching, **limits)
    left_out = {x.sample for x in packed.skipped}
    wanted = Counter()
    for s, sample in enumerate(samples):
        if s not in left_out:
            mask = sample.get("completion_mask", [1] * len(sample["input_ids"]))
            wanted.update((s, i, x) for i, x in enumerate(sample["input_ids"]) if mask[i] and i > 0)
    found = Counter()
    for tree in packed:
        for row, target, place in zip(tree.term_row, tree.term_target, tree.term_sample, strict=True):
            depth = tree.position_ids[tree.row_position[row]]  # made one before its target
            found[int(tree.sample_index[place]), int(depth) + 1, int(target)] += 1
    assert found == wanted


@given(sample_lists(max_samples=10), branchings, budgets())
def test_budgets_hold(samples, branching, limits):
    limits["overlong"] = "skip"
    packed = treepack.pack(as_arrays(samples), branching=branching, **limits)
    for tree in packed:
        assert tree.num_tokens <= limits["max_tokens"]
        assert tree.num_tokens % limits.get("pad_to_multiple_of", 1) == 0
        assert len(tree.term_row) <= limits.get("max_terms", np.inf)
        assert len(tree.sampling_mask) <= limits.get("max_kept", np.inf)
        assert len(tree.sample_index) > 0
    assert [x.tokens for x in packed.skipped] == [len(samples[x.sample]["input_ids"]) for x in packed.skipped]


@given(id_lists(), st.randoms(use_true_random=False))
def test_arrival_changes_the_order_and_nothing_else(ids, random):
    samples = [{"input_ids": x} for x in ids]
    (one,) = treepack.pack(samples, max_tokens=roomy)
    random.shuffle(samples)
    (two,) = treepack.pack(samples, max_tokens=roomy)
    assert one.num_tokens == two.num_tokens == len({tuple(x[: i + 1]) for x in ids for i in range(len(x))})
    assert len(one.row_position) == len(two.row_position)
    assert len(one.term_row) == len(two.term_row)
    assert sorted(one.subtree_end - np.arange(one.num_tokens)) == sorted(two.subtree_end - np.arange(two.num_tokens))


@given(id_lists())
def test_the_longest_subtree_comes_first(ids):
    (tree,) = treepack.pack([{"input_ids": x} for x in ids], max_tokens=roomy)
    size = tree.subtree_end - np.arange(tree.num_tokens)
    for parent in range(-1, tree.num_tokens):
        below = size[tree.parent == parent]
        assert (np.diff(below) <= 0).all()


@given(id_lists())
def test_a_position_has_one_next_token_under_label_branching(ids):
    (tree,) = treepack.pack([{"input_ids": x} for x in ids], max_tokens=roomy, branching="label")
    follows = {}
    for row, target in zip(tree.term_row, tree.term_target, strict=True):
        follows.setdefault(int(tree.row_position[row]), set()).add(int(target))
    assert all(len(x) == 1 for x in follows.values())
    for k in range(tree.num_tokens):
        assert tree.shift_labels[k] == (min(follows[k]) if k in follows else -100)


@given(sample_lists(sets=True))
def test_a_row_has_one_set_and_every_set_holds_its_targets(samples):
    for tree in treepack.pack(as_arrays(samples), max_tokens=12):
        cu = np.concatenate([[0], np.cumsum(tree.sampling_mask_counts)])
        sets = [tree.sampling_mask[a:b].tolist() for a, b in itertools.pairwise(cu)]
        rows = [(int(p), frozenset(x)) for p, x in zip(tree.row_position, sets, strict=True)]
        assert len(set(rows)) == len(rows)
        assert cu[-1] == len(tree.sampling_mask)
        for row, target in zip(tree.term_row, tree.term_target, strict=True):
            assert not sets[row] or target in sets[row]


@given(sample_lists(), branchings, budgets())
def test_same_input_same_bytes(samples, branching, limits):
    limits["overlong"] = "skip"
    one, two = (treepack.pack(as_arrays(samples), branching=branching, **limits) for _ in range(2))
    assert image(one) == image(two)


@given(sample_lists(), branchings)
def test_pickle_round_trip(samples, branching):
    packed = treepack.pack(as_arrays(samples), max_tokens=12, branching=branching)
    for tree in packed:
        again = pickle.loads(pickle.dumps(tree))
        for name, array in arrays_of(tree).items():
            other = getattr(again, name)
            assert other.dtype == array.dtype, name
            assert np.array_equal(other, array), name
        assert again.terms["advantage"].tolist() == tree.terms["advantage"].tolist()
        assert [x.tolist() for x in again.path_index()] == [x.tolist() for x in tree.path_index()]


@given(sample_lists(), branchings, budgets())
def test_the_public_check_agrees(samples, branching, limits):
    limits["overlong"] = "skip"
    given_samples = as_arrays(samples)
    packed = treepack.pack(given_samples, branching=branching, **limits)
    check_packed(packed, given_samples, branching=branching, **limits)
    packed = treepack.pack(plain(samples), branching=branching, **limits)
    check_packed(packed, plain(samples), branching=branching, **limits)


# ---------------------------------------------------------------------------------------- longer than a vector register


@st.composite
def long_samples(draw, longest):
    """Rollouts that part from one another around every multiple of 16, in the low or in the high bits of an id."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 2**31, longest)
    with_sets, out = draw(st.booleans()), []
    for _ in range(draw(st.integers(2, 6))):
        ids = base[: draw(st.integers(1, longest))].copy()
        edge = draw(st.integers(0, longest // 16)) * 16 + draw(st.integers(-1, 1))
        if 0 <= edge < len(ids):
            ids[edge] ^= draw(st.sampled_from([0, 1, 1 << 30]))
        mask = np.repeat(rng.integers(0, 2, len(ids)), rng.integers(1, 40))[: len(ids)].astype(np.uint8)
        sample = {"input_ids": ids, "completion_mask": mask, "identity": np.zeros((len(ids), 2), np.int32)}
        if 0 <= edge + 16 < len(ids):
            sample["identity"][edge + 16, 1] = draw(st.sampled_from([0, 0, -1, 1 << 24]))
        sample["old_log_probs"] = rng.random(len(ids), dtype=np.float32)
        if with_sets:
            more = rng.integers(1, 20) if draw(st.booleans()) else 2
            sets = [np.append(x, (x + np.arange(1, more)) % 2**31) for x in ids]
            sample["sampling_mask"] = np.concatenate(sets).astype(np.int32)
            sample["sampling_mask_counts"] = np.full(len(ids), more, np.int32)
        out.append(sample)
    return out


@settings(max_examples=settings().max_examples // 6)
@given(long_samples(70), branchings, orders, st.sampled_from([70, 100, 150, 1000]))
def test_long_samples_equal_the_oracle(samples, branching, order, max_tokens):
    lists = [{name: x.tolist() for name, x in sample.items()} for sample in samples]
    call = {"max_tokens": max_tokens, "branching": branching, "order": order}
    assert_same(first_fit(samples, **call), naive.pack(lists, **call), branching)


@given(long_samples(700), branchings, st.sampled_from([700, 900, 1500, 10000]))
def test_longer_samples_pass_the_public_check(samples, branching, max_tokens):
    call = {"max_tokens": max_tokens, "branching": branching, "pad_to_multiple_of": 4}
    check_packed(treepack.pack(samples, **call), samples, **call)
