"""Anything at all in any place: a result, a `PackError` or a `TypeError`, and nothing else. No panic, no warning."""

import itertools

import numpy as np
import pytest

import treepack


def values():
    """What people pass by mistake."""
    kinds = ["u1", ">i8", "u8", "f2", "g", "c16", "S3", "U3", "O", "m8[s]", "M8[s]", "i4,f4"]
    shapes = [(), 0, 3, (3, 2), (3, 0), (0, 3), (1, 3, 1)]
    scalars = [
        None,
        0,
        -1,
        3,
        1.5,
        True,
        "abc",
        b"abc",
        float("nan"),
        2**63,
        2**70,
        -(2**70),
        object(),
        {},
        {1: 2},
        {1},
    ]
    lists = [[], [1], [1, 2, 3], [1.0, 2.0, 3.0], [True, False, True], [[1, 2, 3]], [[1], [2], [3]], [1, [2], 3]]
    lists += [[None] * 3, ["a"] * 3, [2**63] * 3, [2**70] * 3]
    others = [(1, 2, 3), range(3), iter([1, 2, 3]), memoryview(b"abc"), bytearray(b"abc"), np.bool_(True), np.int8(3)]
    others += [np.float32(np.nan), np.broadcast_to(np.int64(4), 3), np.ma.masked_array([1, 2, 3])]
    ids = [-np.arange(3), np.array([2**31, 1, 1]), np.array([2**63, 1, 1], np.uint64), np.full(3, 2**62)]
    arrays = [np.zeros(shape, kind) for shape in shapes for kind in (int, float, bool)]
    return scalars + lists + others + ids + arrays + [np.ones(3, kind) for kind in kinds]


def tensors():
    torch = pytest.importorskip("torch")
    plain = [torch.tensor(x) for x in ([1, 2, 3], [1.0, 2.0, 3.0], 3, [[1, 2, 3]], [True, False, True], [])]
    return [
        *plain,
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
    ]


def attempt(samples, **kwargs):
    """Pack, and read everything that came out of it."""
    kwargs.setdefault("max_tokens", 10)
    try:
        for tree in treepack.pack(samples, **kwargs):
            dict(tree.terms), dict(tree.samples), tree.path_index(), tree.attention_mask(), tree.varlen_index()
            assert tree.num_tokens <= 10
    except (treepack.PackError, TypeError):
        pass  # said what is wrong; test_errors.py reads what it says


NAMES = ["input_ids", "completion_mask", "old_log_probs", "advantage", "identity", "group_id", "extra", "a.b", "", 5]
NAMES += ["sampling_mask", "sampling_mask_counts", "cu_seqlens", "attention_mask", "position_ids"]


@pytest.mark.parametrize("make", [values, tensors])
@pytest.mark.parametrize("name", NAMES)
def test_anything_in_a_sample(name, make):
    good = {"input_ids": np.array([5, 6, 7]), "completion_mask": np.array([0, 1, 1])}
    for value, places in itertools.product(make(), [(0,), (1,), (0, 1, 2)]):
        attempt([{**good, name: value} if place in places else good for place in range(3)])
    counts = {**good, "sampling_mask": np.array([6, 7]), "sampling_mask_counts": np.array([0, 1, 1])}
    for value in make():
        attempt([counts, {**counts, name: value}], vocab_size=100, overlong="skip")


@pytest.mark.parametrize("make", [values, tensors])
@pytest.mark.parametrize("name", NAMES)
def test_anything_in_a_batch(name, make):
    batches = [
        {"input_ids": np.arange(6), "cu_seqlens": np.array([0, 3, 6])},
        {"input_ids": np.arange(3), "cu_seqlens": np.array([0, 1, 2, 3]), "extra": np.zeros(3)},
        {"input_ids": np.ones((3, 3), int), "attention_mask": np.ones((3, 3), int)},
        {"input_ids": np.arange(3), "cu_seqlens": [0, 3], "sampling_mask": [1, 2], "sampling_mask_counts": [0, 1, 1]},
    ]
    for batch, value, named in itertools.product(batches, make(), [{}, {"per_token": [name]}, {"per_sample": [name]}]):
        attempt({**batch, name: value}, **named)


def test_anything_as_an_argument():
    names = ["max_tokens", "max_terms", "max_kept", "vocab_size", "pad_to_multiple_of"]
    names += ["branching", "order", "placement", "overlong", "per_token", "per_sample"]
    sample, batch = {"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7], "cu_seqlens": [0, 3], "extra": [1, 2, 3]}
    for name, value in itertools.product(names, [*values(), *tensors()]):
        attempt([sample], **{name: value})
        attempt(batch, **{name: value})


def test_anything_as_the_samples():
    for value in [*values(), *tensors()]:
        attempt(value)
        attempt([value])
        attempt([{"input_ids": [1]}, value])
