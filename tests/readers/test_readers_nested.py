"""Rows that hold several samples: what rollouts of the field look like, each read as a sample for each answer, of which
the answer alone is trained. The rows are ours; the names of their fields are those of the tools that write them."""

import json
import re
from pathlib import Path

import pytest
from nested_rows import EXPECTED, TRAJECTORIES, choice, close, message, read, sample, write

import treepack
from treepack.readers import ReadError, open_rollouts


@pytest.mark.parametrize("format", ["jsonl", "json", "parquet", "datasets"])
def test_steps_of_verifiers(tmp_path, format):
    path = write(tmp_path, format, TRAJECTORIES)
    opened = open_rollouts(path)
    assert opened.columns == {
        "prompt_ids": "trajectory[].tokens.prompt_ids",
        "completion_ids": "trajectory[].tokens.completion_ids",
        "completion_mask": "trajectory[].tokens.completion_mask",
        "old_log_probs": "trajectory[].tokens.completion_logprobs",
        "advantage": "trajectory[].advantage",
        "reward": "reward",
        "group_id": "example_id",
    }
    assert opened.size is None
    close(read(path), EXPECTED)
    for start in range(6):
        for size in (1, 2, 100):
            batches = list(opened.batches(size, start=start))
            assert all(0 < len(batch) <= size for batch in batches)
            close([sample for batch in batches for sample in batch], EXPECTED[start:])
    assert opened.fraction == 1.0
    (tree,) = treepack.pack(read(path), max_tokens=32)
    # 1 2 3 4 5 6, a fork after 2 where the history was rewritten, and the other prompt.
    assert tree.num_tokens == 6 + 3 + 3
    assert sorted(tree.term_target.tolist()) == sorted([3, 4, 6, 6, 7, 9, 9])


def test_steps_as_text_in_a_column(tmp_path):
    """What has no type in a table is stored as JSON text."""
    rows = [row | {"trajectory": json.dumps(row["trajectory"])} for row in TRAJECTORIES]
    close(read(write(tmp_path, "parquet", rows)), EXPECTED)


def test_triplets_of_agent_lightning(tmp_path):
    def triplet(prompt, answer, reward, **more):
        return {
            "prompt": {"token_ids": prompt, "image_urls": []},
            "response": {"token_ids": answer, **more},
            "reward": reward,
            "metadata": {"server": {}},
        }

    rows = [
        {
            "rollout_id": "r1",
            "data_id": "d1",
            "final_reward": 0.5,
            "triplets": [
                triplet([1, 2], [3], None, log_probs=[-0.5]),
                triplet([1, 2, 3, 4], [5, 6], 0.5, log_probs=[-0.25, -0.125]),
            ],
        }
    ]
    expected = [
        sample([1, 2], [3], [-0.5], reward=float("nan"), group_id="d1"),
        sample([1, 2, 3, 4], [5, 6], [-0.25, -0.125], reward=0.5, group_id="d1"),
    ]
    close(read(write(tmp_path, "jsonl", rows)), expected)
    # Log-probs as a server words them, in the older form of the tool.
    content = [
        [{"token": "x", "logprob": value, "bytes": [1]} for value in values] for values in ([-0.5], [-0.25, -0.125])
    ]
    rows[0]["triplets"] = [
        triplet([1, 2], [3], None, logprobs=content[0]),
        triplet([1, 2, 3, 4], [5, 6], 0.5, logprobs=content[1]),
    ]
    close(read(write(tmp_path, "jsonl", rows)), expected)
    given = {"reward": "final_reward"}
    assert [sample["reward"] for sample in read(write(tmp_path, "jsonl", rows), columns=given)] == [0.5, 0.5]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_columns_of_lists_of_skyrl(tmp_path, format):
    rows = [
        {
            "prompt_token_ids": [[1, 2], [1, 2], [5]],
            "response_ids": [[3, 4], [6], [7, 8]],
            "rewards": [0.5, 1.0, 0.0],
            "loss_masks": [[1, 0], [1], [1, 1]],
            "stop_reasons": ["stop", "length", "stop"],
            "rollout_metrics": {"mean": 0.5},
            "rollout_logprobs": [[-1.0, -2.0], [-3.0], [-4.0, -5.0]],
            "trajectory_ids": [{"instance_id": x, "repetition_id": n} for n, x in enumerate("aab")],
        },
        {
            "prompt_token_ids": [[9]],
            "response_ids": [[9]],
            "rewards": [2.0],
            "loss_masks": [[1]],
            "stop_reasons": ["stop"],
            "rollout_metrics": {"mean": 2.0},
            "rollout_logprobs": [[-6.0]],
            "trajectory_ids": [{"instance_id": "c", "repetition_id": 0}],
        },
    ]
    expected = [
        sample([1, 2], [3, 4], [-1.0, -2.0], reward=0.5, group_id="a") | {"completion_mask": [0, 0, 1, 0]},
        sample([1, 2], [6], [-3.0], reward=1.0, group_id="a"),
        sample([5], [7, 8], [-4.0, -5.0], reward=0.0, group_id="b"),
        sample([9], [9], [-6.0], reward=2.0, group_id="c"),
    ]
    path = write(tmp_path, format, rows)
    assert open_rollouts(path).columns["completion_mask"] == "loss_masks[]"
    close(read(path), expected)
    for row in rows:  # a reward for each token, as steps have
        row["rewards"] = [[float(token) for token in ids] for ids in row["response_ids"]]
    got = read(write(tmp_path, format, rows))
    assert got[0]["reward"].tolist() == [0, 0, 3, 4]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_traces_of_verifiers(tmp_path, format):
    """Messages that form a tree, each with the tokens that it adds: a sample for each leaf; what branches share is
    trained once. Log-probs are those of sampled tokens alone."""

    def node(parent, ids, mask=(), log_probs=(), **more):
        said = {"role": "user", "content": "x"}
        entry = {"parent": parent, "message": said, "sampled": bool(mask), "token_ids": ids}
        return entry | {"mask": [bool(on) for on in mask] or [False] * len(ids), "logprobs": list(log_probs), **more}

    nodes = [
        node(None, [1, 2]),
        node(0, [7, 3, 4], [0, 1, 1], [-0.5, -0.25]),
        node(1, [5]),
        node(2, [7, 6], [0, 1], [-1.0]),
        node(1, [8, 9]),
        node(4, [7, 7], [0, 1], [-2.0]),
    ]
    rows = [
        {
            "id": "e",
            "traces": [
                {"id": "t", "nodes": nodes, "stop_condition": "x"},
                {"id": "u", "nodes": nodes[:2], "stop_condition": "x"},
            ],
        }
    ]
    expected = [
        {
            "input_ids": [1, 2, 7, 3, 4, 5, 7, 6],
            "completion_mask": [0, 0, 0, 1, 1, 0, 0, 1],
            "old_log_probs": [0, 0, 0, -0.5, -0.25, 0, 0, -1.0],
        },
        {
            "input_ids": [1, 2, 7, 3, 4, 8, 9, 7, 7],
            "completion_mask": [0, 0, 0, 0, 0, 0, 0, 0, 1],
            "old_log_probs": [0, 0, 0, -0.5, -0.25, 0, 0, 0, -2.0],
        },
        {
            "input_ids": [1, 2, 7, 3, 4],
            "completion_mask": [0, 0, 0, 1, 1],
            "old_log_probs": [0, 0, 0, -0.5, -0.25],
        },
    ]
    path = write(tmp_path, format, rows)
    close(read(path), expected)
    assert open_rollouts(path).columns["input_ids"] == "traces[].nodes[].token_ids"
    (tree,) = treepack.pack(read(path), max_tokens=64)
    assert tree.num_tokens == 2 + 3 + 3 + 4
    for change, says in (
        ({"parent": 5}, "traces[0].nodes[3]: parent is 5; null, or the number of an earlier one, 0 to 2, is needed"),
        (
            {"logprobs": [1.0, 2.0, 3.0]},
            "traces[0].nodes[3]: logprobs has 3 values; needed is one for each of its 2 tokens",
        ),
        ({"mask": [True]}, "traces[0].nodes[3]: mask has 1 values; needed is one for each of its 2 tokens"),
    ):
        broken = [*nodes[:3], nodes[3] | change, *nodes[4:]]
        text = message(tmp_path, [rows[0], rows[0] | {"traces": [{"id": "t", "nodes": broken, "stop_condition": "x"}]}])
        assert text.startswith(f"FILE, line 2, {says}")


def test_a_request_and_its_response_in_objects(tmp_path):
    """As a proxy logs them: no list at all, or the choices of the response."""
    data = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "response_log_probs": [-0.5], "status": "ok"}
    close(
        read(write(tmp_path, "jsonl", [{"event_type": "model_request", "data": data}])), [sample([1, 2], [3], [-0.5])]
    )
    response = {"id": "x", "prompt_token_ids": [1, 2], "choices": [choice(0, [3], [-0.5]), choice(1, [4], [-1.0])]}
    row = {"request": {"model": "m", "n": 2}, "response": response, "reward": 1.0}
    expected = [sample([1, 2], [3], [-0.5], reward=1.0), sample([1, 2], [4], [-1.0], reward=1.0)]
    close(read(write(tmp_path, "jsonl", [row])), expected)


def test_whole_samples_in_lists(tmp_path):
    """A group of rollouts in a row, and a batch as a dict of lists."""
    group = {
        "uid": "a",
        "rollouts": [{"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"tokens": [4, 5], "loss_mask": [0, 1]}],
    }
    expected = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "group_id": "a"},
        {"input_ids": [4, 5], "completion_mask": [0, 1], "group_id": "a"},
    ]
    close(read(write(tmp_path, "jsonl", [group])), expected)
    batch = {"input_ids": [[1, 2, 3], [4, 5]], "completion_mask": [[0, 1, 1], [0, 1]], "uid": ["a", "a"]}
    close(read(write(tmp_path, "json", [batch])), expected)


def test_other_names_by_a_path(tmp_path):
    turns = [{"in": {"x": [1, 2]}, "out": [{"y": [3], "lp": [-0.5]}, {"y": [4, 5], "lp": [-1.0, -2.0]}], "gain": 0.5}]
    rows = [{"episode": {"turns": turns}, "advantage": 2.0, "a.b": 7}]
    columns = {
        "prompt_ids": "episode.turns[].in.x",
        "completion_ids": "episode.turns[].out[].y",
        "old_log_probs": "episode.turns[].out[].lp",
        "gain": "episode.turns[].gain",
        "dotted": "a.b",
    }
    for format in ("jsonl", "parquet"):
        path = write(tmp_path, format, rows)
        more = {"gain": 0.5, "dotted": 7, "advantage": 2.0}
        expected = [sample([1, 2], [3], [-0.5], **more), sample([1, 2], [4, 5], [-1.0, -2.0], **more)]
        close(read(path, columns=columns), expected)


def test_flat_columns_stay_flat(tmp_path):
    """Whole samples or pairs beside steps that they were made of, and rows with objects that hold no ids."""
    row = {"input_ids": [1, 2, 3], "info": {"a": 1}, "trajectory": TRAJECTORIES[0]["trajectory"]}
    close(read(write(tmp_path, "jsonl", [row])), [{"input_ids": [1, 2, 3]}])
    row = {"input_ids": [1, 2, 3], "choices": [{"token_ids": [2, 3]}]}
    close(read(write(tmp_path, "jsonl", [row])), [{"input_ids": [1, 2, 3]}])
    row = {"prompt_ids": [1], "response_ids": [2], "steps": [{"prompt_ids": [3], "response_ids": [4]}]}
    close(read(write(tmp_path, "jsonl", [row])), [sample([1], [2])])


@pytest.mark.parametrize("batch", [False, True])
def test_a_mask_of_an_unknown_name_in_a_step(tmp_path, batch):
    """As in a plain column: refused by its values, and each way out that the message names works."""
    step = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "env_mask": [1, 0, 1]}
    row, name = {"turns": [step]}, "turns[].env_mask"
    if batch:
        row, name = {key: [value] for key, value in step.items()}, "env_mask[]"
    path = write(tmp_path, "jsonl", [row])
    with pytest.raises(
        ReadError, match=r"line 1, .*\[0\]: column '.*env_mask.*' is not read, and its values are 0 and 1"
    ):
        read(path)
    close(
        read(path, columns={"completion_mask": name}),
        [sample([1, 2], [3, 4, 5]) | {"completion_mask": [0, 0, 1, 0, 1]}],
    )
    close(read(path, columns={name: ""}), [sample([1, 2], [3, 4, 5])])
    close(read(path, columns={name: name}), [sample([1, 2], [3, 4, 5], **{name: [0, 0, 1, 0, 1]})])


def test_everything_in_a_row_is_accounted_for(tmp_path):
    account = open_rollouts(write(tmp_path, "jsonl", TRAJECTORIES)).account
    assert account.trains == "what trajectory[].tokens.completion_mask marks"
    assert account.columns["old_log_probs"] == "trajectory[].tokens.completion_logprobs"
    assert {"prompt", "trajectory[].response", "trajectory[].tokens.prompt_mask"} <= set(account.unread)
    assert "trajectory" not in account.unread


def test_the_table_of_the_page(tmp_path):
    """Every shape that docs/cli.md names is found in a row that has those paths and nothing else."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = re.search(r"\| rows of \| ids of the prompt .*?\n\n", page, re.DOTALL)[0].splitlines()[2:]
    checked = 0
    for line in filter(None, table):
        prompts, answers = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("| ").split("|")[-2:])
        for number, answer in enumerate(answers):
            row, expected = {}, {}
            if prompts:
                put(row, prompts[number], [1, 2])
                expected["prompt_ids"] = prompts[number]
            put(row, answer, [3])
            expected["completion_ids" if prompts else "input_ids"] = answer
            opened = open_rollouts(write(tmp_path, "jsonl", [row]))
            assert {name: at for name, at in opened.columns.items() if name.endswith("_ids")} == expected
            ((one, *_),) = opened.batches()
            assert one["input_ids"].tolist() == ([1, 2, 3] if prompts else [3])
            checked += 1
    assert checked == 10


def put(row, path, ids):
    """Make a row have ids at a path."""
    *steps, last = path.split(".")
    for step in steps:
        name = step.removesuffix("[]")
        row = row.setdefault(name, [{}] if step.endswith("[]") else {})
        row = row[0] if isinstance(row, list) else row
    value = [[-0.5, token, "x"] for token in ids] if last.endswith("token_logprobs") else ids
    row[last.removesuffix("[]")] = [value] if last.endswith("[]") else value
