"""An error is an object: which sample and token it is of are fields, and the text is made from them last.

So a sample that gets another number changes a number, and what users named, "sample 7" say, stays as they named it.
"""

import ast
import copy
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

import treepack
from treepack.errors import PackTypeError, Where, shown

IDS, MASK = [5, 6, 7], [0, 1, 1]
GOOD = {"input_ids": IDS, "completion_mask": MASK}
SETS = {"input_ids": IDS, "sampling_mask": [6, 7], "sampling_mask_counts": [0, 1, 1]}


def error_of(call, *arguments, **keywords):
    with pytest.raises((treepack.PackError, TypeError)) as caught:
        call(*arguments, **keywords)
    return caught.value


def fields(error):
    return error.sample, error.token, error.detail


# ---------------------------------------------------------------------------------------------------------- the object


def test_a_text_alone_is_an_error():
    error = treepack.PackError("the row holds no token")
    assert (str(error), error.args) == ("the row holds no token", ("the row holds no token",))
    assert (*fields(error), error.remedy, error.budget, error.source) == (None, None, str(error), "", None, "")
    assert repr(error) == "PackError('the row holds no token')"
    assert str(treepack.PackError()) == ""
    assert isinstance(error, ValueError)
    assert not isinstance(error, TypeError)
    assert treepack.PackError.__module__ == "treepack"


def test_the_text_follows_the_fields():
    error = treepack.PackError("it has 9 tokens", sample=3)
    assert str(error) == "sample 3: it has 9 tokens"
    error.sample, error.source, error.remedy = 40, "a.jsonl", "leave it out"
    assert str(error) == "a.jsonl: sample 40: it has 9 tokens: leave it out"
    assert error.detail == "it has 9 tokens"
    error = treepack.PackError(("completion_mask", " is 2; allowed are 0 and 1"), sample=0, token=4)
    assert str(error) == "sample 0: completion_mask[4] is 2; allowed are 0 and 1"
    error.token = 5
    assert str(error) == "sample 0: completion_mask[5] is 2; allowed are 0 and 1"
    assert error.detail == "completion_mask is 2; allowed are 0 and 1"
    assert str(treepack.PackError("its row keeps no id", sample=2, token=1)) == "sample 2, token 1: its row keeps no id"
    assert str(treepack.PackError("it is lost", token=1)) == "token 1: it is lost"


def test_a_sample_that_is_compared_with_gets_its_number_too():
    error = treepack.PackError("x is an array", sample=5, against=(0, "has a number there"))
    error.shift(100)
    assert str(error) == "sample 105: x is an array; sample 100 has a number there"
    assert error.detail == "x is an array; sample 100 has a number there"
    error.rename(lambda number: (number // 10, "pair {} (chosen)"))
    assert str(error) == "pair 10 (chosen): x is an array; pair 10 (chosen) has a number there"
    assert error.sample == 10


@pytest.mark.parametrize("text", ["sample 7", "{}", "{0} {sample}", "%s", "samples 1 and 2: {", "positions[{}]"])
def test_what_is_quoted_stays_as_it_is(text):
    error = treepack.PackError((f"{text}[0]", f" is {text}"), sample=3, token=8, against=(0, f"has {text}"))
    error.shift(10)
    error.source, error.remedy = text, f"rename {text}"
    assert str(error) == f"{text}: sample 13: {text}[0][8] is {text}; sample 10 has {text}: rename {text}"


def test_where_a_value_is():
    assert str(Where("x", 2).error("is ragged")) == "sample 2: x is ragged"
    assert fields(Where("x", 2).error("is 5", 1)) == (2, 1, "x is 5")
    assert fields(Where("cu_seqlens").error("is 5", 1)) == (None, None, "cu_seqlens[1] is 5")
    error = Where("x", source="a.jsonl, line 3").type_error("is text")
    assert (str(error), type(error)) == ("a.jsonl, line 3: x is text", PackTypeError)
    assert [Where("x", 0).is_of_batch, Where("x", source="line 3").is_of_batch, Where("x").is_of_batch] == [0, 0, 1]


# ----------------------------------------------------------------------------------------------------- pickle and copy


class StepError(treepack.PackError):
    """A subclass with a constructor of its own, as a trainer may have."""

    def __init__(self, step, *, rank):
        super().__init__(("input_ids", f" is -1 in step {step}"), sample=4, token=2)
        self.step, self.rank = step, rank


def made():
    plain = treepack.PackError("it is empty", sample=1, against=(0, "is not"), remedy="leave it out")
    plain.source = "a.jsonl"
    noted = treepack.PackError("it is empty")
    noted.__notes__ = ["while the queue was drained"]
    rust = error_of(treepack.pack, [{**GOOD, "input_ids": [5, -1, 7]}], max_tokens=8)
    kind = error_of(treepack.pack, [{**GOOD, "note": "text"}], max_tokens=8)
    return [plain, noted, rust, kind, StepError(17, rank=3)]


WAYS = [lambda x, protocol=protocol: pickle.loads(pickle.dumps(x, protocol)) for protocol in range(2, 6)]
WAYS += [copy.copy, copy.deepcopy]


@pytest.mark.parametrize("again", WAYS)
@pytest.mark.parametrize("at", range(5))
def test_errors_pickle_and_copy(again, at):
    error = made()[at]
    error.shift(10)
    other = again(error)
    assert other is not error
    assert (type(other), str(other), repr(other), other.args) == (type(error), str(error), repr(error), error.args)
    assert vars(other) == vars(error)
    other.shift(1)
    assert (error.sample is None) == (other.sample is None)
    assert error.sample is None or other.sample == error.sample + 1


def _refused(at):
    raise made()[at]


def test_errors_come_back_from_a_worker_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for at, error in enumerate(made()):
            with pytest.raises(type(error)) as caught:
                pool.apply(_refused, (at,))
            assert (str(caught.value), fields(caught.value)) == (str(error), fields(error))


# --------------------------------------------------------------------------------- every error says where, in fields

SAMPLES = [
    ({"input_ids": [], "completion_mask": []}, None, "input_ids is empty; a sample needs at least one token"),
    ({"input_ids": [5, -1, 7]}, 1, "input_ids is -1; allowed are ids from 0 to 2147483647"),
    (
        {"input_ids": np.array([5, 2**63, 7], np.uint64)},
        1,
        f"input_ids is {2**63}; allowed are ids from 0 to {2**31 - 1}",
    ),
    ({"input_ids": 5}, None, "input_ids has shape (); one axis is needed"),
    ({"completion_mask": [0, 1, 2]}, 2, "completion_mask is 2; allowed are 0 (context) and 1 (trained)"),
    ({"completion_mask": np.array([0, 256, 1])}, 1, "completion_mask is 256; allowed are 0 (context) and 1 (trained)"),
    ({"completion_mask": [1, 1]}, None, "completion_mask has 2 rows; input_ids has 3 tokens, so 3 are needed; every "),
    ({"sampling_mask": [7]}, None, "it has sampling_mask and no sampling_mask_counts; "),
    ({"extra": 1}, None, "it has a column 'extra'; sample 0 has not"),
    ({"note": "text"}, None, "it has a column 'note'; sample 0 has not"),
]
KEPT = [
    ({"sampling_mask": [6, 7, 7]}, None, "sampling_mask has 3 ids; sampling_mask_counts adds up to 2"),
    ({"sampling_mask_counts": [-1, 2, 1]}, 0, "sampling_mask_counts is -1; a count is 0 or more"),
    (
        {"sampling_mask_counts": np.array([0, 2**40, 1])},
        1,
        f"sampling_mask_counts is {2**40}; allowed are integers from 0 ",
    ),
    ({"sampling_mask": [6, 8]}, 2, "the kept set lacks the token itself (id 7); the set recorded for a token must "),
    ({"sampling_mask": [6, -3]}, 2, "the kept set holds id -3; allowed are ids from 0 to 2147483647"),
    (
        {"sampling_mask": np.array([6, 2**40])},
        2,
        f"the kept set holds id {2**40}; allowed are ids from 0 to 2147483647",
    ),
    ({"sampling_mask": [6, 6, 7], "sampling_mask_counts": [0, 2, 1]}, 1, "the kept set holds id 6 twice; a set holds "),
    (
        {"sampling_mask": [6], "sampling_mask_counts": [0, 1, 0]},
        2,
        "trained token has no kept set, trained token 1 has ",
    ),
]
CASES = [(GOOD, *case) for case in SAMPLES] + [(SETS, *case) for case in KEPT]


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("good", "change", "token", "detail"), CASES)
def test_a_list_of_samples(good, change, token, detail, ready):
    """Lists are converted; arrays of a call like the last one are borrowed by Rust, which sees the fault first."""
    if ready:
        kinds = {"input_ids": np.int64, "completion_mask": np.uint8}
        good, change = (
            {name: np.array(x, kinds.get(name, np.int32)) if isinstance(x, list) else x for name, x in row.items()}
            for row in (good, change)
        )
        treepack.pack([good], max_tokens=8)
    error = error_of(treepack.pack, [good, good, {**good, **change}], max_tokens=8)
    assert (error.sample, error.token) == (2, token)
    assert error.detail.startswith(detail)
    assert str(error).startswith("sample 2: ")


@pytest.mark.parametrize(("good", "change", "token", "detail"), CASES)
def test_a_stream(good, change, token, detail):
    packer = treepack.Packer(max_tokens=8)
    for _ in range(3):
        packer.add(good)
    error = error_of(packer.add, {**good, **change})
    assert (error.sample, error.token) == (3, token)
    assert str(error).startswith("sample 3: ")
    if not detail.startswith(("it has a column", "it has sampling_mask")):  # of which a stream says more
        assert error.detail.startswith(detail)


@pytest.mark.parametrize(
    ("change", "sample", "token", "detail"),
    [
        ({"input_ids": np.array([5, 6, 7, 8, -1])}, 1, 1, "input_ids is -1; allowed are "),
        ({"completion_mask": np.array([0, 1, 1, 0, 3])}, 1, 1, "completion_mask is 3; allowed are "),
        ({"cu_seqlens": [0, 3, 2, 5]}, 1, None, "cu_seqlens runs backwards from 3 to 2; "),
        ({"cu_seqlens": [1, 5]}, None, None, "cu_seqlens[0] is 1; offsets start at 0"),
        ({"x": np.zeros(4), "per_token": ["x"]}, None, None, "x has 4 rows; the batch has 5 tokens"),
        ({"sampling_mask": [6], "sampling_mask_counts": [0, 1, 0, 0, -1]}, 1, 1, "sampling_mask_counts is -1; a count"),
        ({"sampling_mask": [2**40], "sampling_mask_counts": [0, 0, 0, 0, 1]}, 1, 1, f"the kept set holds id {2**40}; "),
    ],
)
def test_a_flat_batch(change, sample, token, detail):
    batch = {"input_ids": np.array([5, 6, 7, 8, 9]), "cu_seqlens": [0, 3, 5]} | change
    error = error_of(treepack.pack, batch, max_tokens=8, per_token=batch.pop("per_token", ()))
    assert (error.sample, error.token) == (sample, token)
    assert error.detail.startswith(detail)


@pytest.mark.parametrize(
    ("change", "sample", "token", "text"),
    [
        ({"attention_mask": [[1, 1, 0], [0, 0, 0]]}, 1, None, "sample 1: its row of attention_mask is all padding; "),
        ({"attention_mask": [[1, 1, 0], [3, 1, 1]]}, 1, None, "sample 1: attention_mask[1, 0] is 3; allowed are 0 "),
        ({"input_ids": [[5, 6, 0], [0, -4, 8]]}, 1, 0, "sample 1: input_ids[0] is -4; allowed are ids from 0 to "),
        (
            {"completion_mask": np.array([[0, 1, 9], [9, 0, 7]])},
            1,
            1,
            "sample 1: completion_mask[1] is 7; allowed are ",
        ),
    ],
)
def test_a_padded_batch(change, sample, token, text):
    """Tokens count within the sample, which starts after its padding."""
    batch = {"input_ids": [[5, 6, 0], [0, 7, 8]], "attention_mask": [[1, 1, 0], [0, 1, 1]]} | change
    error = error_of(treepack.pack, batch, max_tokens=8)
    assert (error.sample, error.token) == (sample, token)
    assert str(error).startswith(text)


def test_a_type_error_has_the_fields_too():
    for row, detail in [
        ({**GOOD, "input_ids": [1.0, 2.0]}, "input_ids has dtype float32; allowed are integers: "),
        ({**GOOD, "input_ids": "abc"}, "input_ids is text (dtype <U3); allowed are integers: "),
        ({**GOOD, "group_id": []}, "group_id is a list; it must be hashable"),
        (5, "it is a int; a sample is a dict of columns with input_ids"),
    ]:
        other = {**GOOD, "group_id": "a"} if isinstance(row, dict) and "group_id" in row else GOOD
        error = error_of(treepack.pack, [other, row], max_tokens=8)
        assert (type(error), error.sample, error.token) == (PackTypeError, 1, None)
        assert error.detail.startswith(detail)
        packer = treepack.Packer(max_tokens=8)
        packer.add(other)
        packer.add(other)
        error = error_of(packer.add, row)
        assert (type(error), error.sample, str(error)[:10]) == (PackTypeError, 2, "sample 2: ")


def test_which_sample_has_the_dtype_that_does_not_fit():
    """Empty arrays say nothing of a dtype, and are counted all the same."""
    arrays = [np.zeros((0, 2)), np.zeros((3, 2), np.int64), np.zeros((3, 2), np.uint64)]
    error = error_of(treepack.pack, [{"input_ids": IDS, "x": x} for x in arrays], max_tokens=8)
    assert str(error) == "sample 2: x has dtype uint64; sample 1 has int64, and no integer dtype holds both"
    error = error_of(treepack.pack, [{"input_ids": IDS, "x": x} for x in (1, -(2**70), 2**65)], max_tokens=8)
    assert (error.sample, error.detail) == (1, "x holds an integer that does not fit into 64 bits")


def test_a_budget_that_a_sample_breaks_is_named():
    error = error_of(treepack.pack, [SETS, SETS], max_tokens=2)
    assert (error.budget, error.sample, error.token) == ("max_tokens", 0, None)
    assert error.detail == "it has 3 tokens; max_tokens=2 is the most a tree may hold"
    assert error_of(treepack.pack, [SETS], max_tokens=8, max_terms=1).budget == "max_terms"
    assert error_of(treepack.pack, [SETS], max_tokens=8, max_kept=1).budget == "max_kept"
    assert error_of(treepack.pack, [{"input_ids": []}], max_tokens=8).budget is None
    assert error_of(treepack.pack, [{"input_ids": []}], max_tokens=8).needs is None
    packed = treepack.pack([SETS, SETS], max_tokens=2, overlong="skip")
    assert packed.skipped[1] == (1, 3, "sample 1: it has 3 tokens; max_tokens=2 is the most a tree may hold")


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 2},
        {"max_tokens": 3, "pad_to_multiple_of": 2},
        {"max_tokens": 8, "max_terms": 1},
        {"max_tokens": 8, "max_kept": 1},
    ],
)
def test_the_budget_that_would_do(options):
    """`needs` takes the sample, and one less does not."""

    def add(samples, **options):
        treepack.Packer(**options).add(*samples)

    for call in (treepack.pack, add):
        error = error_of(call, [SETS], **options)
        call([SETS], **options | {error.budget: error.needs})
        assert error_of(call, [SETS], **options | {error.budget: error.needs - 1}).budget == error.budget


def test_columns_per_position_on_which_samples_disagree():
    (tree,) = treepack.pack([{"input_ids": IDS, "x": [0, 0, y]} for y in (1, 1, 2)], max_tokens=8)
    error = error_of(tree.positions.__getitem__, "x")
    assert (error.sample, error.token) == (0, 2)
    assert error.detail == "positions['x'] is another than that of sample 2, with which it shares the position"
    assert str(error).startswith("sample 0: positions['x'] of token 2 is another than that of sample 2, ")
    assert error.remedy == "put it into `identity`, or read it per term: terms['x']"


# ------------------------------------------------------------------------------------------ columns named "sample 7"


def _texts_that_are_edited(tree):
    """Lines that call a method that looks into a text, or a function of `re`, on `str(error)` or a name for it."""

    def is_text(node):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
        return call and isinstance(node.args[0], ast.Name) and node.args[0].id in errors

    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)} | {"error"}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_text(node.value)]
    names = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            looked_at = [node.func.value, *node.args] if node.func.attr in _LOOKS else []
            if any(is_text(x) or (isinstance(x, ast.Name) and x.id in names) for x in looked_at):
                yield node.lineno


_LOOKS = (
    "sub",
    "match",
    "search",
    "fullmatch",
    "findall",
    "replace",
    "startswith",
    "endswith",
    "removeprefix",
    "split",
)


def test_no_text_of_an_error_is_edited_or_parsed():
    bad = "try: f()\nexcept ValueError as e:\n text = str(e)\n {}"
    for edit in ("re.sub('sample', 'pair', str(e))", "text.replace('a', 'b')", "text.startswith('sample')"):
        assert list(_texts_that_are_edited(ast.parse(bad.format(edit)))) == [4]
    assert list(_texts_that_are_edited(ast.parse(bad.format("print(text, str(e))")))) == []
    files = sorted(Path(treepack.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    found = [(path.name, line) for path in files for line in _texts_that_are_edited(ast.parse(path.read_text()))]
    assert found == []


NAMES = ["sample 7", "samples 7 and 9", "sample 0: x", "pair 7", "{}", "sample 7: {sample}"]


@pytest.mark.parametrize("name", NAMES)
def test_a_column_that_is_named_like_a_sample(name):
    good, bad = {**GOOD, name: [1, 2, 3]}, {**GOOD, name: [1, 2]}
    end = f"{shown(name)} has 2 rows; input_ids has 3 tokens, so 3 are needed; every token has one, those of the "
    end += "prompt too (0, say)"
    assert str(error_of(treepack.pack, [good, bad], max_tokens=8)) == f"sample 1: {end}"
    packer = treepack.Packer(max_tokens=8)
    for _ in range(12):
        packer.add(good)
    assert str(error_of(packer.add, bad)) == f"sample 12: {end}"
    assert str(error_of(packer.add, {**GOOD, name: "text"})).startswith(f"sample 12: {shown(name)} is text (dtype ")
    assert str(error_of(packer.add, GOOD)).startswith(f"sample 12: it has no column {name!r}; the first sample of the ")
    assert str(error_of(treepack.pack, [good, GOOD], max_tokens=8)) == (
        f"sample 1: column {name!r} is missing; sample 0 has it"
    )


@pytest.mark.parametrize("group", NAMES)
def test_a_group_that_is_named_like_a_sample(group):
    packer = treepack.Packer(max_tokens=8)
    for number in range(12):
        packer.add({**GOOD, "group_id": number})
    assert str(error_of(packer.add, {**GOOD, "group_id": group})) == (
        f"sample 12: group_id is {group!r}, no integer; the first sample of the stream has integers: a stream has one "
        "kind"
    )


def test_a_colon_in_the_name_of_a_column_makes_it_no_sample():
    """A batch is asked to pad its lists, whatever its columns are called."""
    batch = {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 1]], "sample 0: x": [[1], [2, 3]]}
    error = error_of(treepack.pack, batch, max_tokens=8)
    assert str(error).startswith(
        "'sample 0: x' is ragged: its lists have different lengths; give a list of dicts, one for"
    )
    assert error.sample is None
