"""`check_packed` takes the options of a packing from the packing."""

import pickle

import numpy as np
import pytest

import treepack
from treepack import PackError
from treepack.testing import check_packed

SAMPLES = [{"input_ids": [7 * (i % 2), 1, 2, 3 + i], "weight": float(i)} for i in range(6)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"branching": "label"},
        {"ranks": 3},
        {"pad_to_multiple_of": 4, "max_terms": 5},
        {"placement": "first_fit", "order": "first_seen"},
    ],
)
def test_it_needs_no_others(options):
    packed = treepack.pack(SAMPLES, max_tokens=12, **options)
    check_packed(packed, SAMPLES)
    check_packed(pickle.loads(pickle.dumps(packed)), SAMPLES)
    check_packed(packed, SAMPLES, max_tokens=12, **options)


def test_it_heeds_them():
    packed = treepack.pack(SAMPLES, max_tokens=12, branching="label")
    with pytest.raises(PackError):
        check_packed(packed, SAMPLES, branching="token")
    with pytest.raises(PackError, match="break max_tokens, 2 are allowed"):
        check_packed(packed, SAMPLES, max_tokens=2)


def test_columns_of_a_flat_batch():
    """As many tokens as samples: only what the call said tells which column is which."""
    batch = {"input_ids": np.arange(3), "cu_seqlens": [0, 1, 2, 3], "a": np.arange(3) + 5, "b": np.arange(3.0)}
    check_packed(treepack.pack(batch, max_tokens=4, per_token=["a"], per_sample=["b"]), batch)


def test_tables():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(SAMPLES)
    check_packed(treepack.pack(frame, max_tokens=12), frame)
