"""Padded batches: equal to the list of their samples wherever the padding is, and nothing reads what lies at padding.

                input_ids          attention_mask
left            9 9 1 2 3          0 0 1 1 1
right           1 2 3 9 9          1 1 1 0 0
both            9 1 2 3 9          0 1 1 1 0        rows like these are borrowed as they are
hole            1 9 2 3 9          1 0 1 1 0        one row like this, and the batch is copied without its padding
"""

import numpy as np
import pytest
from helpers import as_arrays, flat, image, sample_lists, says
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack import _core
from treepack.inputs.columns import Flat, Inputs

SIDES = ("left", "right", "both", "hole")
MASKS = (np.bool_, np.uint8, np.int8, np.uint16, np.int32, np.int64, np.uint64, ">i4")
IDS = (np.int64, np.int32, np.uint64, np.uint8)
# What would be refused in a token, in every column.
JUNK = {"input_ids": 200, "completion_mask": 7, "old_log_probs": np.nan, "sampling_mask_counts": 0}


def places(length, width, side, rng):
    """Where the tokens of a row are."""
    start = {"left": width - length, "right": 0, "both": int(rng.integers(0, width - length + 1))}.get(side)
    return np.sort(rng.permutation(width)[:length]) if start is None else np.arange(start, start + length)


def padded(samples, side, extra, rng, mask=np.int64):
    """Samples of arrays as a padded batch, `extra` columns wider than the longest, with junk at padding."""
    width = max(len(sample["input_ids"]) for sample in samples) + extra
    real = np.zeros((len(samples), width), mask)
    at = [places(len(sample["input_ids"]), width, side, rng) for sample in samples]
    for row, where in zip(real, at, strict=True):
        row[where] = 1
    batch = {"attention_mask": real}
    for name in samples[0]:
        values = [np.asarray(sample[name]) for sample in samples]
        if name == "sampling_mask":
            batch[name] = np.concatenate(values)
        elif values[0].ndim == 0:
            batch[name] = np.array(values, np.float32 if name == "advantage" else np.int64)
        else:
            batch[name] = np.full((*real.shape, *values[0].shape[1:]), JUNK.get(name, 77), values[0].dtype)
            for row, where, value in zip(batch[name], at, values, strict=True):
                row[where] = value
    return batch


def strided(array):
    """The same values, not contiguous."""
    return np.repeat(array, 2, axis=0)[::2]


@given(
    sample_lists(), st.sampled_from(SIDES), st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from(MASKS),
    st.sampled_from(MASKS), st.sampled_from(IDS), st.booleans(),
)  # fmt: skip
def test_padding_leaves_no_trace(samples, side, extra, seed, real, mask, ids, contiguous):
    arrays = as_arrays(samples, ids, mask)
    batch = padded(arrays, side, extra, np.random.default_rng(seed), real)
    if not contiguous:
        batch = {name: strided(array) for name, array in batch.items()}
    before = {name: np.copy(array) for name, array in batch.items()}
    listed = image(treepack.pack(as_arrays(samples), max_tokens=12))
    assert image(treepack.pack(batch, max_tokens=12)) == listed
    for name, array in batch.items():
        assert np.array_equal(array, before[name], equal_nan=array.dtype.kind == "f"), name


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.sampled_from(SIDES), st.integers(0, 2**32 - 1))
def test_rows_longer_than_a_vector(lengths, side, seed):
    rng = np.random.default_rng(seed)
    samples = [{"input_ids": rng.integers(0, 2, n), "completion_mask": rng.integers(0, 2, n)} for n in lengths]
    batch = padded(samples, side, int(rng.integers(0, 200)), rng)
    assert image(treepack.pack(batch, max_tokens=256)) == image(treepack.pack(samples, max_tokens=256))


@pytest.mark.parametrize("side", SIDES)
def test_tensors(side):
    torch = pytest.importorskip("torch")
    samples = [{"input_ids": np.array(ids), "weight": np.array(ids) / 4} for ids in ([5, 6, 7], [5, 6], [5, 8, 9, 1])]
    batch = padded(samples, side, 3, np.random.default_rng(0))
    tensors = {name: torch.from_numpy(array).t().contiguous().t() for name, array in batch.items()}
    assert not tensors["attention_mask"].is_contiguous()
    assert image(treepack.pack(tensors, max_tokens=8)) == image(treepack.pack(samples, max_tokens=8))


def test_the_shape_of_the_batch_is_all_that_an_empty_one_needs():
    for shape in ((0, 0), (0, 5)):
        batch = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask", "completion_mask")}
        assert len(treepack.pack(batch, max_tokens=8)) == 0
    empty = np.zeros((2, 0), np.int64)
    with pytest.raises(treepack.PackError, match="sample 0"):
        treepack.pack({"input_ids": empty, "attention_mask": empty}, max_tokens=8)
    many = np.zeros((2**40, 0), np.int64)  # no memory is enough for a number for each of its rows
    with pytest.raises(treepack.PackError) as caught:
        treepack.pack({"input_ids": many, "attention_mask": many}, max_tokens=8)
    assert str(caught.value) == f"sample 0: input_ids has shape {many.shape}; a sample needs at least one token"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_what_a_token_may_not_have_is_found_beside_padding(side, dtype):
    """The same values that are no matter at padding."""
    samples = [{"input_ids": np.array([1, 2, 3]), "completion_mask": np.array([1, 1, 1], dtype)} for _ in range(3)]
    batch = padded(samples, side, 4, np.random.default_rng(1), dtype)
    assert treepack.pack(batch, max_tokens=8).stats.raw_tokens == 9
    row, column = np.argwhere(batch["attention_mask"] == 1)[5]
    for name, value in (("completion_mask", 7), ("input_ids", -4)):
        wrong = batch | {name: batch[name].copy()}
        wrong[name][row, column] = value
        with pytest.raises(treepack.PackError) as error:
            treepack.pack(wrong, max_tokens=8)
        says(error, name, value)
    wrong = batch["attention_mask"].copy()
    wrong[row, column] = 3
    with pytest.raises(treepack.PackError) as error:
        treepack.pack(batch | {"attention_mask": wrong}, max_tokens=8)
    says(error, f"attention_mask[{row}, {column}] is 3", "0 (padding) and 1 (real)")


@pytest.mark.parametrize("name", ["completion_mask", "sampling_mask_counts"])
def test_one_value_a_row_is_not_one_a_token(name):
    """Also where the batch has as many tokens as rows."""
    batch = {"input_ids": np.array([[1], [2]]), "attention_mask": np.ones((2, 1), int), "sampling_mask": []}
    with pytest.raises(treepack.PackError, match=rf"{name} has shape \(2,\); a column of this batch has \(2, 1\)"):
        treepack.pack(batch | {name: np.zeros(2, int)}, max_tokens=8)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from(SIDES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([np.int64, np.uint8, np.bool_]),
)
def test_one_identity_for_all_tokens_of_a_row(drawn, side, seed, dtype):
    """Tokens of samples with another identity do not merge, however the samples come."""
    samples = [{"input_ids": np.arange(n), "identity": dtype(value), "group_id": value} for n, value in drawn]
    listed = treepack.pack(samples, max_tokens=9)
    identity = np.array([sample["identity"] for sample in samples])
    batch = padded(samples, side, 2, np.random.default_rng(seed)) | {"identity": identity}
    assert image(treepack.pack(batch, max_tokens=9)) == image(listed)
    batch = flat(samples) | {"identity": identity, "group_id": batch["group_id"]}
    assert image(treepack.pack(batch, max_tokens=9, per_sample=["identity"])) == image(listed)


@pytest.mark.parametrize("side", SIDES)
def test_ids_of_any_size_at_padding(side):
    samples = [{"input_ids": np.array(ids)} for ids in ([1, 2, 3], [1, 2], [4])]
    batch = padded(samples, side, 2, np.random.default_rng(2))
    for junk in (-1, 2**31, 2**62, -(2**63)):
        batch["input_ids"][batch["attention_mask"] == 0] = junk
        assert image(treepack.pack(batch, max_tokens=8)) == image(treepack.pack(samples, max_tokens=8))
    unsigned = batch | {"input_ids": batch["input_ids"].astype(np.uint64)}
    assert image(treepack.pack(unsigned, max_tokens=8)) == image(treepack.pack(samples, max_tokens=8))


@pytest.mark.parametrize("true", [2, 128, 255])
def test_a_view_as_booleans_is_true_where_it_is_not_0(true):
    real = np.array([[0, true, 1, true], [true, true, 0, 0]], np.uint8)
    batch = {"input_ids": np.array([[9, 1, 2, 3], [1, 2, 9, 9]]), "attention_mask": real.view(np.bool_)}
    assert image(treepack.pack(batch, max_tokens=8)) == image(
        treepack.pack([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}], max_tokens=8)
    )


class Flipped(np.ndarray):
    """Reshapes and indexes as no array does, like `np.matrix`."""

    def reshape(self, *shape, **_):
        return np.ndarray.reshape(self, *shape)[..., None]

    def __getitem__(self, at):
        return np.ndarray.__getitem__(self, at)[None]


@pytest.mark.parametrize("side", SIDES)
def test_subclasses_are_their_values(side):
    samples = [{"input_ids": np.array(ids), "weight": np.array(ids) / 4} for ids in ([5, 6, 7], [5, 8])]
    batch = padded(samples, side, 1, np.random.default_rng(0))
    batch = {name: array.view(Flipped) for name, array in batch.items()}
    assert image(treepack.pack(batch, max_tokens=8)) == image(treepack.pack(samples, max_tokens=8))


# ------------------------------------------------------------------------------------------------------ the border


def test_spans_outside_of_a_column_are_refused():
    ids = np.arange(4)
    for starts, ends in (([0], [5]), ([-1], [2]), ([3], [1]), ([0, 2], [2]), ([2**62], [2**63 - 1])):
        cut = Flat(ids, np.array(starts), np.array(ends))
        with pytest.raises(treepack.PackError, match="do not lie within"):
            treepack.pack(Inputs(cut), max_tokens=8)
        with pytest.raises(treepack.PackError, match="do not lie within"):
            _core.mask_bytes(*cut)


def test_masks_of_floats_do_not_cross():
    for call in (lambda x: _core.token_spans(x[None]), lambda x: _core.mask_bytes(x, np.array([0]), np.array([2]))):
        with pytest.raises(TypeError, match="'f8'"):
            call(np.ones(2))
