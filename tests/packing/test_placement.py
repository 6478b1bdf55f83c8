"""Which sample goes into which tree: few tokens and few trees on real rollouts, and what holds for any samples.

[1..6], [20..28], [20 21 22 40], max_tokens = 10

first fit   1..6 20 21 22 40 | 20..28          19 positions: the third sample goes where it arrives first
shared      1..6 | 20..28 + 40                 16 positions: it goes where its prefix lies
"""

import numpy as np
import pytest
from bound import lower_bound
from helpers import as_arrays, id_lists, image, sample_lists
from hypothesis import given
from hypothesis import strategies as st
from test_data import load

import treepack
from treepack.testing import check_packed

# set, max_tokens, (tokens, trees) of the arrival-order fits of three other packers, lower bound
ROWS = [
    ("qwen_math_n8", 8192, (260183, 33), (260921, 34), (258881, 33), (254247, 32)),
    ("gsm8k_4models", 8192, (743295, 91), (746017, 93), (739815, 92), (735184, 90)),
    ("tau_airline_traj", 16384, (733461, 46), (764287, 54), (760043, 53), (728816, 45)),
    ("tau_airline_traj", 32768, (632717, 20), (640510, 22), (636002, 21), (632099, 20)),
    ("lats_agent_tree", 4096, (32353, 8), (31878, 9), (17780, 5), (17770, 5)),
    ("swe_gemini_comb", 16384, (273932, 17), (272357, 17), (267087, 17), (240928, 15)),
    ("swe_gemini_comb", 32768, (184101, 6), (182295, 6), (207376, 7), (152769, 5)),
    ("tau_airline_turns", 16384, (502279, 31), (489970, 31), (468081, 29), (400535, 25)),
    ("tau_airline_turns", 32768, (369186, 12), (365453, 12), (362295, 12), (346358, 11)),
    ("game24_tot_tree", 8192, (163053, 20), (170925, 21), (162375, 20), (161414, 20)),
    ("game24_cot_n100", 8192, (210659, 26), (222664, 28), (205184, 26), (203557, 25)),
]
NAMES = [f"{row[0]}-{row[1]}" for row in ROWS]
placements = st.sampled_from(["shared", "first_fit"])


def best_of(peers):
    """Fewest tokens, and fewest trees, of any of them."""
    return min(tokens for tokens, _ in peers), min(trees for _, trees in peers)


def size(packed):
    """(tokens, trees) without dummies."""
    filled = [tree for tree in packed if len(tree.sample_index)]
    return sum(int(tree.cu_segments[-1]) for tree in filled), len(filled)


# ------------------------------------------------------------------------------------------------- real rollouts


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_no_worse_than_any_peer_on_real_rollouts(treepack_data, row):
    name, max_tokens, *peers, bound = row
    batch = load(treepack_data, name)
    assert lower_bound(batch, max_tokens) == bound
    packed = treepack.pack(batch, max_tokens=max_tokens)
    tokens, trees = size(packed)
    assert (packed.stats.packed_tokens, packed.stats.trees) == (tokens, trees)
    assert max(tree.num_tokens for tree in packed) <= max_tokens
    most_tokens, most_trees = best_of(peers)
    assert bound[0] <= tokens <= most_tokens
    assert bound[1] <= trees <= most_trees
    assert size(treepack.pack(batch, max_tokens=max_tokens, placement="first_fit")) == peers[0]


def test_most_of_the_distance_to_the_bound_is_closed(treepack_data):
    distance = closed = 0
    for name, max_tokens, *peers, (bound, _) in ROWS:
        tokens, _ = size(treepack.pack(load(treepack_data, name), max_tokens=max_tokens))
        distance += best_of(peers)[0] - bound
        closed += best_of(peers)[0] - tokens
    assert distance == 156_294
    assert closed >= 0.97 * distance  # 0.90 is the least that pays for itself; this is what was aimed at


@pytest.mark.parametrize("name", ["lats_agent_tree", "qwen_math_n8"])
def test_real_rollouts_are_packed_right(treepack_data, name):
    batch = load(treepack_data, name)
    call = {"max_tokens": 8192, "branching": "label", "pad_to_multiple_of": 64}
    check_packed(treepack.pack(batch, **call), batch, **call)


# -------------------------------------------------------------------------------------------- any samples at all


@st.composite
def calls(draw, ranks=(1, 1, 2, 3, 5)):
    """Any mix of budgets, padding, ranks, branching and order."""
    out = {
        "max_tokens": draw(st.sampled_from([3, 5, 7, 8, 9, 12, 16, 40])),
        "branching": draw(st.sampled_from(["token", "label"])),
        "order": draw(st.sampled_from(["largest_first", "first_seen"])),
        "overlong": "skip",
        "ranks": draw(st.sampled_from(ranks)),
    }
    if draw(st.booleans()):
        out["max_terms"] = draw(st.integers(1, 12))
    if draw(st.booleans()):
        out["max_kept"] = draw(st.integers(1, 16))
    if draw(st.booleans()):
        out["pad_to_multiple_of"] = draw(st.integers(1, 3))
    return out


@given(sample_lists(max_samples=12), placements, calls())
def test_every_sample_is_in_one_tree_or_reported_and_budgets_hold(samples, placement, call):
    arrays = as_arrays(samples)
    packed = treepack.pack(arrays, placement=placement, **call)
    check_packed(packed, arrays, **call)
    found = [int(s) for tree in packed for s in tree.sample_index]
    skipped = [x.sample for x in packed.skipped]
    assert sorted(found + skipped) == list(range(len(samples)))
    for tree in packed:
        assert tree.num_tokens <= call["max_tokens"]
        assert tree.num_tokens % call.get("pad_to_multiple_of", 1) == 0
        assert len(tree.term_row) <= call.get("max_terms", np.inf)
        assert len(tree.sampling_mask) <= call.get("max_kept", np.inf)
        assert sorted(tree.sample_index) == tree.sample_index.tolist()  # in order of arrival
    room = call["max_tokens"] // call.get("pad_to_multiple_of", 1) * call.get("pad_to_multiple_of", 1)
    for skip in packed.skipped:  # and what was left out is too long for a tree of its own
        alone = treepack.pack([arrays[skip.sample]], max_tokens=1000)
        (tree,) = alone
        limits = (room, call.get("max_terms", np.inf), call.get("max_kept", np.inf))
        amounts = (tree.num_tokens, len(tree.term_row), alone.stats.kept_ids)
        assert skip.tokens == tree.num_tokens
        assert any(amount > limit for amount, limit in zip(amounts, limits, strict=True))


@given(sample_lists(max_samples=12), calls(ranks=[1]))
def test_shared_is_never_worse_than_first_fit(samples, call):
    arrays = as_arrays(samples)
    tokens, trees = size(treepack.pack(arrays, **call))
    most_tokens, most_trees = size(treepack.pack(arrays, placement="first_fit", **call))
    assert tokens <= most_tokens
    assert trees <= most_trees


@given(id_lists(max_samples=14, max_length=9), st.integers(9, 30), st.sampled_from(["token", "label"]), placements)
def test_no_placement_goes_below_the_bound(ids, max_tokens, branching, placement):
    samples = [{"input_ids": x} for x in ids]
    bound = lower_bound(samples, max_tokens, branching=branching)
    tokens, trees = size(treepack.pack(samples, max_tokens=max_tokens, branching=branching, placement=placement))
    assert tokens >= bound[0]
    assert trees >= bound[1]
    if bound[1] == 1:  # what fits one tree is in one tree
        assert (tokens, trees) == bound


def test_the_bound_by_hand():
    """3 tokens shared by four samples of 3 more each, budget 9: two of them to a tree, the prefix twice."""
    samples = [{"input_ids": [1, 2, 3, 10 * i, 10 * i + 1, 10 * i + 2]} for i in range(1, 5)]
    assert lower_bound(samples, 9) == (4 * 3 + 2 * 3, 2)
    assert size(treepack.pack(samples, max_tokens=9)) == (18, 2)
    assert lower_bound(samples, 15) == (15, 1)
    assert lower_bound([], 15) == (0, 0)
    assert lower_bound([{"input_ids": [1, 2]}], 2) == (2, 1)


@given(sample_lists(max_samples=10), placements, calls())
def test_same_input_same_bytes(samples, placement, call):
    one, two = (treepack.pack(as_arrays(samples), placement=placement, **call) for _ in range(2))
    assert image(one) == image(two)


@given(sample_lists(max_samples=10), calls(), st.randoms(use_true_random=False))
def test_any_order_of_arrival_is_packed_right(samples, call, random):
    skipped = treepack.pack(as_arrays(samples), **call).stats.skipped
    random.shuffle(samples)
    arrays = as_arrays(samples)
    packed = treepack.pack(arrays, **call)
    check_packed(packed, arrays, **call)
    assert packed.stats.skipped == skipped


@pytest.mark.parametrize("branching", ["token", "label"])
def test_whole_groups_stay_together_in_any_order_of_arrival(branching):
    """Eight groups of four: a tree holds two groups, and arrival order tears all of them apart."""
    groups = [[[g, g, g, g, g, 10 * g + i] for i in range(4)] for g in range(1, 9)]
    rounds = [{"input_ids": group[i]} for i in range(4) for group in groups]
    alone = 9 if branching == "token" else 12
    packed = treepack.pack(rounds, max_tokens=2 * alone, branching=branching)
    assert size(packed) == (8 * alone, 4)
    assert size(treepack.pack(rounds, max_tokens=2 * alone, branching=branching, placement="first_fit"))[1] > 4


def prefix_of_all(count):
    """One prompt under all samples, ten of them to a tree: the prefix lies in every tree."""
    return np.concatenate([np.append(np.arange(50), 100 + i) for i in range(count)]), 51, 60


def many_groups(count):
    """Four samples to a group, in rounds, so that arrival order tears the groups apart."""
    groups = np.tile(np.arange(count // 4), 4)
    return np.stack([groups, groups, groups + count, np.arange(count)], 1).ravel(), 4, 64


@pytest.mark.parametrize("shape", [prefix_of_all, many_groups])
def test_placement_is_not_quadratic(shape):
    """Ten times the samples and the trees: a scan over all trees for each sample would cost a hundred times."""

    def milliseconds(count):
        ids, length, max_tokens = shape(count)
        batch = {"input_ids": ids, "cu_seqlens": np.arange(0, len(ids) + 1, length)}
        packs = (treepack.pack(batch, max_tokens=max_tokens) for _ in range(5))
        return min(packed.stats.milliseconds["placement"] for packed in packs)

    # A busy machine slows one of the two: the best ratio of several counts, which a scan never reaches.
    assert any(milliseconds(40_000) < 40 * milliseconds(4_000) for _ in range(5))


# ------------------------------------------------------------------------------------------------------ case 44


def case_44():
    return [list(range(1, 7)), list(range(20, 29)), [20, 21, 22, 40]]


def test_case_44_a_sample_goes_where_its_prefix_lies():
    samples = [{"input_ids": x} for x in case_44()]
    packed = treepack.pack(samples, max_tokens=10)
    assert size(packed) == (16, 2)
    assert [tree.sample_index.tolist() for tree in packed] == [[0], [1, 2]]
    assert lower_bound(samples, 10) == (16, 2)
    assert size(treepack.pack(samples, max_tokens=10, placement="first_fit")) == (19, 2)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("groups", [None, [7, 7, 7], [1, 2, 3], [7, 8, 7], ["a", ("b",), None]])
def test_case_44_in_any_order_and_under_any_groups(order, groups):
    lists = case_44()
    samples = [
        {"input_ids": lists[i]} if groups is None else {"input_ids": lists[i], "group_id": groups[i]} for i in order
    ]
    packed = treepack.pack(samples, max_tokens=10)
    assert size(packed) == (
        16,
        2,
    )  # other groups do not keep a prefix apart, one group does not bring unlike ones together
    check_packed(packed, samples, max_tokens=10)


@given(sample_lists(max_samples=10), calls(), st.data())
def test_groups_neither_block_nor_force_a_merge(samples, call, data):
    arrays = as_arrays(samples)
    grouped = [{**sample, "group_id": data.draw(st.integers(0, 2))} for sample in arrays]
    packed = treepack.pack(grouped, **call)
    check_packed(packed, grouped, **call)  # equal prefixes of a tree are one position, whatever the groups
    assert packed.stats.skipped == treepack.pack(arrays, **call).stats.skipped
    roomy = {**call, "max_tokens": 1000, "ranks": 1, "max_terms": None, "max_kept": None}
    assert size(treepack.pack(grouped, **roomy)) == size(treepack.pack(arrays, **roomy))
