"""Bad padded and flat batches, and what is no list of samples at all: refused by the name of the column."""

import numpy as np
import pytest

import treepack


@pytest.mark.parametrize(
    "cu",
    [
        [0, 4, 2, 6],  # runs backwards
        [0, 2, 5],  # stops early
        [0, 2, 7],  # goes on past the end
        [1, 2, 6],  # does not start at 0
        [-1, 2, 6],
        [0, -2, 6],
        [0, 2, 2**40, 6],
        [],
        [[0, 6]],
    ],
)
def test_offsets_that_do_not_cut_the_batch(cu):
    with pytest.raises(treepack.PackError, match="cu_seqlens"):
        treepack.pack({"input_ids": np.arange(6), "cu_seqlens": np.array(cu, np.int64)}, max_tokens=100)


def test_offsets_of_a_wrong_type():
    with pytest.raises(TypeError, match="cu_seqlens"):
        treepack.pack({"input_ids": np.arange(6), "cu_seqlens": np.array([0.0, 6.0])}, max_tokens=100)


def test_batches_that_do_not_say_their_lengths():
    with pytest.raises(treepack.PackError, match="attention_mask"):
        treepack.pack({"input_ids": np.zeros((2, 3), int)}, max_tokens=100)
    with pytest.raises(treepack.PackError, match="cu_seqlens"):
        treepack.pack({"input_ids": np.zeros(3, int)}, max_tokens=100)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (6,), (2, 3, 1)])
def test_a_mask_of_another_shape(shape):
    batch = {"input_ids": np.zeros((2, 3), int), "attention_mask": np.ones(shape, int)}
    with pytest.raises(treepack.PackError, match="attention_mask"):
        treepack.pack(batch, max_tokens=100)


def test_batch_columns_of_another_length():
    flat = {"input_ids": np.arange(6), "cu_seqlens": [0, 2, 6]}
    padded = {"input_ids": np.ones((2, 3), int), "attention_mask": np.ones((2, 3), int)}
    for batch, kwargs in [
        ({**flat, "completion_mask": np.zeros(5, int)}, {}),
        ({**flat, "advantage": np.zeros(3)}, {}),
        ({**flat, "extra": np.zeros(7)}, {"per_token": ["extra"]}),
        ({**flat, "extra": np.zeros(6)}, {"per_sample": ["extra"]}),
        ({**padded, "completion_mask": np.zeros((2, 2), int)}, {}),
        ({**padded, "advantage": np.zeros(3)}, {}),
    ]:
        name = list(batch)[-1]
        with pytest.raises(treepack.PackError, match=name):
            treepack.pack(batch, max_tokens=100, **kwargs)


def test_flat_columns_must_be_named():
    flat = {"input_ids": np.arange(6), "cu_seqlens": [0, 2, 6], "extra": np.zeros(6)}
    with pytest.raises(treepack.PackError, match="extra"):
        treepack.pack(flat, max_tokens=100)
    with pytest.raises(treepack.PackError, match="absent"):
        treepack.pack(flat, max_tokens=100, per_token=["extra", "absent"])


def test_samples_of_a_wrong_type():
    for samples in (None, 5, "abc", 1.5):
        with pytest.raises(TypeError):
            treepack.pack(samples, max_tokens=100)
