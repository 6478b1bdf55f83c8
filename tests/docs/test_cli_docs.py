"""docs/cli.md: its example runs, and prints what the page shows; its table of column names is that of the code."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

from treepack.cli.commands import run
from treepack.readers import USUAL

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
BUDGETS = (Path(__file__).resolve().parents[2] / "docs" / "choose-a-budget.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\ntreepack (.*?)\n```\n.*?```text\n(.*?)```", PAGE, re.DOTALL)


def printed(capsys, command):
    assert run(command.split()) == 0
    return "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.strip("\n").splitlines())


def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    command, shown = SHOWN[0]
    assert command.startswith("inspect rollouts.jsonl")
    assert printed(capsys, command) == shown


def test_the_table_of_budgets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", BUDGETS, re.DOTALL)[1], {})
    ((command, shown),) = re.findall(r"```sh\ntreepack (.*?)\n```\n.*?```text\n(.*?)```", BUDGETS, re.DOTALL)
    assert shown in printed(capsys, command)


def test_the_doctor(capsys):
    """Versions and GPUs are those of another machine; the tables, kernels and checks are the same."""
    command, shown = SHOWN[1]
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the page shows a machine without a GPU")
    assert command == "doctor"

    def heads(text):
        return re.findall(r"^(?:  )?([a-z][\w-]+(?:\s(?!\s)\S+)*)", text, re.MULTILINE)

    assert heads(printed(capsys, command)) == heads(shown)
    assert len(heads(shown)) > 20


def test_the_names_of_json(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n')
    assert run(["inspect", str(path), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    table = re.search(r"\| name \| meaning \|\n(.*?)\n\n", PAGE, re.DOTALL)[1].splitlines()[1:]
    named = {row.split(" | ")[0].strip("| "): row for row in table}
    names = {name for cell in named for name in re.findall(r"`(\w+)", cell)}
    assert names == set(numbers)
    fields = set(re.findall(r"`(\w+)`", named["`placements.NAME`"].split(" | ")[1]))
    assert fields == {*numbers["placements"]["shared"], *numbers["placements"]}
    assert set(re.findall(r"`(\w+)`", named["`skipped`"].split(" | ")[1])) == set(numbers["skipped"])
    assert set(re.findall(r"`(\w+)`", named["`expected`"].split(" | ")[1])) == set(numbers["expected"])


def test_the_names_of_columns():
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert {name: tuple(re.findall(r"\w+", usual)) for name, usual in rows} == USUAL
