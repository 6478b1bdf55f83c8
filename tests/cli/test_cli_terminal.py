"""Where the command line prints: narrow terminals, other encodings, pipes that close, names that steer a terminal."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

from treepack.cli.commands import run
from treepack.cli.terminal import counted, printable

MAIN = "from treepack.cli import main; main()"


def process(*arguments, before="", code=MAIN, stdout=subprocess.PIPE, **environment):
    command = [sys.executable, "-c", f"{before}\n{code}", *map(os.fspath, arguments)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.Popen(command, env=variables, stdout=stdout, stderr=subprocess.PIPE)


def done(*arguments, **environment):
    running = process(*arguments, **environment)
    out, err = running.communicate(timeout=60)
    return running.returncode, out, err


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2])))
    return path


def test_a_narrow_terminal_loses_no_digit(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert run(["inspect", str(file)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["packed", "tokens", "5", "5", "5", "5"] in rows
    assert ["raw", "/", "packed", "tokens", "1.80", "1.80", "1.80", "1.80"] in rows


def test_large_numbers_are_whole(capsys):
    from treepack.cli.survey import PLACEMENTS
    from treepack.cli.tables import print_survey
    from treepack.cli.terminal import stdout

    placement = {"packed_tokens": 10**15, "packing_ratio": 1.0, "attention_ratio": 1.0, "sharing_kept": 1.0}
    placements = {name: placement | {"trees": 10**9, "fill": 1.0} for name in (*PLACEMENTS, "no_budget")}
    counts = dict.fromkeys(("samples", "raw_tokens", "longest_sample", "loss_terms", "exact_duplicates"), 10**15)
    numbers = {"file": "x", "format": "jsonl", "columns": {}, "max_tokens": 9, "max_terms": None, "windows": 1}
    numbers |= {"limit": None, "html": None, "strict_prefixes": 0, "skipped": {"samples": 0}} | counts
    expected = {"placement": "shared", "linear": 1.0, "attention": 1.0}
    print_survey(stdout(), numbers | {"placements": placements, "expected": expected})
    assert capsys.readouterr().out.count("1,000,000,000,000,000") == 9


@pytest.mark.parametrize("name", ["ünï─.jsonl", b"bad\xff.jsonl"])
def test_letters_that_the_terminal_lacks(file, tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    try:
        os.rename(file, path)
    except OSError:
        pytest.skip("this file system has no such names")
    code, out, err = done("inspect", path, PYTHONIOENCODING="cp1252")
    assert (code, err) == (0, b"")
    assert b"raw tokens" in out
    code, out, err = done("pack", path, "--out", path + b".out", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, b"")
    code, out, err = done("inspect", path, "--json")
    assert (code, err) == (0, b"")
    assert os.fsencode(json.loads(out)["file"]) == path


def test_names_do_not_steer_the_terminal(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input_ids": [1], "\x1b[31m:smile: [bold]": 1}))
    assert run(["inspect", str(path), "--column", "red=\x1b[31m:smile: [bold]"]) == 0
    assert "red from '\\x1b[31m:smile: [bold]'" in capsys.readouterr().out
    assert run(["inspect", str(path), "--column", "input_ids=x"]) == 2
    assert "it has input_ids, '\\x1b[31m:smile: [bold]'" in capsys.readouterr().err


def test_texts():
    assert printable("a\tb\n\x1b[0m\udcff ü") == "a b \\x1b[0m\\udcff ü"
    assert (counted(1, "tree"), counted(0, "tree"), counted(1200, "tree")) == ("1 tree", "0 trees", "1,200 trees")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize("arguments", [["inspect", "FILE"], ["inspect", "FILE", "--json"], ["--help"]])
def test_whoever_reads_has_closed_the_pipe(file, arguments):
    running = process(*(file if argument == "FILE" else argument for argument in arguments))
    running.stdout.close()
    err = running.stderr.read()
    running.stderr.close()
    assert (running.wait(timeout=60), err) == (141, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_stdout_that_is_closed_or_full(file):
    code = (
        f"import os; os.close(1); os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {MAIN!r}, *os.sys.argv[1:]])"
    )
    assert done("inspect", file, "--json", code=code) == (0, b"", b"")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            running = process("inspect", file, "--json", stdout=full)
            _, err = running.communicate(timeout=60)
        assert (running.returncode, err) == (2, b"treepack: reading or writing failed: No space left on device\n")


INTERRUPTING = """
import os, signal, sys
signal.signal(2, signal.default_int_handler)
class Stop:
    def find_spec(self, name, *rest):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["typer", "treepack.cli.survey", "treepack.offline.writer", "pyarrow"])
def test_ctrl_c_while_it_loads(file, tmp_path, name):
    pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
    before = INTERRUPTING.format(name=name)
    code, out, err = done("pack", file, "--out", tmp_path / "out", before=before)
    assert (code, out) == (130, b"")
    assert err.startswith(b"treepack: interrupted")
    assert err.count(b"\n") == 1
    assert not (tmp_path / "out").exists()


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("", "is empty; name a file"),
        (".", "is a folder; name a file"),
        ("nothing/x.html", "its folder is not there"),
        ("rollouts.jsonl", "is the file that is read"),
        ("link.jsonl", "is the file that is read"),
    ],
)
def test_a_page_that_cannot_be_written_there(file, capsys, monkeypatch, page, says):
    """Said before the file is read; and the file itself stays."""
    monkeypatch.chdir(file.parent)
    (file.parent / "link.jsonl").symlink_to(file)
    content = file.read_bytes()
    assert run(["inspect", "rollouts.jsonl", "--html", page]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert file.read_bytes() == content


def test_a_report_without_a_name():
    pytest.importorskip("jinja2", reason="the report needs jinja2")
    import treepack

    for name in ("", ".", "/"):
        with pytest.raises(treepack.PackError, match="name a file"):
            treepack.report([]).save(name)


def test_no_folder_for_the_shards(file, capsys):
    assert run(["pack", str(file), "--out", ""]) == 2
    assert capsys.readouterr() == ("", "treepack: --out is empty; name a folder\n")


def test_a_pair_that_is_too_long_in_the_words_of_the_command_line(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
    (tmp_path / "x.jsonl").write_text('{"chosen": [1, 2, 3], "rejected": [4, 5, 6]}\n')
    assert run(["pack", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "out"), "--pairs", "--max-tokens", "4"]) == 2
    err = capsys.readouterr().err
    assert "pair 0: chosen and rejected have 6 tokens" in err
    assert "raise --max-tokens to 6 or more, or leave such pairs out with --overlong skip" in err
