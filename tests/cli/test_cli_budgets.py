"""`treepack inspect --max-tokens A,B,C`: numbers against pack() with each budget, the knee, and numbers like 16k."""

import json

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

import treepack
from treepack import synthetic
from treepack.cli.budgets import Budget, budget_rows
from treepack.cli.commands import run

IDS = [
    sample["input_ids"].tolist()
    for seed in range(3)
    for sample in synthetic.agent(seed, prompt=60, answers=4, answer=20)
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
    return str(path)


def called(capsys, *arguments):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("placement", ["shared", "first_fit", "stream"])
def test_each_row_is_a_packing(file, capsys, placement):
    numbers = called(capsys, "inspect", file, "--max-tokens", "200,50,100,1k", "--placement", placement)
    assert (numbers["max_tokens"], [row["max_tokens"] for row in numbers["budgets"]]) == (1024, [50, 100, 200, 1024])
    samples = [{"input_ids": np.array(ids)} for ids in IDS]
    one_tree = treepack.pack(samples, max_tokens=10**6).stats.packed_tokens
    for row in numbers["budgets"]:
        if placement == "stream":
            packer = treepack.Packer(row["max_tokens"], overlong="skip")
            for sample in samples:
                packer.add(sample)
            packer.flush()
            stats = packer.stats
        else:
            stats = treepack.pack(samples, max_tokens=row["max_tokens"], placement=placement, overlong="skip").stats
        assert (row["packed_tokens"], row["trees"]) == (stats.packed_tokens, stats.trees)
        fits = stats.samples == len(IDS)
        assert row["skipped"] == len(IDS) - stats.samples
        assert row["cutting_saves"] == (stats.packed_tokens - one_tree if fits else None)
    assert [row["max_tokens"] for row in numbers["budgets"] if row["knee"]] == [200]
    assert numbers["placements"][placement]["trees"] == numbers["budgets"][-1]["trees"]


def test_pairs(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt_ids": [1, 2, 3], "chosen_ids": [4, i], "rejected_ids": [5, i]} for i in range(10, 16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = called(capsys, "inspect", str(path), "--pairs", "--max-tokens", "6,7,64")
    small, middle, large = numbers["budgets"]
    assert (small["trees"], small["skipped"], small["cutting_saves"]) == (0, 12, None)
    assert (middle["packed_tokens"], middle["trees"]) == (6 * 7, 6)  # a pair in each
    assert (large["packed_tokens"], large["trees"]) == (3 + 2 + 12, 1)
    assert (middle["cutting_saves"], large["cutting_saves"]) == (42 - 17, 0)


def test_the_knee():
    def rows(*packed, raw=100):
        return budget_rows({10 * (i + 1): Budget(p, 1, 0, raw, 0) for i, p in enumerate(packed)}, 100, 50)

    assert [row["knee"] for row in rows(90, 63, 60, 60)] == [False, True, False, False]  # 63 is 5 % more than 60
    assert [row["knee"] for row in rows(90, 64, 60, 60)] == [False, False, True, False]
    assert [row["knee"] for row in rows(90, 60, raw=99)] == [False, False]  # nowhere do all samples fit
    assert rows(90) is None


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4,096", 4096), ("4k", 4096), ("4K", 4096), ("1m", 1 << 20), ("1_000", 1000)]
)
def test_numbers(file, capsys, text, value):
    numbers = called(capsys, "inspect", file, "--max-tokens", text, "--window", "1m")
    assert (numbers["max_tokens"], numbers["budgets"], numbers["window_tokens"]) == (value, None, 1 << 20)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-tokens", "0"], "--max-tokens '0': needed is a whole number from 1 on"),
        (["--max-tokens", "8k,x"], "--max-tokens 'x'"),
        (["--max-tokens", "1.5k"], "'1.5k'"),
        (["--window", "-3"], "--window"),
        (["--max-terms", "none"], "'none'"),
    ],
)
def test_what_is_no_number(file, capsys, options, says):
    assert run(["inspect", file, *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
