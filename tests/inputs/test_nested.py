"""Batches of nested tensors: equal to the list of their samples, in both of torch's layouts, with and without holes."""

import re
import warnings

import numpy as np
import pytest
from helpers import as_arrays, image, sample_lists
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack import PackError

torch = pytest.importorskip("torch", reason="nested tensors are torch's")


def nested(values, form):
    """A nested tensor of arrays: jagged, strided, or a view with holes of a padded one."""
    parts = [torch.as_tensor(value) for value in values]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        if form != "holes" or parts[0].ndim > 1:
            layout = torch.strided if form == "strided" else torch.jagged
            return torch.nested.nested_tensor(parts, layout=layout)
        lengths = torch.tensor([len(part) for part in parts])
        padded = torch.full((len(parts), int(lengths.max()) + 2), 77, dtype=parts[0].dtype)
        for row, part in zip(padded, parts, strict=True):
            row[1 : 1 + len(part)] = part
        return torch.nested.narrow(padded, 1, torch.ones_like(lengths), lengths, layout=torch.jagged)


def batch_of(samples, form):
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if np.ndim(values[0]) == 0:
            batch[name] = np.array(values, np.float32 if name == "advantage" else np.int64)
        elif name == "sampling_mask":
            batch[name] = np.concatenate(values)
        else:
            batch[name] = nested(values, form)
    return batch


@given(sample_lists(), st.sampled_from(["jagged", "strided", "holes"]))
def test_the_same_trees(samples, form):
    arrays = as_arrays(samples)
    assert image(treepack.pack(batch_of(arrays, form), max_tokens=12)) == image(treepack.pack(arrays, max_tokens=12))


def test_rows_of_a_token_and_ids_of_any_dtype():
    ids = [[1, 2, 3], [1, 2, 4, 5]]
    table = [np.arange(2 * len(row)).reshape(-1, 2) for row in ids]
    listed = [{"input_ids": row, "table": rows} for row, rows in zip(ids, table, strict=True)]
    batch = {"input_ids": nested([np.array(row, np.int32) for row in ids], "jagged"), "table": nested(table, "jagged")}
    assert image(treepack.pack(batch, max_tokens=9)) == image(treepack.pack(listed, max_tokens=9))


def test_refusals():
    ids = nested([[1, 2, 3], [4, 5]], "jagged")
    short = nested([[1, 2, 3], [4]], "jagged")
    more = nested([[1], [2], [3]], "jagged")
    for message, batch in (
        ("^sample 1: old_log_probs has 1 rows; input_ids has 2 tokens", {"old_log_probs": short.float()}),
        ("old_log_probs has 3 samples; input_ids has 2", {"old_log_probs": more.float()}),
        ("attention_mask beside a nested input_ids", {"attention_mask": ids}),
        ("cu_seqlens beside a nested input_ids", {"cu_seqlens": [0, 3, 5]}),
        ("advantage has 5 rows; the batch has 2 samples", {"advantage": np.zeros(5)}),
        ("loss_mask", {"loss_mask": nested([[0, 1, 1], [0, 1]], "jagged")}),
    ):
        with pytest.raises(PackError, match=message):
            treepack.pack({"input_ids": ids} | batch, max_tokens=9)
    empty = nested([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)], "jagged")
    with pytest.raises(PackError, match=r"^sample 1: .*at least one"):
        treepack.pack({"input_ids": empty}, max_tokens=9)
    for samples in ([{"input_ids": ids}], {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "advantages": short}):
        with pytest.raises(TypeError, match=re.escape("is a nested tensor; give one sample for each of its parts")):
            treepack.pack(samples, max_tokens=9)
