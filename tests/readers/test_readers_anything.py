"""Whatever a JSON file holds: samples that pack, or an error of one line with the file in it; nothing else."""

import json
import re
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treepack
from treepack import PackError
from treepack.readers import ReadError, ReadWarning, open_rollouts

NAMES = re.findall(
    r"\w+",
    """
input_ids tokens token_ids prompt_ids prompt_token_ids completion_ids response_ids output_ids messages prompt
completion tools role content tool_calls function arguments weight type text loss_mask labels attention_mask
logprobs response_length reward advantages uid identity trajectory choices meta_info output_token_logprobs
nodes parent mask logprob chosen rejected chosen_labels sampling_mask sampling_mask_counts extra
""",
)
IDS = st.lists(st.integers(0, 9), max_size=4)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(allow_nan=True),
    st.sampled_from(["", "a", "user", "assistant"]),
)
TEXTS = st.sampled_from(["[1, 2]", '{"a": null}', "null", "[", '[{"role": "assistant", "content": "x"}]'])
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "gpt"]),
        "content": st.one_of(st.text("ab ", max_size=4), st.none()),
    },
    optional={
        "weight": SCALARS,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"arguments": st.one_of(TEXTS, IDS)})})
        ),
    },
)
LEAVES = st.one_of(IDS, IDS, SCALARS, TEXTS, st.lists(st.floats(-3, 0), max_size=4), st.lists(MESSAGE, max_size=3))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)),
    max_leaves=8,
)
ANY_ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=5), min_size=1, max_size=3)

#: Rows that are read, to start from.
SAID = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
STEP = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_mask": [1, 0], "completion_logprobs": [-1.0, -2.0]}
META = {"prompt_tokens": 2, "output_token_logprobs": [[-1.0, 3, "x"], [-2.0, 4, None]]}
GOOD = [
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": 0.5, "uid": "a", "identity": [1, 1, 2]},
    {"tokens": [1, 2, 3], "response_length": 2, "logprobs": [-1.0, -2.0], "extra": [5, 6, 7]},
    {"prompt_ids": [1], "response_ids": [2, 3], "labels": [-100, -100, 3], "attention_mask": [1, 1, 1]},
    {"messages": [*SAID, CALL], "tools": [{"function": {"name": "f", "parameters": {"default": None}}}], "reward": 1},
    {"prompt": SAID[:1], "completion": [CALL, *SAID[1:]]},
    {"trajectory": [{"tokens": STEP, "reward": 1.0}, {"tokens": STEP, "reward": None}], "uid": 3},
    {"prompt_token_ids": [1], "choices": [{"token_ids": [2], "logprobs": {"content": [{"logprob": -1.0}]}}]},
    {"input_ids": [1, 2], "output_ids": [3, 4], "meta_info": META},
    {"prompt_token_ids": [[1], [2]], "response_ids": [[3, 4], [5]], "loss_masks": [[1, 0], [1]], "rewards": [0.5, 1.0]},
    {
        "nodes": [
            {"parent": None, "token_ids": [1]},
            {"parent": 0, "token_ids": [2, 3], "mask": [0, 1], "logprobs": [-1.0]},
        ]
    },
]
PAIRS = [
    {"chosen": [1, 2], "rejected": [1, 3], "chosen_loss_mask": [0, 1], "rejected_loss_mask": [0, 1]},
    {"prompt_ids": [1, 2], "chosen": [3], "rejected": [4, 5], "uid": "a"},
    {
        "prompt_input_ids": [1, 2, 3, 4],
        "chosen": [1, 2, 3, 4, 5],
        "rejected": [1, 2, 3, 4, 6],
        "chosen_labels": [5],
        "rejected_labels": [6],
    },
    {"prompt": SAID[:1], "chosen": SAID[1:], "rejected": [*SAID[:1], CALL]},
]


@st.composite
def nearly(draw, good):
    """Some rows of one kind, with a value somewhere in them that is another one, or is not there."""
    rows = json.loads(json.dumps([draw(st.sampled_from(good))] * draw(st.integers(1, 3))))
    for _ in range(draw(st.integers(0, 2))):
        at = rows[draw(st.integers(0, len(rows) - 1))]
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
            elif draw(st.integers(0, 3)):
                at[key] = draw(VALUES)
                break
            else:
                del at[key]
                break
    return rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("transformers", reason="chat messages need transformers")
    import tiny_tokenizers as tiny

    return tiny.letters(tmp_path_factory.mktemp("tokenizer"), tiny.CHATML)


def outcome(path, read):
    """Samples, or None where the file is refused in one line that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReadWarning)
            return read()
    except ReadError as error:
        text = str(error)
    assert "\n" not in text
    assert str(path) in text or "--column" in text
    return None


def checked(samples):
    for sample in samples:
        ids = sample["input_ids"]
        assert ids.dtype == np.int64
        assert len(ids)
        assert ids.min() >= 0
        if "completion_mask" in sample:
            assert sample["completion_mask"].shape == ids.shape
            assert set(sample["completion_mask"].tolist()) <= {0, 1}
    try:
        treepack.pack(samples, max_tokens=4096)
    except (PackError, TypeError) as error:  # columns that do not go together over the samples
        text = str(error)
    else:
        return
    assert "sample" in text


def read_rows(path, **options):
    return outcome(path, lambda: [s for batch in open_rollouts(path, **options).batches(2) for s in batch])


def read_pairs(path, **options):
    from treepack.offline import open_pairs

    return outcome(path, lambda: [pair for batch in open_pairs(path, **options).batches() for pair in batch])


@pytest.mark.parametrize("rows", [*([row] for row in GOOD), *([row] for row in PAIRS)], ids=str)
def test_what_the_search_starts_from_is_read(tmp_path, tokenizer, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows[0]))
    chat = {"tokenizer": tokenizer} if "role" in json.dumps(rows) else {}
    assert (read_pairs if rows[0] in PAIRS else read_rows)(path, **chat)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.one_of(nearly(GOOD), nearly(GOOD), ANY_ROWS), st.booleans(), st.booleans())
def test_rows_of_any_shape(tmp_path, tokenizer, rows, chat, array):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows) if array else "\n".join(map(json.dumps, rows)))
    options = {"tokenizer": tokenizer} if chat or '"role"' in path.read_text() else {}
    samples = read_rows(path, **options)
    if samples is not None:
        checked(samples)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(nearly([row for row in GOOD if "role" not in json.dumps(row)]))
def test_parquet_gives_the_same(tmp_path, rows):
    """Rows that both formats can hold and both are read from; those of chats, whose keys Arrow may order anew, are in
    test_readers_messages.py."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    if any(row.keys() != rows[0].keys() for row in rows):
        return  # the keys of the first line are the columns
    try:
        table = pa.table({name: pa.array([row[name] for row in rows]) for name in rows[0]})
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    except (pa.ArrowException, TypeError):
        return
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    lines, table = read_rows(path), read_rows(tmp_path / "rows.parquet")
    if lines is None or table is None:
        return
    assert len(lines) == len(table)
    for one, other in zip(lines, table, strict=True):
        assert set(one) == set(other)
        for name, value in one.items():
            if isinstance(value, str):
                assert other[name] == value
            else:  # Python floats become float32, those of a table stay as they are
                assert np.shape(value) == np.shape(other[name])
                np.testing.assert_allclose(other[name], np.asarray(value, float), rtol=1e-6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.data(), st.booleans())
def test_pairs_of_any_shape(tmp_path, tokenizer, data, chat):
    pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
    side = st.one_of(IDS, st.lists(MESSAGE, min_size=1, max_size=3), VALUES)
    names = [*NAMES, "prompt_input_ids", "chosen_loss_mask", "rejected_loss_mask"]
    drawn = st.tuples(side, side, st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
    anything = st.lists(drawn.map(lambda row: row[2] | {"chosen": row[0], "rejected": row[1]}), min_size=1, max_size=3)
    rows = data.draw(st.one_of(nearly(PAIRS), nearly(PAIRS), anything))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"tokenizer": tokenizer} if chat or '"role"' in path.read_text() else {}
    pairs = read_pairs(path, **options)
    if pairs is not None:
        assert len(pairs) == len(rows)
        checked([sample for pair in pairs for sample in pair])
