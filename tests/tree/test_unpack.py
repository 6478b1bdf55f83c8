"""From a packed tree back to samples: paths, values, terms, masks, mappings; and batches in their three forms."""

import pickle
from collections.abc import Mapping, Sequence

import naive
import numpy as np
import pytest
from helpers import as_arrays, first_fit, image, sample_lists
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack.testing import as_samples, check_packed, sample_paths

branchings = st.sampled_from(["token", "label"])
orders = st.sampled_from(["largest_first", "first_seen"])


def trees(samples, multiple=3, **kwargs):
    """Packed trees and what the oracle says of them, padding included."""
    call = dict(max_tokens=12, overlong="skip", pad_to_multiple_of=multiple, **kwargs)
    forest = naive.pack(samples, **call)
    packed = first_fit(as_arrays(samples), **call)
    return list(zip(packed, forest.trees, forest.members, strict=True))


# ------------------------------------------------------------------------------------------------ back to samples


@given(sample_lists(), branchings, orders)
def test_path_index_equals_the_oracle(samples, branching, order):
    for tree, _, members in trees(samples, branching=branching, order=order):
        paths = tree.path_index()
        assert all(path.dtype == np.int32 and path.ndim == 1 for path in paths)
        assert [path.tolist() for path in paths] == naive.path_index(samples, members, branching, order)
        assert [path.tolist() for path in sample_paths(tree)] == [path.tolist() for path in paths]
        for s, path in zip(members, paths, strict=True):
            assert tree.input_ids[path].tolist() == samples[s]["input_ids"]


@given(sample_lists(), branchings)
def test_unpack_gives_every_sample_its_values(samples, branching):
    for tree, _, members in trees(samples, branching=branching):
        assert [x.tolist() for x in tree.unpack(tree.input_ids)] == [samples[s]["input_ids"] for s in members]
        table = np.stack([tree.input_ids, tree.position_ids], 1)[:, None]  # (N, 1, 2)
        for s, values in zip(members, tree.unpack(table), strict=True):
            assert values.shape == (len(samples[s]["input_ids"]), 1, 2)
            assert values[:, 0, 0].tolist() == samples[s]["input_ids"]


@given(sample_lists(), branchings)
def test_unpack_terms_gives_every_sample_its_terms(samples, branching):
    for tree, _, members in trees(samples, branching=branching):
        logp = tree.unpack_terms(tree.terms["old_log_probs"])
        wanted = [[samples[s]["old_log_probs"][i] for i in naive.targets(samples[s])] for s in members]
        assert [x.tolist() for x in logp] == wanted
        assert [x.shape for x in tree.unpack_terms(tree.terms["table"])] == [(len(x), 2) for x in wanted]


def test_values_of_a_wrong_length_are_refused():
    (tree,) = treepack.pack([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}], max_tokens=100)
    for call, right in [(tree.unpack, 4), (tree.unpack_terms, 4)]:
        for length in (0, 3, 5):
            with pytest.raises(treepack.PackError, match=rf"{length}\D.*{right}|{right}\D.*{length}"):
                call(np.zeros(length))


def test_gradients_flow_through_unpack_and_unpack_terms():
    torch = pytest.importorskip("torch")
    samples = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 5]}, {"input_ids": [1]}, {"input_ids": [1, 2, 5]}]
    (tree,) = treepack.pack(samples, max_tokens=8, pad_to_multiple_of=8)
    values = torch.arange(tree.num_tokens, dtype=torch.float64).requires_grad_()
    pieces = tree.unpack(values)
    assert [len(x) for x in pieces] == [4, 3, 1, 3]
    assert all(isinstance(x, torch.Tensor) for x in pieces)
    sum((s + 1) * x.sum() for s, x in enumerate(pieces)).backward()
    weight = np.zeros(tree.num_tokens)
    for s, path in enumerate(tree.path_index()):
        np.add.at(weight, path, s + 1)
    assert values.grad.tolist() == weight.tolist()  # shared positions add up, padding has none

    values = torch.ones(len(tree.term_row), 2, dtype=torch.float64).requires_grad_()
    pieces = tree.unpack_terms(values)
    assert [tuple(x.shape) for x in pieces] == [(3, 2), (2, 2), (0, 2), (2, 2)]
    sum((s + 1) * x.sum() for s, x in enumerate(pieces)).backward()
    assert values.grad.tolist() == [[1, 1]] * 3 + [[2, 2]] * 2 + [[4, 4]] * 2
    assert torch.autograd.gradcheck(
        lambda x: tuple(tree.unpack(x)), torch.rand(8, dtype=torch.float64).requires_grad_()
    )


def test_a_tree_on_a_device_unpacks_too():
    torch = pytest.importorskip("torch")
    (tree,) = treepack.pack([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 4]}], max_tokens=100)
    moved = tree.to("cpu")
    assert isinstance(moved.input_ids, torch.Tensor)
    assert moved.input_ids.dtype == torch.int64
    assert moved.subtree_end.dtype == torch.int32
    assert moved.subtree_end.tolist() == tree.subtree_end.tolist()
    assert [x.tolist() for x in moved.unpack(moved.input_ids)] == [[1, 2, 3], [1, 4]]
    assert [x.tolist() for x in moved.unpack_terms(moved.term_target)] == [[2, 3], [4]]
    assert isinstance(tree.input_ids, np.ndarray)


# ------------------------------------------------------------------------------------------- masks and gathered form


@given(sample_lists(), branchings, orders)
def test_attention_mask_equals_the_oracle(samples, branching, order):
    for tree, expected, members in trees(samples, branching=branching, order=order):
        mask = tree.attention_mask()
        assert mask.dtype == np.bool_
        assert mask.shape == (tree.num_tokens, tree.num_tokens)
        assert mask.tolist() == naive.visible(samples, members, expected, branching, order)


@given(sample_lists(), branchings, orders)
def test_varlen_index_equals_the_oracle(samples, branching, order):
    for tree, expected, _ in trees(samples, branching=branching, order=order):
        index, wanted = tree.varlen_index(), naive.varlen(expected)
        assert index._fields == ("kv_index", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k"):
            assert getattr(index, name).tolist() == wanted[name], name
        assert (index.max_seqlen_q, index.max_seqlen_k) == (wanted["max_seqlen_q"], wanted["max_seqlen_k"])


# ---------------------------------------------------------------------------------------------------------- columns


@given(sample_lists(), branchings)
def test_positions_raise_where_samples_disagree(samples, branching):
    for tree, expected, _ in trees(samples, branching=branching):
        for name, values in expected["positions"].items():
            if values is None:
                with pytest.raises(treepack.PackError, match=f"{name}.*identity|identity.*{name}"):
                    tree.positions[name]
            else:
                got = tree.positions[name]
                assert len(got) == tree.num_tokens
                assert got[: expected["real"]].tolist() == values


def test_columns_are_read_only_mappings():
    sample = {"input_ids": [1, 2], "old_log_probs": [0.0, -1.0], "advantage": 2.0, "weight": 3, "table": [[1], [2]]}
    (tree,) = treepack.pack([sample], max_tokens=8)
    for columns in (tree.terms, tree.samples, tree.positions):
        assert isinstance(columns, Mapping)
        assert len(columns) == len(list(columns))
        with pytest.raises(KeyError):
            columns["absent"]
        with pytest.raises(TypeError):
            columns["weight"] = 1
        assert "absent" not in columns
        assert 5 not in columns
    assert {"old_log_probs", "advantage", "weight", "table"} <= set(tree.terms)
    assert {"advantage", "weight"} <= set(tree.samples)
    assert "table" not in tree.samples
    assert {"old_log_probs", "table"} <= set(tree.positions)
    assert "weight" not in tree.positions


def test_packed_is_a_sequence():
    packed = first_fit([{"input_ids": [x, x + 1]} for x in range(5)], max_tokens=4)
    assert isinstance(packed, Sequence)
    assert len(packed) == 3
    assert packed[-1].sample_index.tolist() == [4]
    assert [t.num_tokens for t in packed[:2]] == [4, 4]
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"^tree {index} is asked for; there are 3, counted from 0$"):
            packed[index]
    assert [t.sample_index[0] for t in packed] == [0, 2, 4]
    stats = packed.stats
    assert stats.packing_ratio == 1.0
    assert (stats.samples, stats.trees) == (5, 3)
    assert all(isinstance(x, str) and y >= 0 for x, y in stats.milliseconds.items())
    assert stats.milliseconds
    with pytest.raises(AttributeError):
        stats.trees = 7


@pytest.mark.parametrize("name", ["to", "subtree_end", "input_ids", "terms", "path_index", "num_tokens", "buffer"])
def test_packed_is_not_a_tree_and_says_so(name):
    packed = treepack.pack([{"input_ids": [1, 2]}], max_tokens=4)
    with pytest.raises(AttributeError) as caught:
        getattr(packed, name)
    assert str(caught.value) == (
        f"'{name}' is of a tree, and Packed is a sequence of 1: loop over it (for tree in trees: tree.{name}), or take "
        "the only one by (tree,) = trees"
    )
    (tree,) = packed
    assert hasattr(tree, name)


@pytest.mark.parametrize("name", ["nonsense", "_array", "__array__"])
def test_other_names_of_packed_are_just_absent(name):
    packed = treepack.pack([{"input_ids": [1, 2]}], max_tokens=4)
    with pytest.raises(AttributeError, match=f"^'Packed' object has no attribute '{name}'$"):
        getattr(packed, name)


def test_sizes_and_the_device_of_a_tree():
    samples = [{"input_ids": [1, 2, 3], "completion_mask": [0, 0, 1]}]
    samples.append({"input_ids": [1, 2, 4], "completion_mask": [0, 1, 1]})
    (tree,) = treepack.pack(samples, max_tokens=8, pad_to_multiple_of=4)
    assert (tree.num_tokens, tree.num_samples, tree.num_terms, tree.device) == (4, 2, 3, "cpu")
    _, _, dummy = treepack.pack(samples, max_tokens=8, ranks=3)
    assert (dummy.num_tokens, dummy.num_samples, dummy.num_terms) == (1, 0, 0)
    torch = pytest.importorskip("torch")
    moved = tree.to("cpu")
    assert (moved.num_tokens, moved.num_samples, moved.num_terms) == (4, 2, 3)
    assert moved.device == torch.device("cpu")
    assert tree.to("meta").device == torch.device("meta")
    assert torch.zeros(1, device=tree.device).device == moved.device  # both forms name a device


def test_the_ratio_is_raw_over_packed():
    packed = treepack.pack(
        [{"input_ids": [1, 2, 3, 4]}] * 3 + [{"input_ids": [1, 2]}], max_tokens=8, pad_to_multiple_of=8
    )
    stats = packed.stats
    assert (stats.raw_tokens, stats.packed_tokens, stats.padding) == (14, 4, 4)
    assert stats.packing_ratio == 14 / 4
    assert (stats.attention_pairs, stats.attention_pairs_alone) == (10, 3 * 10 + 3)


# ------------------------------------------------------------------------------------------------------- batches


@given(sample_lists(), branchings, st.integers(0, 3), st.randoms(use_true_random=False))
def test_padded_flat_and_listed_batches_give_equal_trees(samples, branching, holes, random):
    arrays = as_arrays(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]
    wide = max(lengths) + holes
    real = np.zeros((len(samples), wide), np.int64)
    for row, length in zip(real, lengths, strict=True):
        row[sorted(random.sample(range(wide), length))] = 1  # holes on any side and in between
    flat, padded = {}, {}
    for name, _value in arrays[0].items():
        values = [np.asarray(sample[name]) for sample in arrays]
        if name == "sampling_mask":
            flat[name] = padded[name] = np.concatenate(values)
        elif values[0].ndim == 0:
            kind = np.float32 if name == "advantage" else np.int64
            flat[name] = padded[name] = np.array(values, kind)
        else:
            flat[name] = np.concatenate(values)
            filler = 0 if name == "sampling_mask_counts" else 77
            padded[name] = np.full((len(samples), wide, *values[0].shape[1:]), filler, values[0].dtype)
            padded[name][real.astype(bool)] = flat[name]
    flat["cu_seqlens"] = np.cumsum([0, *lengths])
    padded["attention_mask"] = real

    call = {"max_tokens": 12, "branching": branching}
    listed = treepack.pack(arrays, **call)
    named = {"per_token": ("table", "depth"), "per_sample": ("weight",)}
    assert image(treepack.pack(flat, **call, **named)) == image(listed)
    assert image(treepack.pack(padded, **call)) == image(listed)
    check_packed(listed, flat, **call, **named)
    check_packed(listed, padded, **call)
    rebuilt = as_samples(padded)
    assert [x["input_ids"].tolist() for x in rebuilt] == [x["input_ids"] for x in samples]


def test_torch_batches_give_equal_trees():
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0, 5, 6, 7], [5, 6, 8, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    advantage = torch.tensor([1.0, -1.0])
    padded = treepack.pack({"input_ids": ids, "attention_mask": mask, "advantage": advantage}, max_tokens=8)
    listed = [{"input_ids": [5, 6, 7], "advantage": 1.0}, {"input_ids": [5, 6, 8], "advantage": -1.0}]
    assert image(padded) == image(treepack.pack(listed, max_tokens=8))
    flat = {
        "input_ids": ids[mask.bool()],
        "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
        "advantage": advantage,
    }
    assert image(treepack.pack(flat, max_tokens=8)) == image(padded)


# ------------------------------------------------------------------------------------- the public check finds faults


class Altered:
    """A tree with one array replaced."""

    def __init__(self, tree, **arrays):
        self.__dict__.update(arrays, _tree=tree)

    def __getattr__(self, name):
        return getattr(self._tree, name)


class Result(list):
    """What `check_packed` reads of a result: trees and the samples left out."""

    skipped = ()


FAULTS = [
    ("input_ids", 1),
    ("position_ids", 1),
    ("parent", 2),
    ("subtree_end", 1),
    ("position_source", 1),
    ("position_samples", 0),
    ("sample_last_segment", 0),
    ("row_position", 1),
    ("term_row", 1),
    ("term_target", 0),
    ("term_sample", 2),
    ("term_source", 1),
    ("sampling_mask", 1),
    ("shift_labels", 1),
]


@pytest.mark.parametrize(("name", "at"), FAULTS)
def test_the_public_check_finds_a_changed_number(name, at):
    sets = {"sampling_mask": [6, 7], "sampling_mask_counts": [0, 1, 1]}
    samples = as_arrays([{"input_ids": [5, 6, 7], **sets}, {"input_ids": [5, 6, 7], **sets}, {"input_ids": [5, 9]}])
    samples[2].update(sampling_mask=np.array([9, 3]), sampling_mask_counts=np.array([0, 2]))
    call = {"max_tokens": 16, "branching": "label"}
    packed = treepack.pack(samples, **call)
    check_packed(packed, samples, **call)
    array = getattr(packed[0], name).copy()
    array[at] += 1 if array[at] <= 0 or name == "input_ids" else -1
    with pytest.raises(treepack.PackError, match="tree 0"):
        check_packed(Result([Altered(packed[0], **{name: array})]), samples, **call)


def test_the_public_check_finds_a_lost_sample_and_a_broken_budget():
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}]
    packed = treepack.pack(samples, max_tokens=3)
    check_packed(packed, samples, max_tokens=3)
    with pytest.raises(treepack.PackError, match="samples"):
        check_packed(Result(packed[:1]), samples, max_tokens=3)
    with pytest.raises(treepack.PackError, match="max_tokens"):
        check_packed(packed, samples, max_tokens=2)
    with pytest.raises(treepack.PackError, match="max_terms"):
        check_packed(packed, samples, max_tokens=3, max_terms=1)
    altered = Altered(packed[0], terms={"old_log_probs": np.array([1.0, 2.0])})
    logged = [{**sample, "old_log_probs": np.zeros(3)} for sample in samples]
    with pytest.raises(treepack.PackError, match="old_log_probs"):
        check_packed(Result([altered, packed[1]]), logged, max_tokens=3)


def test_the_contents_by_name():
    """`arrays`, `column_formats` and `disagreements` are what is in a tree; on a device the same, as tensors."""
    torch = pytest.importorskip("torch")
    samples = [
        {"input_ids": [1, 2, 3], "weight": np.array([0, 1, 2], np.int16), "advantage": 0.5},
        {"input_ids": [1, 2, 4], "weight": np.array([5, 1, 2], np.int16), "advantage": 1.5},
    ]
    (tree,) = treepack.pack(samples, max_tokens=8, branching="label")
    assert list(tree.arrays)[:3] == ["input_ids", "position_ids", "shift_labels"]
    assert [name for name in tree.arrays if "." in name] == ["terms.weight", "terms.advantage", "samples.advantage"]
    assert len(tree.arrays) == len(list(tree.arrays)) == len(set(tree.arrays))
    assert all(tree.arrays[name] is getattr(tree, name) for name in tree.arrays if "." not in name)
    assert tree.arrays["terms.weight"] is tree.terms["weight"]
    assert dict(tree.column_formats) == {"advantage": (np.float32, ()), "weight": (np.int16, ())}
    assert dict(tree.disagreements) == {"weight": (0, 1, 0)}
    for absent in ("sampling_mask", "tiles128.rows", "nonsense"):
        assert absent not in tree.arrays
        with pytest.raises(KeyError, match=f"'{absent}'; the tree has .*'input_ids'"):
            _ = tree.arrays[absent]
    moved = tree.to("cpu")
    assert list(moved.arrays) == list(tree.arrays)
    assert "tiles128.rows" not in moved.arrays
    assert all(torch.equal(moved.arrays[name], torch.from_numpy(array)) for name, array in tree.arrays.items())
    assert repr(tree.arrays).startswith("arrays(input_ids, ")


def test_the_tree_on_the_host():
    pytest.importorskip("torch")
    (tree,) = treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=8)
    moved = tree.to("cpu")
    assert tree.numpy() is tree
    assert moved.numpy() is moved.to("cpu").numpy() is tree
    stranger = pickle.loads(pickle.dumps(moved)).numpy()
    assert isinstance(stranger.input_ids, np.ndarray)
    assert stranger.input_ids.tolist() == [1, 2, 3]
