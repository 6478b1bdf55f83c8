"""The synthetic rollouts: their exact figures, their kept sets, and that a seed fixes every byte."""

import numpy as np
import pytest

import treepack
from treepack import synthetic

SHAPES = {"agent": synthetic.agent, "multi_turn": synthetic.multi_turn}


def total(samples, name):
    return sum(len(sample[name]) for sample in samples)


def kept_sets(sample):
    """(target, set) of each token that has a set."""
    ends = np.cumsum(sample["sampling_mask_counts"])
    return [
        (int(token), sample["sampling_mask"][end - count : end].tolist())
        for token, count, end in zip(sample["input_ids"], sample["sampling_mask_counts"], ends, strict=True)
        if count
    ]


@pytest.mark.parametrize(
    ("shape", "samples", "raw", "packed", "label", "terms", "kept"),
    [("agent", 8, 51_200, 9_200, 9_207, 3_200, 9_811), ("multi_turn", 40, 113_200, 61_240, 61_279, 55_200, 169_973)],
)
def test_the_figures_of_the_two_shapes(shape, samples, raw, packed, label, terms, kept):
    rollouts = SHAPES[shape]()
    assert (len(rollouts), total(rollouts, "input_ids"), total(rollouts, "sampling_mask")) == (samples, raw, kept)

    stats = treepack.pack(rollouts, max_tokens=131_072).stats
    assert (stats.raw_tokens, stats.packed_tokens, stats.terms, stats.trees) == (raw, packed, terms, 1)
    assert treepack.pack(rollouts, max_tokens=131_072, branching="label").stats.packed_tokens == label


def test_the_lengths_of_multi_turn_samples():
    lengths = [len(sample["input_ids"]) for sample in synthetic.multi_turn()]
    # A prompt, two full turns less the last tool result, and 270 tokens for each older turn.
    assert lengths == [1_000 + 2 * 720 - 150 + 270 * older for older in range(5)] * 8


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_sets_are_those_of_a_sampler(shape):
    samples = SHAPES[shape](seed=3)
    sizes = np.concatenate([s["sampling_mask_counts"][s["completion_mask"] == 1] for s in samples])
    assert 2.9 <= sizes.mean() <= 3.2
    assert 0.44 <= (sizes == 1).mean() <= 0.46
    assert (sizes.min(), sizes.max()) == (1, 512)
    for sample in samples:
        assert sample["sampling_mask_counts"].sum() == len(sample["sampling_mask"])
        assert not sample["sampling_mask_counts"][sample["completion_mask"] == 0].any()
        assert not sample["old_log_probs"][sample["completion_mask"] == 0].any()
        for target, ids in kept_sets(sample):
            assert target in ids
            assert len(set(ids)) == len(ids)
            assert all(0 <= token < synthetic.QWEN_VOCABULARY for token in ids)


def test_shared_tokens_carry_the_same_columns():
    seen, shared = {}, 0
    for sample in synthetic.multi_turn(rollouts=2, turns=5, prompt=7, thinking=6, answer=5, tool=4, vocab_size=600):
        sets = iter(kept_sets(sample))
        ids = sample["input_ids"].tolist()
        for depth, count in enumerate(sample["sampling_mask_counts"].tolist()):
            key = tuple(ids[: depth + 1])
            shared += key in seen
            column = (float(sample["old_log_probs"][depth]), next(sets) if count else None)
            assert seen.setdefault(key, column) == column
    assert shared > 50


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_fixes_every_byte_and_sets_change_no_other_column(shape):
    first, again, other, bare = SHAPES[shape](1), SHAPES[shape](1), SHAPES[shape](2), SHAPES[shape](1, kept_sets=False)
    assert not np.array_equal(first[0]["input_ids"], other[0]["input_ids"])
    names = {"input_ids", "completion_mask", "old_log_probs", "advantage", "group_id"}
    for a, b, c in zip(first, again, bare, strict=True):
        assert set(c) == names
        assert set(a) == names | {"sampling_mask", "sampling_mask_counts"}
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], strict=True)
            if name in names:
                np.testing.assert_array_equal(value, c[name], strict=True)


def test_types_and_advantages():
    samples = synthetic.agent()
    dtypes = {name: value.dtype.name for name, value in samples[0].items() if isinstance(value, np.ndarray)}
    assert dtypes == {
        "input_ids": "int64",
        "completion_mask": "uint8",
        "old_log_probs": "float32",
        "sampling_mask": "int32",
        "sampling_mask_counts": "int32",
    }
    advantages = [sample["advantage"] for sample in samples]
    assert all(type(value) is float for value in advantages)
    assert np.mean(advantages) == pytest.approx(0, abs=1e-12)
    assert np.std(advantages) == pytest.approx(1)


def test_small_sizes_and_what_is_refused():
    assert total(synthetic.agent(answers=1, prompt=1, answer=1, vocab_size=2), "input_ids") == 2
    assert len(synthetic.multi_turn(rollouts=1, turns=1, thinking_turns=1)) == 1
    with pytest.raises(ValueError, match="answers is 0, at least 1"):
        synthetic.agent(answers=0)
    with pytest.raises(ValueError, match="thinking_turns is 7, at most turns = 6"):
        synthetic.multi_turn(thinking_turns=7)
    with pytest.raises(ValueError, match="vocab_size is 8, at least one id for each of 9 segments"):
        synthetic.agent(vocab_size=8)
