"""`treepack pack`: what it prints, what it writes, what it says when something is wrong or it is stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from offline_rows import contents, packed_windows, rollouts

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")
pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")

from treepack import offline  # noqa: E402
from treepack.cli.commands import run  # noqa: E402


@pytest.fixture
def treepack(capsys):
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def file(tmp_path):
    samples = rollouts(groups=10)
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    path = tmp_path / "rollouts.parquet"
    pq.write_table(pa.table({name: [sample[name] for sample in samples] for name in names}), path)
    return path


def test_it_packs(treepack, file, tmp_path):
    samples = rollouts(groups=10)
    expected = packed_windows(samples, 400, max_tokens=128)
    raw, packed = (
        sum(len(x) for x in xs) for xs in ((s["input_ids"] for s in samples), (t.input_ids for t in expected))
    )
    code, out, err = treepack("pack", file, "--out", tmp_path / "out", "--max-tokens", 128, "--window", 400)
    assert (code, err) == (0, "")
    assert out.startswith(
        f"40 samples, {raw:,} -> {packed:,} tokens ({raw / packed:.2f} times fewer), {len(expected)} "
    )
    size = (tmp_path / "out" / "shard-00000.parquet").stat().st_size
    assert out.endswith(f"in 1 shard, {size / 1e6:.2f} MB: {tmp_path / 'out'}\n")
    assert out.count("\n") == 1
    trees = offline.load(tmp_path / "out")
    assert [tree.input_ids.tolist() for tree in trees] == [tree.input_ids.tolist() for tree in expected]


def test_json(treepack, file, tmp_path):
    arguments = (
        "--out",
        tmp_path / "out",
        "--json",
        "--placement",
        "first_fit",
        "--shard-tokens",
        100,
        "--window",
        400,
    )
    code, out, err = treepack("pack", file, *arguments)
    assert (code, err) == (0, "")
    numbers = json.loads(out)
    assert numbers["samples"] == numbers["rows"] == 40
    assert numbers["shards"] == len(list((tmp_path / "out").glob("*.parquet"))) > 1
    assert numbers["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.parquet"))
    assert numbers["packing_ratio"] == numbers["raw_tokens"] / numbers["packed_tokens"] > 1
    assert numbers["terms"] == sum(len(tree.term_row) for tree in offline.load(tmp_path / "out"))


def test_every_option_arrives(treepack, file, tmp_path):
    given = {
        "max_tokens": 120,
        "placement": "first_fit",
        "window": 500,
        "shard_tokens": 1000,
        "max_terms": 50,
        "max_kept": 60,
        "vocab_size": 2000,
        "branching": "label",
        "order": "first_seen",
        "overlong": "skip",
        "pad_to_multiple_of": 8,
    }
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    code, _, err = treepack("pack", file, "--out", tmp_path / "out", *flags)
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["options"] == {**given, "pairs": False}


def test_columns_of_other_names(treepack, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"ids": [1, 2, 3], "weight": 0.5}\n{"ids": [1, 2, 4], "weight": 2}\n')
    columns = ("--column", "input_ids=ids", "--column", "weight=weight")
    code, _, err = treepack("pack", path, "--out", tmp_path / "out", *columns)
    assert (code, err) == (0, "")
    (tree,) = offline.load(tmp_path / "out")
    assert tree.input_ids.tolist() == [1, 2, 3, 4]
    assert tree.samples["weight"].tolist() == [0.5, 2.0]


def test_pairs(treepack, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"better": [1, 2, 3], "worse": [1, 2, 4]}\n' * 3)
    columns = ("--column", "chosen=better", "--column", "rejected=worse")
    code, out, err = treepack("pack", path, "--out", tmp_path / "out", "--pairs", *columns)
    assert (code, err) == (0, "")
    assert out.startswith("3 pairs, 18 -> 4 tokens")
    (tree,) = offline.load(tmp_path / "out")
    assert tree.samples["pair"].tolist() == [0, 0, 1, 1, 2, 2]


def test_skipped_samples_are_reported(treepack, file, tmp_path):
    code, out, _ = treepack("pack", file, "--out", tmp_path / "out", "--max-tokens", 40, "--overlong", "skip")
    lengths = np.array([len(sample["input_ids"]) for sample in rollouts(groups=10)])
    assert code == 0
    assert f", {int((lengths > 40).sum())} samples skipped: " in out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.parquet"], ["none.parquet", "no such file"]),
        (
            ["FILE", "--max-tokens", "10"],
            ["sample 0: it has", "max_tokens=10", "raise --max-tokens to ", "--overlong skip"],
        ),
        (["FILE", "--max-terms", "1"], ["sample 0: it has", "max_terms=1", "raise --max-terms to ", " or more"]),
        (["FILE", "--max-tokens", "0"], ["--max-tokens"]),
        (["FILE", "--placement", "random"], ["--placement", "random", "stream"]),
        (["FILE", "--column", "input_ids"], ["--column input_ids", "NAME=COLUMN"]),
        (["FILE", "--column", "input_ids=nothing"], ["no column 'nothing'"]),
        (["FILE", "--pairs"], ["no column of chosen tokens", "--column chosen=NAME"]),
        (["FILE", "--pairs", "--max-terms", "9"], ["max_terms is 9", "pairs"]),
        (["FILE", "--resume", "--overwrite"], ["resume and overwrite"]),
        (["FILE", "--vocab-size", "5"], ["sample 0: input_ids[0] is", "from 0 to 4"]),
        (["FILE", "--no-such-option"], ["--no-such-option"]),
    ],
)
def test_what_is_wrong_is_one_line(treepack, file, tmp_path, arguments, parts):
    arguments = [str(file) if argument == "FILE" else argument for argument in arguments]
    code, out, err = treepack("pack", *arguments, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.startswith("treepack: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("name", ["sample 7", "samples 7 and 9"])
def test_a_column_that_is_named_like_a_sample(treepack, tmp_path, name, pairs):
    """The file, the sample of the file, and the column as it was named."""
    path, rows = tmp_path / "x.jsonl", []
    for number in range(6):
        tokens = {"chosen": [1, 2], "rejected": [1, 3]} if pairs else {"input_ids": [1, 2, 3, 4]}
        rows.append({**tokens, "x": [1] * len(tokens.popitem()[1]) if number == 3 else 1})
    path.write_text("\n".join(map(json.dumps, rows)))
    call = ["pack", path, "--out", tmp_path / "out", "--window", 8, "--column", f"{name}=x", *(["--pairs"] * pairs)]
    first, second = ("pair 2 (chosen)", "pair 3 (chosen)") if pairs else ("sample 2", "sample 3")
    said = f"treepack: {path}: {second}: {name} is an array; {first} has a scalar there\n"
    assert treepack(*call) == (2, "", said)
    tokens = 2 if pairs else 4
    rows = [{**row, "x": [-1 if number < 3 else 2**63] * tokens} for number, row in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, rows)))
    said = f"treepack: {path}: {second}: {name} has dtype uint64; {first} has int64, and no integer dtype holds both\n"
    assert treepack(*call) == (2, "", said)


def test_rows_of_another_dtype_than_the_first(treepack, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": [1, 2], "x": x}) for x in (1, 2, 0.5)))
    code, out, err = treepack("pack", path, "--out", tmp_path / "out", "--window", 2, "--column", "x=x")
    assert (code, out) == (2, "")
    assert err.startswith(f"treepack: {path}: samples 2 to 2: column 'x' holds float32 here, and int64 before")


def test_a_folder_that_is_taken(treepack, file, tmp_path):
    for extra, words in (((), None), ((), "--resume"), (("--resume", "--max-tokens", "99"), "max_tokens 128 (now 99)")):
        code, _, err = treepack("pack", file, "--out", tmp_path / "out", *(extra or ("--max-tokens", 128)))
        assert code == (0 if words is None else 2)
        assert words is None or words in err
    assert treepack("pack", file, "--out", tmp_path / "out", "--max-tokens", 128, "--resume")[0] == 0
    assert treepack("pack", file, "--out", tmp_path / "out", "--max-tokens", 99, "--overwrite")[0] == 0
    assert max(tree.num_tokens for tree in offline.load(tmp_path / "out")) <= 99


SLOW = """
import signal, sys, time
from treepack.offline import writer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what it runs in the background ignore it

close = writer._Writer._close_shard

def slow(self):
    close(self)
    print(len(self._manifest.shards), flush=True)
    time.sleep(0.2)

writer._Writer._close_shard = slow
from treepack.cli.commands import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a POSIX signal here")
def test_ctrl_c_leaves_finished_shards_and_a_way_on(treepack, file, tmp_path):
    arguments = ["pack", str(file), "--out", str(tmp_path / "out"), "--window", "300", "--shard-tokens", "100"]
    command = [sys.executable, "-c", SLOW, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while process.stdout.readline().strip() != "2":
            assert time.monotonic() < until, "no shards were finished"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == f"treepack: stopped; 2 finished shards in {tmp_path / 'out'}: go on with --resume\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "manifest.json",
        "shard-00000.parquet",
        "shard-00001.parquet",
    }
    assert treepack(*arguments, "--resume")[0] == 0
    arguments[3] = str(tmp_path / "whole")
    assert treepack(*arguments)[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_bar_on_a_terminal(file, tmp_path, monkeypatch):
    """Where stderr is a terminal the bar is drawn there, and stdout holds the summary alone."""
    command = [sys.executable, "-c", "from treepack.cli.commands import run; import sys; sys.exit(run(sys.argv[1:]))"]
    command += ["pack", str(file), "--out", str(tmp_path / "out"), "--json"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["samples"] == 40
    assert "\x1b[" in done.stderr
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", done.stderr)
    assert re.search(r"packing \S+ 100% 40 rows, [\d.]+ x, 1 shard 0:00:0\d", drawn)  # whole on 60 columns
