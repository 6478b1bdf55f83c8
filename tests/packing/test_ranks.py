"""Trees for several ranks: the same number for each, none without a sample where that can be, balanced by work.

tree m * ranks + r is that of rank r in micro-batch m        work = sum of (depth + 1) + 8192 x positions
"""

import numpy as np
import pytest
from helpers import as_arrays, id_lists, image, sample_lists
from hypothesis import given
from hypothesis import strategies as st
from test_placement import size

import treepack
from treepack.testing import check_packed

numbers = st.integers(1, 9)
placements = st.sampled_from(["shared", "first_fit"])


def work(tree):
    real = int(tree.cu_segments[-1])
    return int((tree.position_ids[:real] + 1).sum()) + 8192 * real


def samples_of(trees):
    return [tree.sample_index.tolist() for tree in trees]


def is_dummy(tree):
    return len(tree.sample_index) == 0


# -------------------------------------------------------------------------------------------------- any of anything


@given(sample_lists(max_samples=12), numbers, placements, st.integers(7, 30), st.integers(1, 4))
def test_every_rank_has_as_many_trees_and_none_is_empty_without_need(samples, ranks, placement, max_tokens, multiple):
    arrays = as_arrays(samples)
    call = {"max_tokens": max_tokens, "ranks": ranks, "pad_to_multiple_of": multiple, "overlong": "skip"}
    packed = treepack.pack(arrays, placement=placement, **call)
    check_packed(packed, arrays, **call)
    assert packed.ranks == ranks
    assert len(packed) % ranks == 0
    by_rank = [packed.for_rank(rank) for rank in range(ranks)]
    assert {len(trees) for trees in by_rank} == {len(packed) // ranks}
    assert [tree for batch in zip(*by_rank, strict=True) for tree in batch] == list(packed)

    dummies = sum(map(is_dummy, packed))
    assert packed.stats.dummies == dummies
    assert packed.stats.trees == len(packed)
    assert dummies < ranks  # no micro-batch of dummies alone
    if dummies:
        assert all(len(tree.sample_index) <= 1 for tree in packed)  # nothing is left that could be split
    if packed.stats.samples >= ranks:
        assert all(not is_dummy(tree) for tree in packed[:ranks])


@given(id_lists(max_samples=12), numbers, placements)
def test_imbalance_by_hand(ids, ranks, placement):
    samples = [{"input_ids": x} for x in ids]
    packed = treepack.pack(samples, max_tokens=9, ranks=ranks, placement=placement)
    slowest = mean = 0
    for m in range(0, len(packed), ranks):
        batch = [work(tree) for tree in packed[m : m + ranks]]
        slowest += max(batch)
        mean += sum(batch) / ranks
    assert packed.stats.imbalance == pytest.approx(slowest / mean)
    assert packed.stats.imbalance >= 1 - 1e-12
    together = treepack.pack(samples, max_tokens=9, placement=placement)
    assert packed.stats.balance_tokens == max(0, size(packed)[0] - size(together)[0])
    if ranks == 1:
        assert samples_of(packed) == samples_of(together)
        assert packed.stats.imbalance == pytest.approx(1)


@given(sample_lists(max_samples=10), numbers)
def test_same_input_same_bytes(samples, ranks):
    one, two = (treepack.pack(as_arrays(samples), max_tokens=12, ranks=ranks) for _ in range(2))
    assert image(one) == image(two)
    assert one.stats.imbalance == two.stats.imbalance


def test_no_samples_are_no_trees():
    packed = treepack.pack([], max_tokens=8, ranks=4)
    assert len(packed) == packed.stats.dummies == 0
    assert [packed.for_rank(rank) for rank in range(4)] == [[], [], [], []]
    packed = treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=2, ranks=4, overlong="skip")
    assert len(packed) == 0
    assert packed.stats.skipped == 1


@pytest.mark.parametrize("rank", [-1, 3, 4, 2**70])
def test_a_rank_that_is_none_is_refused(rank):
    packed = treepack.pack([{"input_ids": [1, 2]}], max_tokens=8, ranks=3)
    with pytest.raises(treepack.PackError) as error:
        packed.for_rank(rank)
    assert str(rank) in str(error.value)
    assert "0 to 2" in str(error.value)
    assert packed.for_rank(np.int64(2)) == packed[2:]


@pytest.mark.parametrize("ranks", [0, -1, 2**31, 2**62, 2**70])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(ranks):
    """No memory is taken for that many dummies before it is refused."""
    with pytest.raises(treepack.PackError, match="ranks"):
        treepack.pack([{"input_ids": [1, 2]}], max_tokens=8, ranks=ranks)


@pytest.mark.parametrize("ranks", [1.5, None, True, "2"])
def test_a_number_of_ranks_of_another_type_is_refused(ranks):
    with pytest.raises(TypeError, match="ranks"):
        treepack.pack([{"input_ids": [1, 2]}], max_tokens=8, ranks=ranks)


# --------------------------------------------------------------------------------------------- cases 36, 37 and 41


@pytest.mark.parametrize("samples", range(1, 12))
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_case_36_the_same_number_of_micro_batches_on_every_rank(samples, ranks):
    packed = treepack.pack([{"input_ids": [i] * 4} for i in range(samples)], max_tokens=8, ranks=ranks)
    assert len({len(packed.for_rank(rank)) for rank in range(ranks)}) == 1
    assert sorted(s for tree in packed for s in tree.sample_index.tolist()) == list(range(samples))
    if samples < ranks:
        assert packed.stats.dummies == ranks - samples
        assert sorted(map(len, samples_of(packed))) == [0] * (ranks - samples) + [1] * samples


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_case_37_groups_are_split_where_a_rank_would_starve(groups, ranks):
    """All samples fit one tree, and there are fewer groups than ranks."""
    samples = [{"input_ids": [g] * 6 + [100 + 10 * g + i] * 2, "group_id": g} for g in range(groups) for i in range(6)]
    packed = treepack.pack(samples, max_tokens=1000, ranks=ranks)
    assert packed.stats.dummies == 0
    assert len(packed) == ranks
    check_packed(packed, samples, max_tokens=1000, ranks=ranks)
    # A cut through a group costs its prefix once more; no more cuts than are needed.
    assert size(packed)[0] <= groups * (6 + 6 * 2) + 6 * (ranks - 1)
    assert packed.stats.balance_tokens <= 6 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_stay_together_where_that_is_balanced(ranks):
    samples = [{"input_ids": [g] * 6 + [100 + 10 * g + i] * 2} for i in range(4) for g in range(8)]
    packed = treepack.pack(samples, max_tokens=1000, ranks=ranks)
    assert size(packed) == (8 * (6 + 4 * 2), ranks)
    assert packed.stats.balance_tokens == 0
    assert packed.stats.imbalance == pytest.approx(1)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("max_tokens", [14, 40, 1000])
def test_case_41_groups_that_ranks_do_not_divide(groups, ranks, max_tokens):
    samples = [
        {"input_ids": [g] * (3 + g) + [50 + 4 * g + i] * (1 + i), "group_id": g}
        for g in range(groups)
        for i in range(4)
    ]
    call = {"max_tokens": max_tokens, "ranks": ranks}
    packed = treepack.pack(samples, **call)
    check_packed(packed, samples, **call)
    assert len(packed) % ranks == 0
    assert packed.stats.dummies == max(0, ranks - len(samples))
    assert all(tree.num_tokens <= max_tokens for tree in packed)


# ---------------------------------------------------------------------------------------------------------- dummies


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("branching", ["token", "label"])
def test_a_dummy_runs_forward_and_backward(branching, multiple):
    """Valid arrays, zero terms; every parameter gets a gradient, and it is 0 (CASES 33, 36)."""
    torch = pytest.importorskip("torch")
    import tiny_model

    sets = {"sampling_mask": [2, 3], "sampling_mask_counts": [0, 1, 1]}
    sample = {"input_ids": [1, 2, 3], "advantage": 1.0, "old_log_probs": [0.0, -1.0, -1.0], **sets}
    packed = treepack.pack([sample], max_tokens=8, ranks=2, branching=branching, pad_to_multiple_of=multiple)
    real, dummy = packed
    assert not is_dummy(real)
    assert is_dummy(dummy)
    assert dummy.num_tokens == multiple
    assert (dummy.subtree_end == np.arange(multiple)).all()
    assert not dummy.attention_mask().any()
    assert dummy.unpack(np.zeros(multiple)) == dummy.unpack_terms(np.zeros(0)) == dummy.path_index() == []
    assert (
        dummy.terms["old_log_probs"].shape == dummy.terms["advantage"].shape == dummy.samples["advantage"].shape == (0,)
    )
    assert dummy.positions["old_log_probs"].tolist() == [0.0] * multiple
    if branching == "label":
        assert dummy.shift_labels.tolist() == [-100] * multiple

    model = tiny_model.Model()
    loss = tiny_model.loss_sum(model, dummy)
    assert loss.item() == 0
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
        assert not parameter.grad.any()
    tiny_model.loss_sum(model, real).backward()  # and it leaves the others as they are
    together = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    tiny_model.loss_sum(model, real).backward()
    assert all(torch.equal(x, y.grad) for x, y in zip(together, model.parameters(), strict=True))


def test_fewer_samples_than_ranks_give_the_same_gradients():
    """A step over the micro-batches of all ranks, dummies included, against each sample alone."""
    torch = pytest.importorskip("torch")
    import tiny_model

    lists = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]
    samples = [
        {"input_ids": x, "completion_mask": [0] + [1] * (len(x) - 1), "advantage": i - 1.0} for i, x in enumerate(lists)
    ]
    expected, terms = tiny_model.alone(tiny_model.Model(), samples)
    packed = treepack.pack(samples, max_tokens=16, ranks=5)
    assert packed.stats.terms == terms
    model = tiny_model.Model()
    for rank in range(5):
        for tree in packed.for_rank(rank):
            (tiny_model.loss_sum(model, tree) / terms).backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-12)
