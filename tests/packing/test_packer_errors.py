"""What a `Packer` says of a sample that is not like the first one, and that doing what it says packs."""

import pytest

import treepack

GOOD = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -0.25], "advantage": 1.0}
SETS = {"sampling_mask": [6, 7], "sampling_mask_counts": [0, 1, 1]}


def lacking(name):
    return {key: value for key, value in GOOD.items() if key != name}


def test_what_differs_is_said_with_what_to_do():
    first = "the first sample of the stream"
    both = "give it in every sample or in none"
    said = [
        ({**GOOD, "group_id": 1}, f"it has a column 'group_id'; {first} has none: {both}"),
        (lacking("advantage"), f"it has no column 'advantage'; {first} has one: {both}"),
        (lacking("completion_mask"), f"it has no completion_mask; {first} has one: {both}"),
        ({**GOOD, "advantage": [1.0] * 3}, f"advantage is an array; {first} has a number (per sample) there"),
        ({**GOOD, "old_log_probs": 0.5}, f"old_log_probs is a number; {first} has an array (per token) there"),
    ]
    packer = treepack.Packer(max_tokens=8)
    packer.add(GOOD)
    for sample, message in said:
        with pytest.raises(treepack.PackError) as error:
            packer.add(sample)
        assert str(error.value) == f"sample 1: {message}"
    packer = treepack.Packer(max_tokens=8)
    packer.add(lacking("completion_mask"))
    with pytest.raises(treepack.PackError, match=f"it has a completion_mask; {first} has none: {both}"):
        packer.add(GOOD)
    packer.add({**lacking("completion_mask"), "advantage": 1})  # an integer fits a column of floats
    with pytest.raises(treepack.PackError, match=f"it has kept sets; {first} has none: give that one sampling_mask = "):
        packer.add({**lacking("completion_mask"), **SETS})
    packer = treepack.Packer(max_tokens=8)
    packer.add({**GOOD, "sampling_mask": [], "sampling_mask_counts": [0] * 3})  # as the message says
    packer.add({**GOOD, **SETS})
    assert packer.flush()[0][0].sampling_mask.tolist() == [6, 7]


@pytest.mark.parametrize(("one", "other"), [(1, -0.7), ([0, 0, 2], [0.0, -0.5, 0.5])])
def test_a_stream_keeps_its_dtypes_where_a_list_would_mix_them(one, other):
    pair = [{"input_ids": [1, 2, 3], "x": one}, {"input_ids": [1, 2, 4], "x": other}]
    packer = treepack.Packer(max_tokens=8)
    packer.add(pair[0])
    with pytest.raises(TypeError) as error:
        packer.add(pair[1])
    assert str(error.value) == (
        "sample 1: x has dtype float32; the first sample of the stream has int64, and a stream keeps that: give floats "
        "from the first sample on, say 1.0 instead of 1"
    )
    packer = treepack.Packer(max_tokens=8)
    pair[0]["x"] = [float(x) for x in one] if isinstance(one, list) else float(one)
    assert packer.add(pair[0]) == packer.add(pair[1]) == []
    ((tree,),) = packer.flush()
    (packed,) = treepack.pack(pair, max_tokens=8)
    assert tree.terms["x"].tolist() == packed.terms["x"].tolist()


@pytest.mark.parametrize(("one", "other"), [(0, "a"), ("a", 0), (("x", 1), 3), (2**70, 3)])
def test_groups_of_two_kinds(one, other):
    """Text is numbered from 0, so it would fall together with the integers."""
    packer = treepack.Packer(max_tokens=8)
    packer.add({**GOOD, "group_id": one})
    with pytest.raises(treepack.PackError, match=r"sample 1: group_id is .*: a stream has one kind"):
        packer.add({**GOOD, "group_id": other})
    packer.add({**GOOD, "group_id": one})
    assert packer.flush()[0][0].num_samples == 2
