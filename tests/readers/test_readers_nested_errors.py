"""What is said of rows that hold several samples and cannot be read: which step, which path, what is needed there."""

import json

import pytest
from nested_rows import EXPECTED, TRAJECTORIES, choice, close, message, read, sample, write

from treepack.readers import ReadWarning


def test_errors_name_the_step(tmp_path):
    row = json.loads(json.dumps(TRAJECTORIES[0]))
    row["trajectory"][1]["tokens"]["completion_ids"] = [6, -1]
    text = message(tmp_path, [TRAJECTORIES[1], row])
    assert text.startswith(
        "FILE, line 2, trajectory[1]: trajectory[].tokens.completion_ids[1] is -1; allowed are ids from"
    )
    row["trajectory"][1]["tokens"] = None
    text = message(tmp_path, [TRAJECTORIES[1], row])
    assert text == "FILE, line 2, trajectory[1]: trajectory[].tokens.prompt_ids is null; a list of token ids is needed"
    row["trajectory"][1]["tokens"] = [1]
    text = message(tmp_path, [TRAJECTORIES[1], row])
    assert text == (
        "FILE, line 2, trajectory[1].tokens: trajectory[].tokens.completion_mask looks for 'completion_mask' in a "
        "list; an object is needed there"
    )
    row["trajectory"] = {"a": 1}
    text = message(tmp_path, [TRAJECTORIES[1], row])
    assert text.startswith("FILE, line 2, trajectory: trajectory[].")
    assert text.endswith("goes through an object; a list is needed there")


def test_lists_of_other_lengths(tmp_path):
    row = {"prompt_token_ids": [[1], [2]], "response_ids": [[3], [4]], "rewards": [1.0, 2.0]}
    text = message(tmp_path, [row, row | {"response_ids": [[3]]}])
    assert text.startswith(
        "FILE, line 2: prompt_token_ids[] has 2 items and response_ids[] 1; one of each for each sample"
    )


def test_answers_without_a_prompt(tmp_path):
    text = message(tmp_path, [{"id": "x", "choices": [choice(0, [1, 2], [-1.0, -1.0])]}])
    assert text.startswith(
        "FILE: choices[].token_ids holds the token ids of answers, and nothing those of their prompts"
    )
    assert "--column prompt_ids=PATH" in text


def test_several_lists_of_ids(tmp_path):
    step = {"prompt_ids": [1], "completion_ids": [2]}
    row = {"first": [step], "second": [step]}
    text = message(tmp_path, [row])
    assert text == (
        "FILE: token ids lie in first[].completion_ids, second[].completion_ids; say which are meant, say --column "
        "completion_ids=first[].completion_ids --column prompt_ids=first[].prompt_ids"
    )
    given = {"prompt_ids": "second[].prompt_ids", "completion_ids": "second[].completion_ids"}
    close(read(write(tmp_path, "jsonl", [row]), columns=given), [sample([1], [2])])


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("steps[0].x", "--column input_ids=steps[0].x: 'steps[0].x' is no path; allowed are names with []"),
        ("steps[.x", "is no path"),
        (".x", "is no path"),
        ("none[].x", "FILE: no column 'none' to take input_ids from by 'none[].x'; it has trajectory"),
        ("trajectory[].none", "FILE, line 1, trajectory[0]: trajectory[].none is null; a list of token ids is needed"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, column, says):
    rows = [{"trajectory": TRAJECTORIES[0]["trajectory"]}]
    assert says in message(tmp_path, rows, columns={"input_ids": column})


def test_rows_without_steps(tmp_path):
    """A rollout that failed before its first step gives no sample, and that is said."""
    rows = [
        TRAJECTORIES[0],
        TRAJECTORIES[1] | {"trajectory": []},
        TRAJECTORIES[1],
        TRAJECTORIES[1] | {"trajectory": None},
    ]
    with pytest.warns(ReadWarning, match=r"2 rows hold no samples, the first is line 2: trajectory is empty"):
        got = read(write(tmp_path, "jsonl", rows))
    close(got, EXPECTED)
