"""`Packer`: the stream rule by eye, what it promises about errors and memory, cases 38 and 39.

`test_packer_model.py` drives it at random against an oracle.
"""

import gc
import pickle

import numpy as np
import pytest
from helpers import arrays_of, as_arrays, image, sample_lists, says
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack import synthetic
from treepack.testing import check_packed


def ids(*lists):
    return [{"input_ids": x} for x in lists]


def feed(packer, samples):
    """All micro-batches that these samples close, one after another."""
    return [trees for sample in samples for trees in packer.add(sample)]


def members(trees):
    return [tree.sample_index.tolist() for tree in trees]


class MicroBatch(list):
    """A micro-batch as `check_packed` and `image` read it."""

    skipped = ()


# ---------------------------------------------------------------------------------------------------- the rule by eye


def test_a_sample_goes_to_the_tree_with_which_it_shares_most():
    """Budget 8, two ranks. The third shares 1 token with rank 0 and 2 with rank 1; the fourth shares 3 with rank 0."""
    packer = treepack.Packer(max_tokens=8, ranks=2)
    assert feed(packer, ids([1, 2, 3, 4], [9, 8], [9, 8, 7], [1, 2, 3, 5])) == []
    (trees,) = packer.flush()
    assert members(trees) == [[0, 3], [1, 2]]
    assert [tree.num_tokens for tree in trees] == [5, 3]


def test_ties_go_to_the_least_work_and_then_to_the_lowest_rank():
    packer = treepack.Packer(max_tokens=20, ranks=3)
    assert feed(packer, ids([1] * 5, [2] * 3, [3] * 4, [4] * 3, [5], [6])) == []
    (trees,) = packer.flush()
    # 0, 1, 2 each to an empty tree, 3 to rank 1 (3 positions), 4 to rank 2 (4), and 5 to rank 2 again: ranks 0 and 2
    # have 5 positions each, but those of rank 2 see fewer keys.
    assert members(trees) == [[0], [1, 3], [2, 4, 5]]


def test_what_shares_most_but_does_not_fit_is_passed_over():
    packer = treepack.Packer(max_tokens=4, ranks=2)
    assert feed(packer, ids([1, 2, 3, 4], [1, 9], [1, 2, 5])) == []  # 2 shared make 5 positions, 1 shared makes 4
    (trees,) = packer.flush()
    assert members(trees) == [[0], [1, 2]]


def test_where_none_fits_the_micro_batch_closes():
    packer = treepack.Packer(max_tokens=4, ranks=2)
    assert feed(packer, ids([1, 2, 3], [4, 5, 6], [7])) == []
    (trees,) = packer.add({"input_ids": [8, 9]})
    assert members(trees) == [[0, 2], [1]]
    (trees,) = packer.add({"input_ids": [1, 2, 3, 4]}) or packer.flush()
    assert members(trees) == [[0], [1]]  # counted within the micro-batch
    assert trees[0].input_ids.tolist() == [8, 9]
    assert packer.flush() == []


def test_indexes_count_within_the_closed_micro_batch():
    packer = treepack.Packer(max_tokens=4)
    samples = [{"input_ids": [i, i + 1, i + 2], "weight": i} for i in range(5)]
    closed = feed(packer, samples) + packer.flush()
    assert len(closed) == 5
    for number, (tree,) in enumerate(closed):
        assert tree.sample_index.tolist() == [0]
        assert tree.position_source.tolist() == [0, 1, 2]
        assert tree.term_source.tolist() == [1, 2]
        assert tree.samples["weight"].tolist() == [number]


# -------------------------------------------------------------------------------------------------- cases 38 and 39


def test_case_38_everything_fits_and_flush_yields_it():
    packer = treepack.Packer(max_tokens=1000, ranks=2)
    samples = ids(*([1, 2, i] for i in range(10, 20)))
    assert feed(packer, samples) == []
    assert packer.stats.trees == 0  # over closed micro-batches
    (trees,) = packer.flush()
    assert len(trees) == 2
    assert sorted(s for tree in members(trees) for s in tree) == list(range(10))
    assert packer.stats.samples == 10
    assert packer.flush() == []
    assert feed(packer, samples[:1]) == []  # and on it goes
    (trees,) = packer.flush()
    assert sorted(members(trees)) == [[], [0]]
    assert (packer.stats.samples, packer.stats.trees, packer.stats.dummies) == (11, 4, 1)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_flush_leaves_no_rank_empty_without_need(count, ranks):
    """All samples share a prefix, so that the rule puts them all into one tree."""
    packer = treepack.Packer(max_tokens=100, ranks=ranks)
    samples = ids(*([1, 2, 3, 10 + i] for i in range(count)))
    assert feed(packer, samples) == []
    (trees,) = packer.flush()
    assert len(trees) == ranks
    assert sum(len(x) == 0 for x in members(trees)) == packer.stats.dummies == max(0, ranks - count)
    check_packed(MicroBatch(trees), samples, max_tokens=100, ranks=ranks)


def test_case_39_long_samples_raise_and_change_nothing():
    packer = treepack.Packer(max_tokens=4)
    packer.add({"input_ids": [1, 2]})
    with pytest.raises(treepack.PackError) as error:
        packer.add({"input_ids": [1] * 9})
    says(error, 9, 4, "max_tokens")
    assert packer.skipped == []
    assert packer.stats.skipped == 0
    packer.add({"input_ids": [1, 2, 3]})
    ((tree,),) = packer.flush()
    assert tree.input_ids.tolist() == [1, 2, 3]
    assert tree.sample_index.tolist() == [0, 1]


def test_case_39_long_samples_are_reported_with_number_and_length_and_do_not_block():
    packer = treepack.Packer(max_tokens=4, overlong="skip")
    long, short = {"input_ids": [1] * 9}, {"input_ids": [1, 2]}
    assert feed(packer, [long, short, long, {"input_ids": [2] * 5}]) == []
    with pytest.raises(treepack.PackError):
        packer.add({"input_ids": []})  # not counted
    assert feed(packer, [long]) == []
    assert [(x.sample, x.tokens) for x in packer.skipped] == [(0, 9), (2, 9), (3, 5), (4, 9)]
    assert all("max_tokens" in x.reason for x in packer.skipped)
    assert packer.stats.skipped == 4
    ((tree,),) = packer.flush()
    assert tree.sample_index.tolist() == [0]  # the micro-batch holds one sample
    assert packer.add(long) == packer.flush() == []
    assert packer.skipped[-1].sample == 5


@pytest.mark.parametrize(
    ("limits", "sample"),
    [
        ({"max_terms": 1}, {"input_ids": [5, 6, 7]}),
        ({"max_kept": 2}, {"input_ids": [5, 6], "sampling_mask": [6, 7, 8], "sampling_mask_counts": [0, 3]}),
    ],
)
def test_every_budget_leaves_samples_out(limits, sample):
    packer = treepack.Packer(max_tokens=10, overlong="skip", **limits)
    assert packer.add(sample) == []
    ((number, tokens, reason),) = packer.skipped
    assert (number, tokens) == (0, len(sample["input_ids"]))
    assert next(iter(limits)) in reason
    with pytest.raises(treepack.PackError, match=next(iter(limits))):
        treepack.Packer(max_tokens=10, **limits).add(sample)


# ------------------------------------------------------------------------------------------------ errors and columns

GOOD = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -0.25], "advantage": 1.0}
SETS = {"sampling_mask": [6, 7], "sampling_mask_counts": [0, 1, 1]}


def lacking(name):
    return {key: value for key, value in GOOD.items() if key != name}


OTHER = [
    *(lacking(name) for name in ("completion_mask", "old_log_probs", "advantage")),
    {**GOOD, "extra": 1.0},
    {**GOOD, "extra": [1, 2, 3]},
    {**GOOD, "identity": [1, 1, 1]},
    {**GOOD, "group_id": 1},
    {**GOOD, **SETS},
    {**GOOD, "advantage": [1.0, 1.0, 1.0]},
    {**GOOD, "old_log_probs": 0.5},
    {**GOOD, "old_log_probs": [[0.0], [0.5], [1.0]]},
]


@pytest.mark.parametrize("other", OTHER, ids=lambda other: "-".join(sorted(map(str, other))))
@pytest.mark.parametrize("first", ["kept", "skipped"])
@pytest.mark.parametrize("ready", [False, True])
def test_all_samples_have_the_columns_of_the_first(other, first, ready):
    """Whether the first was taken or left out, and whether arrays are ready or have to be made."""
    packer = treepack.Packer(max_tokens=3, overlong="skip")
    start = GOOD if first == "kept" else {**GOOD, **{name: GOOD[name] * 2 for name in list(GOOD)[:3]}}
    samples = [start, other, GOOD]
    start, other, good = as_arrays(samples) if ready else samples
    assert packer.add(start) == []
    with pytest.raises((treepack.PackError, TypeError)) as error:
        packer.add(other)
    changed = {name for name in {**GOOD, **other} if type(GOOD.get(name)) is not type(other.get(name))}
    changed |= {"old_log_probs"} if np.ndim(other.get("old_log_probs", 0)) == 2 else set()
    changed |= {"kept sets"} if "sampling_mask" in other else set()
    assert any(name in str(error.value) for name in changed), str(error.value)
    assert packer.add(good) == []
    ((tree,),) = packer.flush()
    assert len(tree.sample_index) == (2 if first == "kept" else 1)
    assert sorted(tree.terms) == ["advantage", "old_log_probs"]


def test_it_says_how_far_it_is():
    packer = treepack.Packer(max_tokens=3, ranks=2, overlong="skip")
    feed(packer, ids([1, 2, 3], [4, 5], [1] * 9, [6, 7]))
    assert repr(packer) == "Packer(max_tokens=3, ranks=2, samples=4, skipped=1, micro_batches=1)"


@pytest.mark.parametrize("more", [{"completion_mask": [0, 1]}, {"sampling_mask": [6], "sampling_mask_counts": [0, 1]}])
@pytest.mark.parametrize("first", [[5, 6], [5] * 9])
def test_what_the_first_sample_lacks_the_others_lack(more, first):
    """Even where the first was left out, and even where `pack` would fill the gap: a stream cannot look ahead."""
    packer = treepack.Packer(max_tokens=3, overlong="skip")
    assert packer.add({"input_ids": first}) == []
    for ready in (False, True):
        (other,) = as_arrays([{"input_ids": [5, 6], **more}]) if ready else [{"input_ids": [5, 6], **more}]
        with pytest.raises(treepack.PackError, match=r"mask|kept"):
            packer.add(other)
    assert packer.add({"input_ids": [5, 6, 7]}) == []
    ((tree,),) = packer.flush()
    assert len(tree.term_row) == (3 if len(first) == 2 else 2)


@pytest.mark.parametrize("sample", [None, 5, "abc", [1, 2], [("input_ids", [1])], {}, {"advantage": 1.0}])
def test_what_is_no_sample_is_refused(sample):
    packer = treepack.Packer(max_tokens=8)
    for _ in range(2):
        with pytest.raises((treepack.PackError, TypeError)):
            packer.add(sample)
    packer.add(GOOD)  # the first of the stream, still
    with pytest.raises((treepack.PackError, TypeError)):
        packer.add(sample)
    assert len(packer.flush()) == 1


def test_an_error_names_the_number_of_the_sample():
    packer = treepack.Packer(max_tokens=8, vocab_size=10)
    bad = [{"input_ids": [1, -1]}, {"input_ids": [1, 10]}, {"input_ids": []}, {"input_ids": [1.5]}]
    bad += [{"input_ids": np.array(x["input_ids"])} for x in bad]
    for number in range(3):
        for sample in bad:
            with pytest.raises((treepack.PackError, TypeError), match=rf"sample {number}\b"):
                packer.add(sample)
        packer.add({"input_ids": [1, number]})


@pytest.mark.parametrize("name", ["max_tokens", "max_terms", "max_kept", "vocab_size", "pad_to_multiple_of", "ranks"])
def test_arguments_are_checked_as_in_pack(name):
    for value, error in [(0, treepack.PackError), (-1, treepack.PackError), (1.5, TypeError), (True, TypeError)]:
        with pytest.raises(error, match=name):
            treepack.Packer(**{"max_tokens": 8, name: value})


@pytest.mark.parametrize("name", ["branching", "order", "overlong"])
def test_words_are_checked_as_in_pack(name):
    with pytest.raises(treepack.PackError, match=name):
        treepack.Packer(8, **{name: "nonsense"})


# ---------------------------------------------------------------------------------------- arrays, memory, statistics


@given(
    sample_lists(), st.sampled_from(["token", "label"]), st.sampled_from(["largest_first", "first_seen"]), st.booleans()
)
def test_one_tree_of_a_stream_has_the_bytes_of_pack(samples, branching, order, ready):
    arrays = [{**sample, "table": sample["table"].astype(np.int64)} for sample in as_arrays(samples)]
    call = {"max_tokens": 1000, "branching": branching, "order": order, "pad_to_multiple_of": 3}
    packer = treepack.Packer(**call)
    assert feed(packer, arrays if ready else samples) == []
    (trees,) = packer.flush()
    packed = treepack.pack(arrays, **call)
    assert image(MicroBatch(trees)) == image(packed)
    for name, value in vars(packed.stats).items():
        if name != "milliseconds":
            assert getattr(packer.stats, name) == value, name


def test_arrays_are_copied_and_trees_outlive_the_packer():
    buffer, logp = np.zeros(3, np.int64), np.zeros(3, np.float32)
    packer = treepack.Packer(max_tokens=6)
    kept = []
    for i in range(40):
        buffer[:], logp[:] = [i, i + 1, i + 2], -i  # the caller's arrays, used again and again
        for (tree,) in packer.add({"input_ids": buffer, "old_log_probs": logp, "advantage": float(i)}):
            kept.append((i, tree, {name: array.tobytes() for name, array in arrays_of(tree).items()}))
    packer.flush()
    del packer
    gc.collect()
    assert len(kept) == 19
    for i, tree, before in kept:
        assert {name: array.tobytes() for name, array in arrays_of(tree).items()} == before
        assert tree.samples["advantage"].tolist() == [i - 2, i - 1]
        assert [x.tolist() for x in tree.unpack(tree.input_ids)] == [[j, j + 1, j + 2] for j in (i - 2, i - 1)]
        assert tree.terms["old_log_probs"].tolist() == [-(i - 2.0)] * 2 + [-(i - 1.0)] * 2
        again = pickle.loads(pickle.dumps(tree))
        assert again.input_ids.tolist() == tree.input_ids.tolist()


def test_groups_are_numbered_over_the_stream():
    packer = treepack.Packer(max_tokens=3)
    samples = [{"input_ids": [i, i, i], "group_id": group} for i, group in enumerate(["a", "b", "a", ("c", 1), "b"])]
    closed = feed(packer, samples) + packer.flush()
    assert [tree.samples["group_id"].tolist() for (tree,) in closed] == [[0], [1], [0], [2], [1]]


def test_statistics_carry_on():
    packer = treepack.Packer(max_tokens=8, ranks=2, pad_to_multiple_of=4, overlong="skip")
    first = packer.stats
    assert (first.samples, first.trees, first.packing_ratio, first.imbalance) == (0, 0, 1.0, 1.0)
    seen = []
    for i in range(30):
        long = i % 10 == 9
        for trees in packer.add({"input_ids": [i // 7] * 3 + [i] * (8 if long else 2)}):
            seen += trees
        assert packer.stats.trees == len(seen)
        assert packer.stats.padding == sum(tree.num_tokens - int(tree.cu_segments[-1]) for tree in seen)
    for trees in packer.flush():
        seen += trees
    stats = packer.stats
    assert (stats.samples, stats.skipped, stats.raw_tokens) == (27, 3, 27 * 5)
    assert stats.packing_ratio == stats.raw_tokens / stats.packed_tokens
    assert stats.terms == 27 * 4
    assert all(phase >= 0 for phase in stats.milliseconds.values())
    assert first.samples == 0  # what was read before stays as it was
    with pytest.raises(AttributeError):
        stats.trees = 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_real_shapes_are_packed_right(ranks):
    samples = synthetic.multi_turn()
    call = {"max_tokens": 16384, "ranks": ranks, "branching": "label"}
    packer, start, seen = treepack.Packer(**call), 0, 0
    for trees in [trees for sample in samples for trees in packer.add(sample)] + packer.flush():
        count = sum(map(len, members(trees)))
        check_packed(MicroBatch(trees), samples[start : start + count], **call)
        start, seen = start + count, seen + len(trees)
    assert start == len(samples)
    assert seen == packer.stats.trees
