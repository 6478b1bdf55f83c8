"""Bad padded and flat batches, and what is no list of samples at all: refused by the name of the column."""

import warnings

import numpy as np
import pytest
from helpers import says

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


ONE_BAD_VALUE = [
    ("input_ids", 2**64 - 1, np.uint64, "sample 1: input_ids[1] is 18446744073709551615"),
    ("input_ids", 2**31, np.int64, "sample 1: input_ids[1] is 2147483648"),
    ("completion_mask", 2, np.uint8, "sample 1: completion_mask[1] is 2"),
    ("completion_mask", -1, np.int64, "sample 1: completion_mask[1] is -1"),
    ("completion_mask", 256, ">u2", "sample 1: completion_mask[1] is 256"),
    ("sampling_mask_counts", 2**40, np.int64, "sample 1: sampling_mask_counts[1] is 1099511627776"),
    ("sampling_mask_counts", -1, np.int64, "sample 1: sampling_mask_counts[1] is -1"),
    ("sampling_mask", 2**31, np.int64, "sample 1: the kept set of token 1 holds id 2147483648"),
]


@pytest.mark.parametrize(("name", "value", "dtype", "message"), ONE_BAD_VALUE)
@pytest.mark.parametrize("kind", ["flat", "left", "holes"])
def test_one_bad_value_is_named_by_its_sample_and_token(kind, name, value, dtype, message):
    """Two samples of two tokens; the second token of the second one is wrong. Tokens are counted without padding."""
    real = {"left": [[0, 1, 1], [0, 1, 1]], "holes": [[1, 0, 1], [1, 1, 0]]}.get(kind, [[1, 1, 0], [1, 1, 0]])
    real = np.array(real, bool)
    columns = {"input_ids": [1, 2, 1, 4], "completion_mask": [0, 1, 0, 1]}
    batch = {}
    if name.startswith("sampling_mask"):
        columns["sampling_mask_counts"], batch["sampling_mask"] = [0, 2, 0, 1], np.array([2, 1, 4])
    for column, values in columns.items():
        batch[column] = np.zeros(real.shape, np.int64)
        batch[column][real] = values
    if name == "sampling_mask":
        batch[name][2] = value
    else:
        batch[name] = batch[name].astype(dtype)
        batch[name][tuple(np.argwhere(real)[-1])] = value
    if kind == "flat":
        batch = {column: array[real] if array.ndim == 2 else array for column, array in batch.items()}
        batch["cu_seqlens"] = [0, 2, 4]
    else:
        batch["attention_mask"] = real
    with pytest.raises(treepack.PackError) as error:
        treepack.pack(batch, max_tokens=8)
    says(error, message)


def test_a_row_of_padding_alone():
    for real in ([[1, 1], [0, 0]], [[1, 1, 0, 1], [0, 0, 0, 0]]):
        with pytest.raises(treepack.PackError, match="sample 1: its row of attention_mask is all padding"):
            treepack.pack({"input_ids": np.ones_like(real), "attention_mask": real}, max_tokens=8)


@pytest.mark.parametrize("name", ["completion_mask", "sampling_mask_counts"])
@pytest.mark.parametrize("value", [0, 1])
def test_one_value_a_token_has_no_further_axis(name, value):
    batch = {"input_ids": np.ones((2, 4), int), "attention_mask": [[1, 1, 1, 0]] * 2, "sampling_mask": []}
    with pytest.raises(treepack.PackError, match=rf"{name} has shape \(2, 4, 2\); a column of this batch has \(2, 4\)"):
        treepack.pack(batch | {name: np.full((2, 4, 2), value)}, max_tokens=8)


@pytest.mark.parametrize("group", [None, 7, "ab", np.int64(3), np.array(3)])
def test_one_group_for_a_whole_batch(group):
    batch = {"input_ids": np.ones((2, 4), int), "attention_mask": np.ones((2, 4), int), "group_id": group}
    with pytest.raises(TypeError, match=r"group_id is a .*; a list or an array with one value per sample is needed"):
        treepack.pack(batch, max_tokens=8)


def test_tensors_that_numpy_cannot_hold():
    torch = pytest.importorskip("torch")
    ones = torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls each of these a beta
        tensors = [
            (ones.to_sparse(), "weight has layout torch.sparse_coo; .*to_dense"),
            (ones.to_sparse_csr(), "weight has layout torch.sparse_csr; .*to_dense"),
            (
                torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8),
                r"weight is quantized \(torch.quint8\); .*dequantize",
            ),
            (torch.nested.nested_tensor([ones[0], ones[1]]), "weight is a nested tensor; .*padded"),
            (
                torch.nested.nested_tensor([ones[0], ones[1]], layout=torch.jagged),
                "weight is a nested tensor; .*padded",
            ),
            (ones.bfloat16(), "weight has dtype torch.bfloat16"),
            (ones.to("meta"), "weight is on meta"),
        ]
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "attention_mask": torch.ones(2, 4, dtype=torch.bool)}
    for tensor, message in tensors:
        with pytest.raises(TypeError, match=message):
            treepack.pack(batch | {"weight": tensor}, max_tokens=8)


def test_tensors_of_a_subclass_with_a_gradient():
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):
        pass

    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 4, dtype=torch.bool)}
    weight = torch.arange(4.0).reshape(1, 4).requires_grad_().as_subclass(Mine)
    (tree,) = treepack.pack(batch | {"weight": weight}, max_tokens=8)
    assert tree.terms["weight"].tolist() == [1, 2, 3]


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


@pytest.mark.parametrize("name", ["\ud800", 5])
def test_a_name_that_is_no_text(name):
    sample = {"input_ids": [5, 6, 7], name: 1.0}
    batch = {"input_ids": [5, 6, 7], "cu_seqlens": [0, 3], name: [1.0]}
    padded = {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]], name: [1.0]}
    for call, who in [
        (lambda: treepack.pack([sample], max_tokens=8), "sample 0: it"),
        (lambda: treepack.Packer(max_tokens=8).add(sample), "sample 0: it"),
        (lambda: treepack.pack(batch, max_tokens=8), "the batch"),
        (lambda: treepack.pack(padded, max_tokens=8), "the batch"),
    ]:
        with pytest.raises((treepack.PackError, TypeError)) as error:
            call()
        assert str(error.value).startswith(f"{who} has a column named {name!r}; names are ")


def test_integers_beyond_int64_are_not_rounded():
    wide = [2**63, 2**31 - 1, 2**53 + 1]
    (tree,) = treepack.pack([{"input_ids": [5, 6, 7], "x": wide}], max_tokens=8)
    assert tree.terms["x"].tolist() == wide[1:]
    alone = [{"input_ids": [5, 6 + at], "x": x} for at, x in enumerate(wide)]
    (tree,) = treepack.pack(alone, max_tokens=8)
    assert sorted(tree.samples["x"].tolist()) == sorted(wide)
    for x in ([2**63, -1, 0], [[2**63], [-1], [0]]):
        with pytest.raises(treepack.PackError) as error:
            treepack.pack([{"input_ids": [5, 6, 7], "x": x}], max_tokens=8)
        says(
            error, "sample 0: x holds 9223372036854775808, and -1 beside it; allowed are integers that fit into 64 bits"
        )
    for low in (-1, np.int64(-1)):
        with pytest.raises(treepack.PackError) as error:
            treepack.pack([{"input_ids": [5], "x": low}, {"input_ids": [5], "x": 2**63}], max_tokens=8)
        says(error, "sample 1: x holds 9223372036854775808, and -1 beside it")


@pytest.mark.parametrize("value", [None, 0.5, "abc", {}, {"a": 1}, {1.0}, object(), b"a"])
def test_a_value_per_sample_is_a_list_or_an_array(value):
    batch = {"input_ids": [5, 6], "cu_seqlens": [0, 1, 2], "advantage": value}
    with pytest.raises(TypeError) as caught:
        treepack.pack(batch, max_tokens=8)
    kind = "None" if value is None else f"a {type(value).__name__}"
    assert str(caught.value) == f"advantage is {kind}; a list or an array with one value per sample is needed"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"per_token": "x"}, "per_token is 'x'; a list of names of columns is needed"),
        ({"per_sample": None}, "per_sample is None; a list of names of columns is needed"),
        ({"per_token": [["x"]]}, "per_token holds ['x']; names are strings"),
        (
            {"per_token": ["x"], "per_sample": ["x"]},
            "per_token and per_sample both name 'x'; a column is one of the two",
        ),
    ],
)
def test_what_is_given_of_columns_is_a_list_of_names(given, says):
    batch = {"input_ids": [5], "cu_seqlens": [0, 1], "completion_mask": [1], "x": [1]}
    with pytest.raises((treepack.PackError, TypeError)) as caught:
        treepack.pack(batch, max_tokens=8, **given)
    assert str(caught.value) == says
