"""`attention_mask` in a list of samples: what it marks as padding is cut out of every per-token column.

input_ids       0  5  0  6  7        5 6 7        ids say nothing (0 is a token too), the mask says all
attention_mask  0  1  0  1  1
"""

import numpy as np
import pytest
from helpers import as_arrays, image, sample_lists, says
from hypothesis import given
from hypothesis import strategies as st

import treepack

GOOD = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -0.25], "advantage": 1.0}


def widened(sample, at, filler=1):
    """A sample with holes: rows of `filler` before each place in `at` of every per-token column, and the mask."""
    out = {}
    for name, value in sample.items():
        array = np.asarray(value)
        if array.ndim == 0 or name == "sampling_mask":
            out[name] = value
        else:
            out[name] = np.insert(array, at, 0 if name == "sampling_mask_counts" else filler, axis=0)
    out["attention_mask"] = np.insert(np.ones(len(sample["input_ids"]), np.int64), at, 0)
    return out


@given(sample_lists(), st.data(), st.sampled_from([np.int64, np.uint8, np.bool_, list]))
def test_holes_leave_no_trace(samples, data, kind):
    samples = as_arrays(samples)
    holed = []
    for sample in samples:
        n = len(sample["input_ids"])
        holed.append(widened(sample, sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))))
        mask = holed[-1]["attention_mask"]
        holed[-1]["attention_mask"] = mask.tolist() if kind is list else mask.astype(kind)
    before = [{name: np.copy(value) for name, value in sample.items()} for sample in holed]
    assert image(treepack.pack(holed, max_tokens=12)) == image(treepack.pack(samples, max_tokens=12))
    for sample, was in zip(holed, before, strict=True):  # the input is left as it was
        assert list(sample) == list(was)
        assert all(np.array_equal(sample[name], was[name]) for name in was)


def test_holes_by_eye():
    sample = {
        "input_ids": [0, 5, 0, 6, 7],
        "attention_mask": [0, 1, 0, 1, 1],
        "completion_mask": [1, 0, 1, 1, 1],
        "old_log_probs": [9.0, 0.0, 9.0, -0.5, -0.25],
        "table": [[9, 9], [1, 2], [9, 9], [3, 4], [5, 6]],
        "sampling_mask": [6, 8, 7],
        "sampling_mask_counts": [0, 0, 0, 2, 1],
        "advantage": 1.0,
    }
    (tree,) = treepack.pack([sample], max_tokens=3)
    assert tree.input_ids.tolist() == [5, 6, 7]
    assert tree.position_ids.tolist() == [0, 1, 2]
    assert tree.position_source.tolist() == [0, 1, 2]  # the flat input has no holes
    assert tree.term_target.tolist() == [6, 7]
    assert tree.terms["old_log_probs"].tolist() == [-0.5, -0.25]
    assert tree.positions["table"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (tree.sampling_mask.tolist(), tree.sampling_mask_counts.tolist()) == ([6, 8, 7], [2, 1])
    assert "attention_mask" not in tree.positions


def test_a_zero_id_that_is_no_hole_stays():
    samples = [
        {"input_ids": [0, 5, 0], "attention_mask": [1, 1, 1]},
        {"input_ids": [0, 5, 0], "attention_mask": [0, 1, 1]},
    ]
    (tree,) = treepack.pack(samples, max_tokens=8)
    assert [x.tolist() for x in tree.unpack(tree.input_ids)] == [[0, 5, 0], [5, 0]]


@pytest.mark.parametrize("mask", [[1, 1, 2], [0, -1, 1], np.array([1, 255, 1], np.uint8), [1, 1, 2**40]])
def test_a_mask_of_other_values_is_refused(mask):
    good = {**GOOD, "attention_mask": [1, 1, 1]}
    with pytest.raises(treepack.PackError) as error:
        treepack.pack([good, {**GOOD, "attention_mask": mask}], max_tokens=8)
    wrong = next(x for x in np.asarray(mask).tolist() if x not in (0, 1))
    says(error, "sample 1", "attention_mask", wrong, "0 (padding)", "1 (real)")


@pytest.mark.parametrize("mask", [[1.0, 1.0, 0.0], np.array(["1", "1", "0"]), None])
def test_a_mask_of_another_type_is_refused(mask):
    with pytest.raises(TypeError, match="sample 0: attention_mask"):
        treepack.pack([{**GOOD, "attention_mask": mask}], max_tokens=8)


@pytest.mark.parametrize("mask", [[1, 1], [1, 1, 1, 1], [0, 1], [0, 1, 1, 1], [[1, 1, 1]], [[1], [1], [1]], 1, 0])
def test_a_mask_of_another_shape_is_refused(mask):
    good = {**GOOD, "attention_mask": [1, 1, 1]}
    with pytest.raises(treepack.PackError, match=r"sample 1.*attention_mask"):
        treepack.pack([good, {**GOOD, "attention_mask": mask}], max_tokens=8)


def test_a_mask_that_leaves_nothing_is_an_empty_sample():
    with pytest.raises(treepack.PackError, match=r"sample 0.*input_ids"):
        treepack.pack([{**GOOD, "attention_mask": [0, 0, 0]}], max_tokens=8, overlong="skip")


def test_a_kept_set_at_padding_is_refused():
    sets = {"sampling_mask": [3, 6, 7], "sampling_mask_counts": [1, 1, 1]}
    with pytest.raises(treepack.PackError, match=r"sample 0: sampling_mask_counts.*padding"):
        treepack.pack([{**GOOD, **sets, "attention_mask": [0, 1, 1]}], max_tokens=8)


def test_every_sample_or_none_has_the_mask():
    for samples in ([GOOD, {**GOOD, "attention_mask": [1, 1, 1]}], [{**GOOD, "attention_mask": [1, 1, 1]}, GOOD]):
        with pytest.raises(treepack.PackError, match=r"sample 1.*attention_mask"):
            treepack.pack(samples, max_tokens=8)


READY = {"input_ids": np.int64, "completion_mask": np.uint8, "attention_mask": np.bool_, "old_log_probs": np.float32}
READY |= {"identity": np.int64, "extra": np.int64, "sampling_mask": np.int32, "sampling_mask_counts": np.int32}


@pytest.mark.parametrize("name", READY)
@pytest.mark.parametrize("place", [0, 1])
def test_masked_arrays_are_refused(name, place):
    """What NumPy masks would be lost without a word: the values below it would be packed. In every dtype, those that
    need no conversion included, and in any sample."""
    for dtype in (READY[name], np.int16):
        values = np.array([1, 1, 1], dtype)
        good = {**GOOD, "input_ids": np.array([1, 1, 1]), name: values}
        if name.startswith("sampling_mask"):
            good |= {"sampling_mask": np.ones(3, np.int32), "sampling_mask_counts": np.ones(3, np.int32)}
        samples = [good, good]
        samples[place] = {**good, name: np.ma.masked_array(values, mask=[0, 1, 0])}
        with pytest.raises(TypeError, match=rf"sample {place}: {name} is a masked array"):
            treepack.pack(samples, max_tokens=8)


@pytest.mark.parametrize("name", [name for name in READY if name != "attention_mask"])
def test_masked_arrays_in_a_flat_batch_are_refused(name):
    values = np.array([1, 1, 1], READY[name])
    batch = {"input_ids": np.array([1, 1, 1]), "cu_seqlens": [0, 3]}
    if name.startswith("sampling_mask"):
        batch |= {"sampling_mask": np.ones(3, np.int32), "sampling_mask_counts": np.ones(3, np.int32)}
    batch[name] = np.ma.masked_array(values, mask=[0, 1, 0])
    with pytest.raises(TypeError, match=f"{name} is a masked array"):
        treepack.pack(batch, max_tokens=8, per_token=["extra"] if name == "extra" else ())


def test_a_name_is_in_positions_even_where_samples_disagree():
    samples = [{"input_ids": [1, 2], "agreed": [7, 8], "disputed": [i + 2, i + 2], "single": i} for i in range(2)]
    (tree,) = treepack.pack(samples, max_tokens=8)
    assert "agreed" in tree.positions
    assert "disputed" in tree.positions  # asking for a name is not reading it
    assert "single" not in tree.positions
    assert "absent" not in tree.positions
    assert sorted(tree.positions) == ["agreed", "disputed"]
    assert tree.positions["agreed"].tolist() == [7, 8]
    with pytest.raises(treepack.PackError, match="disputed"):
        tree.positions["disputed"]
    with pytest.raises(treepack.PackError, match="disputed"):
        tree.positions.get("disputed")
