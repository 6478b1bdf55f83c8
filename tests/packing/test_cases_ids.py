"""Every row of the list of known faults on padding, ids and kept sets (45-55); the rest is in `test_cases_host.py`."""

import naive
import numpy as np
import pytest
from helpers import as_arrays, assert_same, image, says

import treepack


def one(samples, **kwargs):
    """The only tree of a call with a budget that is large enough."""
    (tree,) = treepack.pack(samples, max_tokens=kwargs.pop("max_tokens", 1 << 20), **kwargs)
    return tree


def with_sets(input_ids, sets, **more):
    """A sample whose token i carries the ids `sets[i]`."""
    flat = [x for kept in sets for x in kept]
    return {"input_ids": input_ids, "sampling_mask": flat, "sampling_mask_counts": [len(x) for x in sets], **more}


def rows(tree):
    """(position, kept ids in the order emitted) of every row."""
    cu = np.concatenate([[0], np.cumsum(tree.sampling_mask_counts)])
    return [(int(p), tree.sampling_mask[a:b].tolist()) for p, a, b in zip(tree.row_position, cu, cu[1:], strict=False)]


# ------------------------------------------------------------------------------------------------ padding and ids


@pytest.mark.parametrize("pad", [0, 2, 7])
def test_case_45_pad_id_equals_a_real_id(pad):
    """Token 2 ends both answers; whatever fills the holes, the end token keeps its label."""
    ids = np.array([[7, 8, 2, pad], [7, 9, 9, 2]])
    tree = one({"input_ids": ids, "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]]}, branching="label")
    assert [tree.input_ids[path].tolist() for path in tree.path_index()] == [[7, 8, 2], [7, 9, 9, 2]]
    assert tree.term_target.tolist() == [8, 2, 9, 9, 2]
    assert sorted(tree.shift_labels.tolist()) == [-100, -100, 2, 2, 8, 9, 9]


def test_case_46_left_padding_does_not_pack():
    tree = one({"input_ids": np.array([[0, 0, 7, 8]]), "attention_mask": np.array([[0, 0, 1, 1]])})
    assert tree.input_ids.tolist() == [7, 8]
    assert tree.position_ids.tolist() == [0, 1]
    assert tree.position_source.tolist() == [0, 1]
    assert tree.term_source.tolist() == [1]


def test_case_46_holes_on_any_side_with_every_column():
    hole = 99
    batch = {
        "input_ids": np.array([[hole, 7, 8, hole], [7, hole, 8, 9], [7, 8, hole, hole]]),
        "attention_mask": np.array([[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]]),
        "completion_mask": np.array([[1, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]),
        "old_log_probs": np.arange(12, dtype=np.float32).reshape(3, 4),
        "advantage": np.array([1.0, 2.0, 3.0], np.float32),
    }
    tree = one(batch)
    assert tree.input_ids.tolist() == [7, 8, 9]
    assert tree.term_target.tolist() == [8, 8, 9, 8]
    assert tree.terms["old_log_probs"].tolist() == [2.0, 6.0, 7.0, 9.0]
    assert tree.terms["advantage"].tolist() == [1.0, 2.0, 2.0, 3.0]


def test_case_47_id_zero_is_a_token():
    samples = [{"input_ids": x} for x in ([0, 0, 0], [0, 0, 1], [0], [1, 0])]
    tree = one(samples, order="first_seen")
    assert tree.input_ids.tolist() == [0, 0, 0, 1, 1, 0]
    assert tree.term_target.tolist() == [0, 0, 0, 1, 0]
    padded = one({"input_ids": np.zeros((1, 4), int), "attention_mask": np.array([[1, 1, 1, 0]])})
    assert padded.input_ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint8, np.int16, np.uint32, np.uint64, ">i8"])
def test_case_48_integer_arrays_are_accepted(dtype):
    lists = [{"input_ids": [3, 4, 5]}, {"input_ids": [3, 4, 6]}]
    strided = np.array([3, 9, 4, 9, 6, 9], dtype)[::2]
    arrays = [{"input_ids": np.array([3, 4, 5], dtype)}, {"input_ids": strided}]
    assert image(treepack.pack(lists, max_tokens=10)) == image(treepack.pack(arrays, max_tokens=10))


def test_case_48_torch_ids_are_accepted():
    torch = pytest.importorskip("torch")
    lists = [{"input_ids": [3, 4, 5]}, {"input_ids": [3, 4, 6]}]
    for dtype in (torch.int64, torch.int32, torch.uint8):
        tensors = [{"input_ids": torch.tensor([3, 4, 5], dtype=dtype)}]
        tensors.append({"input_ids": torch.tensor([[3, 0], [4, 0], [6, 0]], dtype=dtype)[:, 0]})
        assert image(treepack.pack(lists, max_tokens=10)) == image(treepack.pack(tensors, max_tokens=10))


@pytest.mark.parametrize("bad", [np.array([1.0, 2.0]), [1.0, 2.0], np.array([True, False]), ["a", "b"]])
def test_case_48_other_types_are_a_type_error(bad):
    with pytest.raises(TypeError) as error:
        treepack.pack([{"input_ids": [1]}, {"input_ids": bad}], max_tokens=10)
    says(error, "sample 1", "input_ids", "integer")


@pytest.mark.parametrize("bad", [-1, -(2**40), 2**31, 2**40])
def test_case_48_ids_out_of_range(bad):
    for ids in ([1, 2, bad], np.array([1, 2, bad])):
        with pytest.raises(treepack.PackError) as error:
            treepack.pack([{"input_ids": [1]}, {"input_ids": ids}], max_tokens=10)
        says(error, "sample 1", bad)
    top = 2**31 - 1
    assert one([{"input_ids": [top, top]}]).term_target.tolist() == [top]


# ----------------------------------------------------------------------------------------------------- kept sets


def test_case_49_kept_sets_stay_ragged():
    """One wide set among a thousand narrow ones costs its own ids, not a table of its width."""
    n, wide = 1000, 5000
    ids = np.arange(n)
    counts = np.ones(n, np.int32)
    counts[500] = wide
    kept = np.concatenate([ids[:500], 500 + np.arange(wide), ids[501:]])
    tree = one([{"input_ids": ids, "sampling_mask": kept, "sampling_mask_counts": counts}])
    assert tree.sampling_mask.shape == (n - 2 + wide,)
    assert tree.sampling_mask_counts.shape == (n - 1,)
    assert tree.sampling_mask_counts.max() == wide
    assert tree.buffer.nbytes < 200 * n + 8 * wide  # a dense table of int32 would hold 20 MB


def test_case_50_a_set_goes_to_the_row_that_predicts_its_token():
    tree = one([with_sets([5, 6, 7], [[50], [6, 60], [70, 7]])])
    assert rows(tree) == [(0, [6, 60]), (1, [70, 7])]
    shifted = with_sets([5, 6, 7], [[6, 60], [70, 7], [50]])
    with pytest.raises(treepack.PackError) as error:
        treepack.pack([shifted], max_tokens=10)
    says(error, "sample 0", "token 1", 6)


@pytest.mark.parametrize(
    ("sets", "token", "has"),
    [
        ([[], [6], [8]], 2, 7),  # the target is outside its set
        ([[], [6], []], 2, ""),  # trained tokens with and without a set
        ([[], [], [7]], 1, ""),
        ([[], [6, 6], [7]], 1, 6),  # an id twice
        ([[], [6, -1], [7]], 1, -1),
        ([[], [6], [7, 10]], 2, 10),  # vocab_size is 10
        ([[], [6], [7, 2**31]], 2, 2**31),
    ],
)
def test_case_51_faulty_sets(sets, token, has):
    good = with_sets([5, 6, 7], [[], [6], [7]])
    bad = with_sets([5, 6, 7], sets)
    for kind in (bad, {name: np.asarray(x, np.int64) for name, x in bad.items()}):
        with pytest.raises(treepack.PackError) as error:
            treepack.pack([good, kind], max_tokens=10, vocab_size=10)
        says(error, "sample 1", f"token {token}", has)


def test_case_51_counts_that_do_not_sum_to_the_ids():
    for kept in ([6], [6, 7, 8]):
        sample = {"input_ids": [5, 6, 7], "sampling_mask": kept, "sampling_mask_counts": [0, 1, 1]}
        with pytest.raises(treepack.PackError) as error:
            treepack.pack([{"input_ids": [5]}, sample], max_tokens=10)
        says(error, "sample 1", "sampling_mask_counts", 2, len(kept))


def test_case_51_no_sets_at_all_is_fine():
    plain = one([{"input_ids": [5, 6, 7]}])
    zeros = one([with_sets([5, 6, 7], [[], [], []])])
    for tree in (plain, zeros):
        assert tree.sampling_mask_counts.tolist() == [0, 0]
        assert tree.sampling_mask.shape == (0,)
    mixed = [with_sets([5, 6], [[], [6, 9]]), {"input_ids": [5, 6]}, with_sets([5, 6], [[], []])]
    mixed[1].update(sampling_mask=[], sampling_mask_counts=[0, 0])
    tree = one(mixed)  # between samples it may differ; two rows: with the set, and over the full vocabulary
    assert rows(tree) == [(0, [6, 9]), (0, [])]
    assert tree.term_row.tolist() == [0, 1, 1]


def test_case_51_sets_on_untrained_tokens_are_ignored():
    masked = with_sets([5, 6, 7], [[1], [1, 1, 3], [7]], completion_mask=[1, 0, 1])
    assert rows(one([masked])) == [(1, [7])]
    first_only = with_sets([5, 6], [[5], []], completion_mask=[1, 1])
    assert rows(one([first_only])) == [(0, [])]


def test_case_52_a_set_of_any_length():
    kept = np.random.default_rng(0).permutation(1 << 16)
    sample = {"input_ids": [1, 2], "sampling_mask": kept, "sampling_mask_counts": np.array([0, len(kept)])}
    tree = one([sample, sample])
    assert tree.sampling_mask_counts.tolist() == [1 << 16]
    assert tree.sampling_mask.tolist() == kept.tolist()
    with pytest.raises(treepack.PackError) as error:
        treepack.pack([sample], max_tokens=10, max_kept=1000)
    says(error, "sample 0", 1 << 16, 1000)


def test_case_53_a_kept_id_zero_is_token_zero_and_nothing_is_filled():
    tree = one([with_sets([5, 0, 7], [[], [0], [7, 0, 3]]), with_sets([5, 6], [[], [6, 0]])])
    assert rows(tree) == [(0, [0]), (0, [6, 0]), (1, [7, 0, 3])]
    assert len(tree.sampling_mask) == tree.sampling_mask_counts.sum() == 6


def test_case_54_more_than_an_int32_can_count_is_an_error_before_anything_is_written():
    big = 1 << 20
    tokens = [{"input_ids": np.zeros(big, np.int64), "completion_mask": np.zeros(big, np.uint8)}] * 2049
    with pytest.raises(treepack.PackError) as error:
        treepack.pack(tokens, max_tokens=1 << 21)
    says(error, 2049 * big)
    sample = {"input_ids": [0, 1], "sampling_mask": np.arange(big, dtype=np.int32)}
    sample["sampling_mask_counts"] = np.array([0, big], np.int32)
    with pytest.raises(treepack.PackError) as error:
        treepack.pack([sample] * 2049, max_tokens=1 << 21)
    says(error, 2049 * big)


def test_case_55_other_sets_at_one_position_are_other_rows():
    samples = [
        with_sets([5, 6, 7], [[], [6, 7], [7]]),
        with_sets([5, 6, 7], [[], [7, 6], [7, 8]]),  # the same first set in another order, another second set
        with_sets([5, 9, 7], [[], [9], [7]]),
    ]
    tree = one(samples)
    assert rows(tree) == [(0, [6, 7]), (0, [9]), (1, [7]), (1, [7, 8]), (3, [7])]
    assert tree.term_row.tolist() == [0, 2, 0, 3, 1, 4]
    assert_same(treepack.pack(as_arrays(samples), max_tokens=100), naive.pack(samples, max_tokens=100))
    assert treepack.pack(samples, max_tokens=100, max_kept=7).stats.trees == 1
    assert treepack.pack(samples, max_tokens=100, max_kept=6).stats.trees == 2
