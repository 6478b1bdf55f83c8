"""Bad input: `PackError` or `TypeError` that names the sample, what it has and what is allowed; never a partial result.

Then the input that looks odd and is fine: views, read-only and big-endian arrays, tensors, an empty list.
"""

import dataclasses

import numpy as np
import pytest
from helpers import COUNTS, image, says

import treepack

GOOD = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -0.25], "advantage": 1.0}


def bad(**changes):
    """The good sample with some columns changed; None takes a column away."""
    sample = {**GOOD, **changes}
    return {name: value for name, value in sample.items() if value is not None}


def refused(sample, *parts, error=treepack.PackError, **kwargs):
    """A good sample, then this one: refused by number, and the next call is as if nothing had happened."""
    kwargs.setdefault("max_tokens", 100)
    with pytest.raises(error) as caught:
        treepack.pack([GOOD, sample, GOOD], **kwargs)
    says(caught, "sample 1", *parts)
    (tree,) = treepack.pack([GOOD, GOOD], max_tokens=100)
    assert tree.num_tokens == 3
    assert len(tree.term_row) == 4


# ---------------------------------------------------------------------------------------------- one sample is wrong


@pytest.mark.parametrize(
    "ids",
    [
        [1.0, 2.0, 3.0],
        np.zeros(3, np.float64),
        np.zeros(3, np.float16),
        np.zeros(3, np.complex64),
        np.zeros(3, np.bool_),
        np.array(["a", "b", "c"]),
        np.array([1, 2, None], object),
        np.zeros(3, "datetime64[s]"),
        "abc",
        None,
    ],
)
def test_ids_of_a_wrong_type(ids):
    sample = {**GOOD, "input_ids": ids}
    refused(sample, "input_ids", error=TypeError)


@pytest.mark.parametrize("sample", [None, 5, [1, 2, 3], np.arange(3), "abc"])
def test_a_sample_that_is_no_mapping(sample):
    refused(sample, error=TypeError)


def test_a_sample_without_ids():
    refused(bad(input_ids=None), "input_ids")


@pytest.mark.parametrize("ids", [[[5, 6, 7]], np.zeros((3, 1), int), np.int64(5), 5])
def test_ids_of_a_wrong_shape(ids):
    with pytest.raises((treepack.PackError, TypeError), match=r"sample 1\b.*input_ids|input_ids.*sample 1\b"):
        treepack.pack([GOOD, {**GOOD, "input_ids": ids}], max_tokens=100)


@pytest.mark.parametrize(
    "ids", [[5, -1, 7], [5, 2**31, 7], np.array([5, 2**62, 7]), np.array([5, 2**63, 7], np.uint64)]
)
def test_ids_out_of_range(ids):
    refused(bad(input_ids=ids), "input_ids", "[1]", int(np.asarray(ids)[1]), 2**31 - 1)


def test_an_id_that_no_integer_type_holds():
    with pytest.raises((treepack.PackError, TypeError), match=r"sample 1\b"):
        treepack.pack([GOOD, bad(input_ids=[5, 2**70, 7])], max_tokens=100)


def test_ids_that_overflow_an_int32_view_are_not_wrapped():
    """2**32 + 5 must not become 5, wherever it stands and however long the sample is."""
    for n, at in [(1, 0), (100, 0), (100, 50), (100, 99)]:
        ids = np.full(n, 5, np.int64)
        ids[at] += 2**32
        with pytest.raises(treepack.PackError, match=str(2**32 + 5)):
            treepack.pack([{"input_ids": np.full(n, 5)}, {"input_ids": ids}], max_tokens=1000)


@pytest.mark.parametrize("column", [{"old_log_probs": [0.0, -1e39, 0.0]}, {"advantage": -1e39}])
def test_a_python_float_that_float32_cannot_hold(column):
    """It must not become infinite; one that is infinite stays so, and an array keeps its dtype."""
    (name,) = column
    said = rf"sample 1: {name} holds -1e\+39, and Python floats become float32, up to 3.4e38"
    with pytest.raises(treepack.PackError, match=said):
        treepack.pack([{**GOOD, name: np.multiply(column[name], 0).tolist()}, {**GOOD, **column}], max_tokens=100)
    treepack.pack([{**GOOD, name: np.array(column[name], np.float64)}], max_tokens=100)
    assert np.isinf(treepack.pack([{**GOOD, "advantage": float("inf")}], max_tokens=100)[0].terms["advantage"]).all()


@pytest.mark.parametrize("name", ["completion_mask", "old_log_probs", "identity", "extra"])
@pytest.mark.parametrize("length", [0, 2, 4])
def test_ragged_columns(name, length):
    value = np.zeros(length, np.float32 if name in ("old_log_probs", "extra") else np.int64)
    first = {**GOOD, name: np.zeros(3, value.dtype)}
    with pytest.raises(treepack.PackError) as caught:
        treepack.pack([first, {**GOOD, name: value}], max_tokens=100)
    says(caught, "sample 1", name, length, 3)


def test_columns_that_change_their_shape_or_kind():
    for name, one, two in [
        ("extra", np.zeros((3, 2)), np.zeros((3, 4))),
        ("extra", np.zeros((3, 2)), np.zeros(3)),
        ("extra", np.zeros(3), 1.0),
        ("extra", 1.0, np.zeros(3)),
        ("identity", np.zeros((3, 2), int), np.zeros(3, int)),
    ]:
        with pytest.raises((treepack.PackError, TypeError)) as caught:
            treepack.pack([{**GOOD, name: one}, {**GOOD, name: two}], max_tokens=100)
        says(caught, "sample 1", name)


@pytest.mark.parametrize("name", ["old_log_probs", "advantage", "extra"])
def test_a_column_that_only_some_samples_bring(name):
    full = {**GOOD, "extra": np.zeros(3)}
    partial = {key: value for key, value in full.items() if key != name}
    for pair in ([full, partial], [partial, full]):
        with pytest.raises(treepack.PackError) as caught:
            treepack.pack(pair, max_tokens=100)
        says(caught, "sample", name)


@pytest.mark.parametrize("value", ["text", np.array(["a", "b", "c"]), np.array([{}, 1, 2], object), object()])
def test_strings_and_objects_are_refused_by_name(value):
    with pytest.raises(TypeError, match="note"):
        treepack.pack([{**GOOD, "note": value}], max_tokens=100)


@pytest.mark.parametrize("mask", [np.zeros(3, np.float32), np.array(["0", "1", "1"]), [0.0, 1.0, 1.0]])
def test_masks_of_a_wrong_type(mask):
    refused(bad(completion_mask=mask), "completion_mask", error=TypeError)


@pytest.mark.parametrize("identity", [np.zeros(3, np.float32), np.array(["a", "b", "c"])])
def test_identity_of_a_wrong_type(identity):
    with pytest.raises(TypeError, match="identity"):
        treepack.pack([{**GOOD, "identity": identity}], max_tokens=100)


def test_counts_that_do_not_add_up():
    for kept, counts in [([6, 7], [0, 1, 2]), ([6, 7, 7], [0, 1, 1]), ([], [0, 1, 1]), ([6, 7], [0, 0, 0])]:
        refused(bad(sampling_mask=kept, sampling_mask_counts=counts), sum(counts), len(kept), "sampling_mask")


def test_counts_of_a_wrong_length():
    for counts in ([1, 1], [0, 1, 1, 0]):
        refused(bad(sampling_mask=[6, 7], sampling_mask_counts=counts), "sampling_mask_counts", len(counts), 3)


def test_negative_counts():
    refused(bad(sampling_mask=[6, 7], sampling_mask_counts=[-1, 2, 1]), "sampling_mask_counts", -1)
    huge = np.array([2**62, 2**62, 2**63 - 2**62 - 2**62 + 2], np.uint64)  # a sum that wraps around to something small
    refused(bad(sampling_mask=[6, 7], sampling_mask_counts=huge), "sampling_mask_counts")


def test_sets_without_counts_and_counts_without_sets():
    refused(bad(sampling_mask=[6, 7]), "sampling_mask_counts")
    refused(bad(sampling_mask_counts=[0, 1, 1]), "sampling_mask")


@pytest.mark.parametrize("name", ["sampling_mask", "sampling_mask_counts"])
def test_sets_of_a_wrong_type(name):
    sample = bad(sampling_mask=np.array([6, 7]), sampling_mask_counts=np.array([0, 1, 1]))
    sample[name] = sample[name].astype(np.float32)
    refused(sample, name, error=TypeError)


# ---------------------------------------------------------------------------------------------- the call is wrong


@pytest.mark.parametrize("name", ["max_tokens", "max_terms", "max_kept", "pad_to_multiple_of"])
@pytest.mark.parametrize("value", [0, -1, -(2**40)])
def test_budgets_that_are_not_positive(name, value):
    with pytest.raises(treepack.PackError) as caught:
        treepack.pack([GOOD], **{"max_tokens": 100, name: value})
    says(caught, name, value)


@pytest.mark.parametrize("name", ["max_tokens", "max_terms", "max_kept", "pad_to_multiple_of", "vocab_size"])
@pytest.mark.parametrize("value", [1.5, "8", [8]])
def test_budgets_of_a_wrong_type(name, value):
    with pytest.raises(TypeError, match=name):
        treepack.pack([GOOD], **{"max_tokens": 100, name: value})


def test_the_budget_is_required():
    with pytest.raises(TypeError, match="max_tokens"):
        treepack.pack([GOOD])
    with pytest.raises(TypeError, match="max_tokens"):
        treepack.pack([GOOD], max_tokens=None)


def test_huge_budgets_are_fine():
    (tree,) = treepack.pack([GOOD], max_tokens=2**62, max_terms=2**62, max_kept=2**62)
    assert tree.num_tokens == 3
    assert treepack.pack([GOOD], max_tokens=np.int64(3)).stats.trees == 1


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("branching", "label"), ("order", "first_seen"), ("placement", "first_fit"), ("overlong", "skip")],
)
def test_an_unknown_word(name, allowed):
    for word in ("", None, 3, np.zeros(3), ["label"]):
        with pytest.raises((treepack.PackError, TypeError)) as caught:
            treepack.pack([GOOD], max_tokens=100, **{name: word})
        says(caught, name)
    with pytest.raises(treepack.PackError) as caught:
        treepack.pack([GOOD], max_tokens=100, **{name: "nonsense"})
    says(caught, name, "nonsense", allowed)


@pytest.mark.parametrize("budget", [{"max_tokens": 2}, {"max_terms": 1}, {"max_kept": 1}])
def test_a_sample_over_a_budget(budget):
    ((name, allowed),) = budget.items()
    sample = {"input_ids": [5, 6, 7], "sampling_mask": [6, 7], "sampling_mask_counts": [0, 1, 1]}
    small = {"input_ids": [5, 6], "sampling_mask": [6], "sampling_mask_counts": [0, 1]}
    limits = {"max_tokens": 100, **budget}
    with pytest.raises(treepack.PackError) as caught:
        treepack.pack([small, sample], **limits)
    says(caught, "sample 1", name, allowed, 3 if name == "max_tokens" else 2)
    packed = treepack.pack([small, sample], overlong="skip", **limits)
    assert [(x.sample, x.tokens) for x in packed.skipped] == [(1, 3)]
    assert name in packed.skipped[0].reason
    assert packed[0].sample_index.tolist() == [0]


def test_padding_rounds_the_budget_down():
    for length, fits in [(8, True), (9, False), (10, False)]:
        call = {"max_tokens": 10, "pad_to_multiple_of": 4}
        if fits:
            assert treepack.pack([{"input_ids": [1] * length}], **call)[0].num_tokens == 8
        else:
            with pytest.raises(treepack.PackError, match=r"sample 0\b"):
                treepack.pack([{"input_ids": [1] * length}], **call)


# ----------------------------------------------------------------------------------------------- odd, and fine


def odd_forms():
    """The good sample as arrays that are not plain: views, strided, reversed, read-only, big-endian, Fortran order."""
    ids, mask, logp = np.array([5, 6, 7]), np.array([0, 1, 1]), np.array([0.0, -0.5, -0.25], np.float32)
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    yield "plain", ids, mask, logp, table
    yield (
        "view",
        np.arange(20)[5:8],
        np.array([9, 0, 1, 1, 9])[1:4],
        np.append(logp, logp)[:3],
        np.vstack([table, table])[:3],
    )
    yield (
        "strided",
        np.repeat(ids, 3)[::3],
        np.repeat(mask, 2)[::2],
        np.repeat(logp, 2)[::2],
        np.repeat(table, 2, 0)[::2],
    )
    yield "reversed", ids[::-1].copy()[::-1], mask[::-1].copy()[::-1], logp[::-1].copy()[::-1], table[::-1].copy()[::-1]
    yield "big-endian", ids.astype(">i8"), mask.astype(">i4"), logp.astype(">f4"), table.astype(">i4")
    yield "fortran", ids, mask, logp, np.asfortranarray(table)
    frozen = [x.copy() for x in (ids, mask, logp, table)]
    for x in frozen:
        x.flags.writeable = False
    yield "read-only", *frozen
    unaligned = np.zeros(25, np.uint8)[1:].view(np.int64)
    unaligned[:] = ids
    yield "unaligned", unaligned, mask, logp, table


@pytest.mark.parametrize("form", list(odd_forms()), ids=lambda form: form[0])
def test_odd_arrays_give_the_same_bytes(form):
    def sample(ids, mask, logp, table):
        return {"input_ids": ids, "completion_mask": mask, "old_log_probs": logp, "table": table, "advantage": 1.0}

    plain = next(odd_forms())
    before = [x.copy() for x in form[1:]]
    usual = treepack.pack([sample(*plain[1:])] * 2, max_tokens=100)
    odd = treepack.pack([sample(*plain[1:]), sample(*form[1:])], max_tokens=100)
    assert image(usual) == image(odd)
    assert all(np.array_equal(x, y) for x, y in zip(before, form[1:], strict=True))  # the input is left as it was


def test_mixed_dtypes_do_not_blur_an_identity():
    """2**53 and 2**53 + 1 are one float64; as identities they stay apart, or the mix is refused."""
    for other in (np.uint64, np.int64):
        pair = [np.array([0, 2**53], np.int64), np.array([0, 2**53 + 1], other)]
        try:
            (tree,) = treepack.pack([{"input_ids": [1, 2], "identity": x} for x in pair], max_tokens=100)
        except (treepack.PackError, TypeError) as error:
            assert "identity" in str(error)  # noqa: PT017
        else:
            assert tree.num_tokens == 3


def test_torch_tensors_give_the_same_bytes():
    torch = pytest.importorskip("torch")
    usual = treepack.pack([GOOD, GOOD], max_tokens=100)
    tensors = {name: torch.tensor(value) for name, value in GOOD.items()}
    assert image(treepack.pack([tensors, tensors], max_tokens=100)) == image(usual)
    half = {**GOOD, "old_log_probs": torch.tensor(GOOD["old_log_probs"], dtype=torch.float16)}
    assert treepack.pack([half], max_tokens=100)[0].terms["old_log_probs"].dtype == np.float16


def test_python_scalars_and_lists_have_fixed_dtypes():
    sample = {"input_ids": [1, 2], "f": 0.5, "i": 3, "b": True, "fs": [0.5, 1.5], "is": [1, 2], "bs": [True, True]}
    (tree,) = treepack.pack([sample], max_tokens=100)
    kinds = {"f": np.float32, "i": np.int64, "b": np.bool_, "fs": np.float32, "is": np.int64, "bs": np.bool_}
    assert {name: tree.terms[name].dtype for name in kinds} == {name: np.dtype(x) for name, x in kinds.items()}
    for dtype in (np.float64, np.float16, np.int8, np.uint64, np.complex64):
        (tree,) = treepack.pack([{"input_ids": [1, 2], "x": np.array([1, 2], dtype), "y": dtype(3)}], max_tokens=100)
        assert tree.terms["x"].dtype == tree.terms["y"].dtype == tree.samples["y"].dtype == np.dtype(dtype)


def test_an_empty_list_is_an_empty_result():
    for samples in ([], (), {"input_ids": np.zeros(0, int), "cu_seqlens": [0]}):
        packed = treepack.pack(samples, max_tokens=100)
        assert len(packed) == 0
        assert list(packed) == []
        assert list(packed.skipped) == []
        assert {name: getattr(packed.stats, name) for name in COUNTS} == dict.fromkeys(COUNTS, 0)
        assert dataclasses.is_dataclass(packed.stats)
    padded = {"input_ids": np.zeros((0, 4), int), "attention_mask": np.zeros((0, 4), int)}
    assert len(treepack.pack(padded, max_tokens=100)) == 0
    with pytest.raises(treepack.PackError):
        treepack.pack([], max_tokens=0)  # a faulty call stays one


def test_any_group_id_is_accepted_and_forces_nothing():
    groups = ["a", ("b", 1), 3, None, frozenset([1])]
    usual = treepack.pack([GOOD] * len(groups), max_tokens=100)
    grouped = treepack.pack([{**GOOD, "group_id": x} for x in groups], max_tokens=100)
    assert len(grouped) == 1
    assert grouped[0].num_tokens == usual[0].num_tokens == 3
    with pytest.raises(TypeError, match="group_id"):
        treepack.pack([{**GOOD, "group_id": [1]}], max_tokens=100)


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.uint8])
def test_integer_groups_come_back_as_they_are(kind):
    (tree,) = treepack.pack([{**GOOD, "group_id": kind(x)} for x in (7, 3, 7)], max_tokens=100)
    assert tree.samples["group_id"].tolist() == [7, 3, 7]
    ids = {"input_ids": [5, 6, 7], "cu_seqlens": [0, 1, 2, 3]}
    (tree,) = treepack.pack({**ids, "group_id": np.array([7, 3, 7], kind)}, max_tokens=100)
    assert tree.samples["group_id"].tolist() == [7, 3, 7]
