"""Columns of the response beside whole samples, lengths that say where it is, and conversations in two columns."""

import json

import numpy as np
import pytest

from treepack.readers import ReadError, open_rollouts

IDS = [1, 2, 3, 4, 5, 6]


def one(tmp_path, row, **options):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((sample,),) = open_rollouts(path, **options).batches()
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def message(tmp_path, row, **options):
    with pytest.raises(ReadError) as caught:
        one(tmp_path, row, **options)
    return str(caught.value).replace(str(tmp_path / "one.jsonl"), "FILE")


@pytest.mark.parametrize(
    "lengths", [{"response_length": 4}, {"prompt_length": 2}, {"prompt_length": 2, "response_length": 4}]
)
def test_the_response_alone_is_trained(tmp_path, lengths):
    row = {"tokens": IDS, **lengths, "rollout_log_probs": [-1.0, -2.0, -3.0, -4.0]}
    expected = {"input_ids": IDS, "old_log_probs": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0]}
    assert one(tmp_path, row) == expected | {"completion_mask": [0, 0, 1, 1, 1, 1]}
    # A mask of the response: within it a tool answered.
    row["loss_mask"] = [1, 0, 0, 1]
    assert one(tmp_path, row) == expected | {"completion_mask": [0, 0, 1, 0, 0, 1]}
    # A column for all tokens stays where it is.
    row["rollout_log_probs"] = [0.0, 0.0, -1.0, -2.0, -3.0, -4.0]
    assert one(tmp_path, row) == expected | {"completion_mask": [0, 0, 1, 0, 0, 1]}
    labels = {"tokens": IDS, **lengths, "labels": [3, -100, -100, 6]}
    assert one(tmp_path, labels)["completion_mask"] == [0, 0, 1, 0, 0, 1]
    identity = {"tokens": IDS, **lengths, "identity": [[1, 2], [1, 2], [1, 3], [1, 3]]}
    assert one(tmp_path, identity)["identity"][:3] == [[0, 0], [0, 0], [1, 2]]


def test_a_mask_and_log_probs_of_one_length_tell_the_response(tmp_path):
    """Either alone may be cut off, or be of something else."""
    row = {"tokens": IDS, "loss_mask": [1, 0, 1, 1], "rollout_log_probs": [-1.0, 0.0, -3.0, -4.0]}
    assert one(tmp_path, row) == {
        "input_ids": IDS,
        "completion_mask": [0, 0, 1, 0, 1, 1],
        "old_log_probs": [0.0, 0.0, -1.0, 0.0, -3.0, -4.0],
    }
    text = message(tmp_path, {"tokens": IDS, "loss_mask": [1, 0, 1, 1]})
    assert text == (
        "FILE, line 1: loss_mask has 4 values; needed is one for each of the 6 tokens; where they are those of a "
        "response at the end, give its length as response_length"
    )
    two = {"tokens": IDS, "loss_mask": [1, 0, 1, 1], "log_probs": [0.0] * 3}
    assert "loss_mask has 4 values" in message(tmp_path, two)
    assert "log_probs has 4 values" in message(tmp_path, {"tokens": IDS, "log_probs": [0.0] * 4})


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -float("inf"), 2.5, True, None, "2", 10**400])
def test_a_count_that_is_no_number_of_tokens(tmp_path, count):
    for name in ("response_length", "prompt_length"):
        says = message(tmp_path, {"tokens": IDS, name: count})
        assert f"{name} is " in says
        assert "a number of tokens from 0 to 6 is needed" in says


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"response_length": 7},
            "response_length is 7; a number of tokens from 0 to 6 is needed: leave it out with --column",
        ),
        ({"response_length": -1}, "response_length is -1; a number of tokens"),
        ({"response_length": 2.5}, "response_length is 2.5; a number of tokens"),
        ({"response_length": "4"}, "response_length is '4'; a number of tokens"),
        ({"response_length": None}, "response_length is null; a number of tokens"),
        (
            {"response_length": 4, "prompt_length": 1},
            "response_length is 4 and prompt_length 1; together they have to be the 6",
        ),
        (
            {"response_length": 4, "loss_mask": [1, 0]},
            "loss_mask has 2 values; needed is one for each of the 6 tokens or of the 4",
        ),
        (
            {"response_length": 4, "attention_mask": [0, 1, 1, 1, 1, 1]},
            "attention_mask marks padding, and the response is",
        ),
    ],
)
def test_lengths_that_cannot_be(tmp_path, row, says):
    assert message(tmp_path, {"tokens": IDS} | row).startswith(f"FILE, line 1: {says}")


def test_a_length_of_something_else_is_left_out(tmp_path):
    row = {"tokens": IDS, "response_length": 700}  # letters
    assert one(tmp_path, row, columns={"response_length": ""}) == {"input_ids": IDS}
    pair = {"prompt_ids": [1], "completion_ids": [2, 3], "response_length": 700}
    assert one(tmp_path, pair) == {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}


def test_a_response_of_all_or_nothing(tmp_path):
    assert one(tmp_path, {"tokens": IDS, "response_length": 6})["completion_mask"] == [1] * 6
    assert one(tmp_path, {"tokens": IDS, "response_length": 6, "log_probs": [-1.0] * 6})["old_log_probs"] == [-1.0] * 6
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"tokens": IDS, "response_length": n}) + "\n" for n in (0, 2)))
    ((first, second),) = open_rollouts(path).batches()
    assert first["completion_mask"].tolist() == [0] * 6
    assert second["completion_mask"].tolist() == [0, 0, 0, 0, 1, 1]


# --- conversations in two columns -----------------------------------------------------------------------------------

ASKED = [{"role": "system", "content": "be"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "hm"}]
ASKED += [{"role": "user", "content": "and?"}]
ANSWERED = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "ok"},
]


@pytest.fixture
def tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="chat messages need transformers")
    import tiny_tokenizers as tiny

    return lambda template="CHATML": tiny.letters(tmp_path / template, getattr(tiny, template))


@pytest.mark.parametrize("template", ["CHATML", "MARKS_MORE"])
@pytest.mark.parametrize("format", ["jsonl", "parquet", "text"])
def test_the_completion_alone_is_trained(tmp_path, tokenizer, template, format):
    import tiny_tokenizers as tiny

    row = {"prompt": ASKED, "completion": ANSWERED, "reward": 0.5, "task_id": 3}
    if format == "text":
        row |= {name: json.dumps(row[name]) for name in ("prompt", "completion")}
    path = tmp_path / "rows.parquet"
    if format == "jsonl":
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row))
    else:
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist([row]), path)
    folder = tokenizer(template)
    opened = open_rollouts(path, tokenizer=folder)
    ((sample,),) = opened.batches()
    text, runs = tiny.trained(folder, sample)
    assert "hm" in text
    call = '<call>f {"a": 1}</call>' if template == "CHATML" else ""
    assert runs == [f"{call}<|im_end|>", "ok<|im_end|>"]
    assert (sample["reward"], sample["group_id"]) == (0.5, 3)
    with pytest.raises(ReadError, match=r"column 'completion' holds chat messages; .*--tokenizer DIR"):
        open_rollouts(path)


def test_text_is_no_conversation(tmp_path, tokenizer):
    for options in ({}, {"tokenizer": tokenizer()}):
        text = message(tmp_path, {"prompt": "q", "completion": "a"}, **options)
        assert text.startswith("FILE: no column of token ids; it has prompt, completion. Looked for input_ids")
    pair = {"prompt": "q", "completion": "a", "prompt_ids": [1], "completion_ids": [2]}
    assert one(tmp_path, pair, tokenizer=tokenizer())["input_ids"] == [1, 2]


def test_a_completion_that_holds_the_prompt(tmp_path, tokenizer):
    """Whole conversations under `completion` are not put behind their prompt a second time."""
    folder = tokenizer()
    samples = [
        one(tmp_path, {"prompt": ASKED, "completion": completion}, tokenizer=folder)
        for completion in (ANSWERED, ASKED + ANSWERED)
    ]
    assert samples[0] == samples[1]
    text = message(tmp_path, {"prompt": ASKED, "completion": ASKED[1:] + ANSWERED}, tokenizer=folder)
    assert text.startswith(
        "FILE, line 1: completion starts with a message of role 'user', and is not the prompt and more"
    )


def test_trajectories_of_tau_bench(tmp_path, tokenizer):
    """A JSON array; `traj` holds the messages, arguments are text, `content` of a call is null."""
    import tiny_tokenizers as tiny

    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"who": "mia"}'}}
    traj = [
        *ASKED[:2],
        {"content": None, "role": "assistant", "tool_calls": [call], "function_call": None},
        {"role": "tool", "tool_call_id": "c", "name": "find", "content": "{}"},
        {"content": "ok", "role": "assistant"},
    ]
    info = {"task": {"user_id": "mia", "actions": []}, "source": "user", "reward_info": {"reward": 1.0, "info": {}}}
    rows = [{"task_id": n // 2, "reward": float(n % 2), "info": info, "traj": traj, "trial": n % 2} for n in range(4)]
    (tmp_path / "tau.json").write_text(json.dumps(rows, indent=2))
    folder = tokenizer()
    opened = open_rollouts(tmp_path / "tau.json", tokenizer=folder)
    assert opened.columns == {"messages": "traj", "reward": "reward", "group_id": "task_id"}
    (batch,) = opened.batches()
    assert [(sample["group_id"], sample["reward"]) for sample in batch] == [(0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)]
    _, runs = tiny.trained(folder, batch[0])
    assert runs == ['<call>find {"who": "mia"}</call><|im_end|>', "ok<|im_end|>"]
