"""`treepack inspect` and `treepack doctor`: numbers against an oracle, output, Ctrl-C, and errors of one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import accumulate

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

import treepack
from treepack import synthetic
from treepack.cli.commands import run
from treepack.cli.survey import Survey

SAMPLES = [[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 5], [7, 8, 9, 9, 9, 9, 9], [1, 2, 3, 4]]


def write(folder, samples, **columns):
    """A JSONL file of samples and columns beside their ids."""
    path = folder / "rollouts.jsonl"
    rows = [{"input_ids": ids} | {name: values[i] for name, values in columns.items()} for i, ids in enumerate(samples)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def treepack_json(capsys, *arguments):
    assert run([*map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def prefixes(samples):
    return {tuple(ids[: i + 1]) for ids in samples for i in range(len(ids))}


# --- inspect --------------------------------------------------------------------------------------------------------


def test_numbers_by_eye(tmp_path, capsys):
    numbers = treepack_json(capsys, "inspect", write(tmp_path, SAMPLES), "--max-tokens", 6)
    assert (numbers["samples"], numbers["raw_tokens"], numbers["longest_sample"]) == (5, 16, 4)
    assert (numbers["exact_duplicates"], numbers["strict_prefixes"]) == (2, 1)
    assert numbers["loss_terms"] == 16 - 5  # the first token of a sample is no target
    skipped = numbers["skipped"]
    assert (skipped["samples"], skipped["shortest"], skipped["longest"]) == (1, 7, 7)
    assert skipped["first"][0]["sample"] == 4
    assert "it has 7 tokens; max_tokens=6 is the most" in skipped["first"][0]["reason"]
    free, shared = numbers["placements"]["no_budget"], numbers["placements"]["shared"]
    assert (free["packed_tokens"], free["packing_ratio"], free["sharing_kept"]) == (5, 16 / 5, 1.0)
    assert shared["packed_tokens"] == 5
    assert (shared["trees"], shared["fill"]) == (1, 5 / 6)
    assert numbers["attention_pairs_alone"] == 10 + 6 + 3 + 6 + 10
    assert shared["attention_pairs"] == 1 + 2 + 3 + 4 + 3
    assert numbers["expected"] == {"placement": "shared", "linear": 16 / 5, "attention": 35 / 13}
    assert numbers["cut"] == {"packed_tokens": 5, "ranges": 1, "most_ancestors": 0}


def test_numbers_against_pack_and_an_oracle(tmp_path, capsys):
    made = synthetic.multi_turn(rollouts=4, turns=4, prompt=20, thinking=9, answer=5, tool=6, vocab_size=300)
    samples = [sample["input_ids"].tolist() for sample in made]
    samples += [samples[3], samples[5][:-4]]
    masks = [sample["completion_mask"].tolist() for sample in made]
    masks += [masks[3], masks[5][:-4]]
    path = write(tmp_path, samples, completion_mask=masks)
    numbers = treepack_json(capsys, "inspect", path, "--max-tokens", 140, "--placement", "stream")
    assert numbers["exact_duplicates"] == len(samples) - len(set(map(tuple, samples)))
    proper = {tuple(ids[: i + 1]) for ids in samples for i in range(len(ids) - 1)}
    assert numbers["strict_prefixes"] == sum(tuple(ids) in proper for ids in samples)
    assert numbers["placements"]["no_budget"]["packed_tokens"] == len(prefixes(samples))
    rows = [{"input_ids": i, "completion_mask": m} for i, m in zip(samples, masks, strict=True)]
    (tree,) = treepack.pack(rows, max_tokens=140, cut=True)
    above = max(len(x.ancestors) for x in tree.ranges)
    assert above > 0
    wanted = {"packed_tokens": len(prefixes(samples)), "ranges": len(tree.ranges), "most_ancestors": above}
    assert numbers["cut"] == wanted
    packer = treepack.Packer(140)
    for row in rows:
        packer.add(row)
    packer.flush()
    stats = {name: treepack.pack(rows, max_tokens=140, placement=name).stats for name in ("shared", "first_fit")}
    for name, wanted in {**stats, "stream": packer.stats}.items():
        got = numbers["placements"][name]
        assert got["packed_tokens"] == wanted.packed_tokens
        assert got["trees"] == wanted.trees
        assert got["attention_pairs"] == wanted.attention_pairs
        assert got["attention_ratio"] == wanted.attention_pairs_alone / wanted.attention_pairs
        assert wanted.packing_ratio > 1
        assert got["fill"] == wanted.packed_tokens / (wanted.trees * 140)
        unique = len(prefixes(samples))
        assert got["sharing_kept"] == (wanted.raw_tokens - wanted.packed_tokens) / (wanted.raw_tokens - unique)
    assert numbers["loss_terms"] == packer.stats.terms
    assert numbers["expected"]["linear"] == numbers["placements"]["stream"]["packing_ratio"]


def test_windows_add_up(tmp_path, capsys):
    samples = [[group, 1, 2, answer] for group in range(4) for answer in range(6)]
    path = write(tmp_path, samples)
    numbers = treepack_json(capsys, "inspect", path, "--max-tokens", 12, "--window", 20)
    ends = list(accumulate(len(ids) for ids in samples))
    parts = [samples[i : i + 5] for i in range(0, len(samples), 5)]  # 5 samples of 4 tokens reach 20
    assert ends[4] == 20
    assert numbers["windows"] == len(parts)
    assert numbers["placements"]["no_budget"]["packed_tokens"] == sum(len(prefixes(part)) for part in parts)
    packed = [treepack.pack([{"input_ids": ids} for ids in part], max_tokens=12) for part in parts]
    assert numbers["placements"]["shared"]["trees"] == sum(map(len, packed))
    assert numbers["placements"]["stream"]["packed_tokens"] < numbers["placements"]["shared"]["packed_tokens"]


def test_what_does_not_fit_is_left_out_of_all_numbers(tmp_path, capsys):
    fit = [ids for ids in SAMPLES if len(ids) < 7]
    with_long = treepack_json(capsys, "inspect", write(tmp_path, SAMPLES), "--max-tokens", 6)
    without = treepack_json(capsys, "inspect", write(tmp_path, fit), "--max-tokens", 6)
    assert with_long.pop("skipped") != without.pop("skipped")
    assert with_long == without


def test_terms_bound_a_tree_and_limit_what_is_read(tmp_path, capsys):
    numbers = treepack_json(capsys, "inspect", write(tmp_path, SAMPLES), "--max-terms", 3, "--limit", 4)
    assert (numbers["samples"], numbers["loss_terms"], numbers["limit"]) == (4, 3 + 2 + 1 + 2, 4)
    assert numbers["placements"]["shared"]["trees"] > 1
    assert numbers["placements"]["no_budget"]["trees"] == 1


def test_the_table(tmp_path, capsys):
    assert run(["inspect", str(write(tmp_path, SAMPLES)), "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])  # the first has the path of the file
    rows = {line.split("  ")[1].strip(): line.split() for line in lines if line.startswith("  ")}
    assert rows["samples"][1] == "5"
    assert rows["exact duplicates"][2] == "2"
    assert rows["do not fit"][3] == "1"
    assert rows["packed tokens"][2:] == ["5", "5", "5", "5"]
    assert rows["fill of the trees"][4:] == ["83.3", "%", "83.3", "%", "83.3", "%"]
    text = " ".join(out.split())
    assert "sample 4: it has 7 tokens; max_tokens=6" in text
    assert "All fit with --max-tokens 7." in text
    assert "linear layers do 3.20 times less work, attention 2.69 times" in text
    assert "Hardly anything" not in text
    assert run(["inspect", str(write(tmp_path, [[1, 2], [3, 4]]))]) == 0
    assert "Hardly anything is shared here" in " ".join(capsys.readouterr().out.split())


def test_the_page(tmp_path, capsys):
    pytest.importorskip("jinja2", reason="reports need jinja2")
    page = tmp_path / "report.html"
    for placement in ("shared", "stream"):
        run_with = ["inspect", write(tmp_path, SAMPLES), "--max-tokens", 6, "--html", page, "--placement", placement]
        assert treepack_json(capsys, *run_with)["html"] == str(page)
        assert "rollouts.jsonl" in page.read_text()
        page.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]
    assert run(["inspect", str(tmp_path / "rollouts.jsonl"), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "its folder is not there or cannot be written to" in capsys.readouterr().err


def test_real_rollouts(treepack_data, capsys):
    """The counts that the data set's README gives, made by a brute-force trie."""
    wanted = {"qwen_math_n8": (253_357, 76, 0), "lats_agent_tree": (15_141, 34, 0)}
    for name, (trie, duplicates, strict) in wanted.items():
        numbers = treepack_json(capsys, "inspect", treepack_data / "data" / f"{name}.npz")
        assert numbers["placements"]["no_budget"]["packed_tokens"] == trie
        assert (numbers["exact_duplicates"], numbers["strict_prefixes"]) == (duplicates, strict)


def test_a_stream_shares_more_than_windows_do(tmp_path, capsys):
    """What it keeps of the sharing is not known then: it would come out as more than all."""
    path = write(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 7]])
    numbers = treepack_json(capsys, "inspect", path, "--window", 8)
    kept = {name: placement["sharing_kept"] for name, placement in numbers["placements"].items()}
    assert numbers["placements"]["stream"]["packed_tokens"] == 7
    assert numbers["placements"]["no_budget"]["packed_tokens"] == 10
    assert kept == {"shared": 1.0, "first_fit": 1.0, "stream": None, "no_budget": 1.0}
    assert treepack_json(capsys, "inspect", path)["placements"]["stream"]["sharing_kept"] == 1.0


def test_survey_keeps_no_samples_of_closed_windows():
    import gc
    import weakref

    survey = Survey(64, None, window=100)
    references = []
    for i in range(40):
        ids = np.arange(i, i + 10)
        references.append(weakref.ref(ids))
        survey.add({"input_ids": ids})
    del ids
    gc.collect()
    assert sum(ref() is not None for ref in references) <= 10


# --- errors ---------------------------------------------------------------------------------------------------------


def one_line(capsys, *arguments):
    """The one line on stderr of a command that ends with exit code 2."""
    assert run([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("treepack: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", ["inspect", "pack", "doctor"])
def test_help_ends_with_examples_codes_and_the_page(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    for part in ("Examples:", f"treepack {command} ", "Exit codes: 0 all well", "130 interrupted", "More: docs/"):
        assert part in out, part


def test_the_shell_completes(tmp_path):
    words = {"_TREEPACK_COMPLETE": "complete_bash", "COMP_WORDS": "treepack inspect --max", "COMP_CWORD": "2"}
    environment = {**os.environ, **words, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "treepack"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["--max-tokens", "--max-terms", "--max-positions"]


def test_errors_of_a_first_time_user(tmp_path, capsys):
    path = write(tmp_path, SAMPLES)
    assert "no such file" in one_line(capsys, "inspect", tmp_path / "nothing.jsonl")
    assert "no column 'ids' to take input_ids from" in one_line(capsys, "inspect", path, "--column", "input_ids=ids")
    assert "needed is NAME=COLUMN" in one_line(capsys, "inspect", path, "--column", "ids")
    message = one_line(capsys, "inspect", path, "--max-tokens", 1)
    assert "none of the 6 samples fits" in message
    assert "they have 2 to 7 tokens: all fit with --max-tokens 7" in message
    message = one_line(capsys, "inspect", path, "--limit", 2, "--max-terms", 1)
    assert message.endswith("they have 3 to 4 tokens: all fit with --max-terms 3\n")
    assert "--max-tokens" in one_line(capsys, "inspect", path, "--max-tokens", "many")
    assert "whole number from 1 on" in one_line(capsys, "inspect", path, "--max-tokens", 0)
    assert "'shared', 'first_fit', 'stream'" in one_line(capsys, "inspect", path, "--placement", "best")
    assert "treepack inspect needs FILE: Rollouts: JSONL" in one_line(capsys, "inspect")
    assert "No such command" in one_line(capsys, "look", path)
    assert "--limit '0': needed is a whole number from 1 on" in one_line(capsys, "inspect", path, "--limit", 0)
    message = one_line(capsys, "inspect", path, "--max-token", 7)
    assert "treepack inspect has no option --max-token; did you mean --max-terms or --max-tokens or" in message
    message = one_line(capsys, "inspect", path, "--placement", "best")
    assert "--placement 'best' is not one of 'shared', 'first_fit', 'stream'" in message
    assert "write it to a file: COMMAND > rollouts.jsonl" in one_line(capsys, "inspect", "-")
    (tmp_path / "text.jsonl").write_text('{"input_ids": "the cat sat"}\n')
    assert "is text ('the cat sat'); token ids are needed" in one_line(capsys, "inspect", tmp_path / "text.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"input_ids": [1]}\n{"input_ids"\n')
    assert "line 2: not JSON" in one_line(capsys, "inspect", tmp_path / "broken.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert "it holds no samples" in one_line(capsys, "inspect", tmp_path / "empty.jsonl")
    (tmp_path / "x.csv").write_text("1,2")
    assert "unknown format '.csv'" in one_line(capsys, "inspect", tmp_path / "x.csv")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert "--tokenizer DIR" in one_line(capsys, "inspect", tmp_path / "chat.jsonl")


def test_a_file_that_may_not_be_read(tmp_path, capsys, monkeypatch):
    from treepack.readers import jsonl

    def refuse(self, *arguments):
        raise PermissionError(13, "Permission denied", str(self))

    path = write(tmp_path, SAMPLES)
    monkeypatch.setattr(jsonl.Path, "open", refuse)
    assert "Permission denied" in one_line(capsys, "inspect", path)


def test_a_bug_shows_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(Survey, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["inspect", str(write(tmp_path, SAMPLES))])


def test_help_and_version(capsys):
    assert run([]) == 0
    assert "inspect" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"treepack {treepack.__version__}\n"


def process(*arguments, before="", **options):
    """The command line in a process of its own, with a line of Python run before it."""
    code = f"{before}\nimport sys; sys.argv = ['treepack', *sys.argv[1:]]\nfrom treepack.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


@pytest.mark.parametrize("module", ["treepack", "treepack.cli"])
def test_as_a_module(module):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def out(*command):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=60)
        return done.returncode, done.stdout, done.stderr

    assert out("-m", module, "--version") == (0, f"treepack {treepack.__version__}\n", "")
    code, _, err = out("-m", module, "inspect")
    assert (code, err.startswith("treepack: "), err.count("\n")) == (2, True, 1)
    missing = f"import runpy, sys; sys.modules['typer'] = None; runpy.run_module({module!r}, run_name='__main__')"
    assert out("-c", missing) == (2, "", "treepack: the command line needs typer: pip install 'treepack[cli]'\n")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra(package):
    running = process("--help", before=f"import sys; sys.modules[{package!r}] = None")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (2, "")
    assert err == f"treepack: the command line needs {package}: pip install 'treepack[cli]'\n"


def test_inspect_needs_nothing_beyond_the_extra(tmp_path):
    missing = "import sys; sys.modules.update(dict.fromkeys(['torch', 'pyarrow', 'datasets', 'jinja2']))"
    running = process("inspect", write(tmp_path, SAMPLES), "--json", before=missing)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    assert json.loads(out)["samples"] == 6
    running = process("inspect", tmp_path / "rollouts.jsonl", "--html", tmp_path / "x.html", before=missing)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert err.count("\n") == 1
    assert err == "treepack: treepack.report needs jinja2: pip install 'treepack[cli]'\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_interrupted(tmp_path):
    """Ctrl-C while it reads: one line, exit code 130, and no page."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n')
    # A shell that runs tests in the background makes them ignore SIGINT.
    slow = "import signal, time, treepack.cli.survey as s\nsignal.signal(2, signal.default_int_handler)\n"
    slow += "s.Survey.add = lambda *_: (print('on', flush=True), time.sleep(60))"
    running = process("inspect", path, "--html", tmp_path / "x.html", before=slow)
    assert running.stdout.readline() == "on\n"
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err == "treepack: interrupted; no file is left half-written\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rollouts.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_the_bar_is_for_terminals_alone(tmp_path):
    import pty

    terminal, end = pty.openpty()
    code = f"import sys; from treepack.cli.commands import run; run(['inspect', {str(write(tmp_path, SAMPLES))!r}])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "60"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=end, env=environment, timeout=60)
    os.close(end)
    with open(terminal, "rb", buffering=0) as screen:
        drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.read(1 << 16).decode())
    assert re.search(r"reading \S+ 100% 6 samples 0:00:0\d", drawn)  # whole on 60 columns
    assert b"\x1b" not in done.stdout  # what goes into a file has no colours
    assert b"raw tokens" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_has_seen_enough(tmp_path):
    running = process("inspect", write(tmp_path, SAMPLES), "--json")
    running.stdout.close()
    running.wait(timeout=60)
    assert running.stderr.read() == ""
    running.stderr.close()
    assert running.returncode == 141
