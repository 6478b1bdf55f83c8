"""Values of all trees come back in the order of the samples, whichever trees these came into."""

import pickle

import numpy as np
import pytest
from helpers import as_arrays, sample_lists, says
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack import PackError

#: Three groups whose samples take turns, so that trees of 8 hold samples from all over the list.
SAMPLES = [{"input_ids": [10 * (i % 3), 1, 2, 3 + i], "completion_mask": [0, 0, 1, 1], "number": i} for i in range(9)]


def term_values(tree):
    """What tells the sample and the token of each term."""
    return 100 * tree.terms["number"] + tree.position_ids[tree.row_position[tree.term_row]] + 1


def test_terms_by_sample():
    packed = treepack.pack(SAMPLES, max_tokens=8)
    assert len(packed) > 2
    assert [tree.sample_index.tolist() for tree in packed] != [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    values = packed.unpack_terms([term_values(tree) for tree in packed])
    assert [x.tolist() for x in values] == [[100 * i + 2, 100 * i + 3] for i in range(9)]
    filled = packed.unpack_terms([term_values(tree) for tree in packed], fill=-1)
    assert [x.tolist() for x in filled] == [[-1, -1, 100 * i + 2, 100 * i + 3] for i in range(9)]


def test_positions_by_sample():
    packed = treepack.pack(SAMPLES, max_tokens=8)
    values = packed.unpack([np.stack([tree.input_ids, tree.position_ids], 1) for tree in packed])
    assert [x[:, 0].tolist() for x in values] == [sample["input_ids"] for sample in SAMPLES]
    assert all(x[:, 1].tolist() == [0, 1, 2, 3] for x in values)


def test_tensors_are_differentiable():
    torch = pytest.importorskip("torch")
    packed = treepack.pack(SAMPLES, max_tokens=8)
    weights = torch.arange(9, dtype=torch.float64, requires_grad=True)
    on_device = [tree.to("cpu") for tree in packed]
    values = [weights[tree.terms["number"]] for tree in on_device]
    for unpacked, grad in ((packed.unpack_terms(values), 2), (packed.unpack_terms(values, fill=0.5), 2)):
        total = sum((x * (i + 1)).sum() for i, x in enumerate(unpacked))
        (found,) = torch.autograd.grad(total, weights, retain_graph=True)
        assert found.tolist() == [grad * (i + 1) for i in range(9)]
    filled = packed.unpack_terms(values, fill=0.5)
    assert [x.tolist() for x in filled] == [[0.5, 0.5, i, i] for i in range(9)]
    positions = [torch.zeros(tree.num_tokens, 2, requires_grad=True) for tree in packed]
    sum(x.sum() for x in packed.unpack(positions)).backward()
    for tree, x in zip(packed, positions, strict=True):
        assert x.grad[:, 0].tolist() == tree.position_samples.tolist()


@given(sample_lists(), st.integers(0, 3), st.sampled_from([None, 4]), st.integers(1, 3))
def test_any_samples_budgets_and_ranks(samples, more, multiple, ranks):
    longest = max(len(sample["input_ids"]) for sample in samples)
    samples = as_arrays(samples)
    options = {"max_tokens": longest + more + (multiple or 0), "pad_to_multiple_of": multiple, "ranks": ranks}
    packed = treepack.pack(samples, **options)
    ids = packed.unpack([tree.input_ids for tree in packed])
    assert [x.tolist() for x in ids] == [sample["input_ids"].tolist() for sample in samples]
    targets = packed.unpack_terms([tree.term_target for tree in packed], fill=-1)
    for sample, got in zip(samples, targets, strict=True):
        trained = np.asarray(sample.get("completion_mask", np.ones(len(got)))) > 0
        trained[0] = False
        assert got.tolist() == np.where(trained, sample["input_ids"], -1).tolist()
    again = pickle.loads(pickle.dumps(packed))
    assert [x.tolist() for x in again.unpack([tree.input_ids for tree in again])] == [x.tolist() for x in ids]


def test_skipped_samples_are_empty_and_filled():
    samples = [*SAMPLES[:2], {**SAMPLES[2], "input_ids": [1] * 9, "completion_mask": [1] * 9}, SAMPLES[3]]
    packed = treepack.pack(samples, max_tokens=8, overlong="skip")
    assert [x.sample for x in packed.skipped] == [2]
    values = [term_values(tree).astype(np.float32) for tree in packed]
    assert [len(x) for x in packed.unpack_terms(values)] == [2, 2, 0, 2]
    filled = packed.unpack_terms(values, fill=-1.0)
    assert filled[2].tolist() == [-1.0] * 9
    assert filled[2].dtype == np.float32
    assert [len(x) for x in packed.unpack([tree.input_ids for tree in packed])] == [4, 4, 0, 4]
    nothing = treepack.pack(samples[2:3], max_tokens=8, overlong="skip")
    assert [len(x) for x in nothing.unpack_terms([])] == [0]


def test_a_dummy_has_no_values():
    packed = treepack.pack(SAMPLES[:1], max_tokens=8, ranks=2)
    values = packed.unpack_terms([tree.term_target for tree in packed])
    assert [x.tolist() for x in values] == [[2, 3]]


def test_what_is_no_list_of_values_of_trees():
    packed = treepack.pack(SAMPLES, max_tokens=8)
    values = [tree.term_target for tree in packed]
    for call in (packed.unpack, packed.unpack_terms):
        with pytest.raises(PackError) as caught:
            call(values[:-1])
        says(caught, f"values are of {len(packed) - 1} trees; there are {len(packed)}")
        with pytest.raises(TypeError, match="values is a ndarray; a list is needed, with the values of each of"):
            call(np.zeros(len(packed)))
        with pytest.raises(TypeError, match="values is a int"):
            call(7)
    with pytest.raises(PackError, match=rf"tree 1: its values have shape \(3,\); it has {packed[1].num_terms} terms"):
        packed.unpack_terms([values[0], np.zeros(3), *values[2:]])
    with pytest.raises(PackError, match=r"tree 0: its values have type list; it has \d+ positions"):
        packed.unpack([[1, 2, 3], *values[1:]])
    with pytest.raises(PackError, match=r"tree 0: its values have shape \(\)"):
        packed.unpack([np.float32(1), *values[1:]])


def test_one_tree_fills_as_well():
    (tree,) = treepack.pack(SAMPLES[:3], max_tokens=16)
    got = tree.unpack_terms(tree.term_target.astype(np.float64), fill=np.nan)
    assert [np.isnan(x).tolist() for x in got] == [[True, True, False, False]] * 3
    rows = tree.unpack_terms(np.stack([tree.term_target] * 2, 1), fill=0)
    assert [x.shape for x in rows] == [(4, 2)] * 3


def test_the_options_of_the_call():
    packed = treepack.pack(SAMPLES, max_tokens=np.int64(8), branching="label", ranks=2)
    for one in (packed, pickle.loads(pickle.dumps(packed))):
        assert (one.options.max_tokens, one.options.branching, one.options.ranks, one.ranks) == (8, "label", 2, 2)
        assert one.options.pad_to_multiple_of is None
