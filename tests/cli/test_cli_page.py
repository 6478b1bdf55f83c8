"""`treepack inspect --html`: the page leads back to the lines of the file."""

import base64
import json
import re
import zlib

import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")
pytest.importorskip("jinja2", reason="reports need jinja2")

from treepack.cli.commands import run

SAMPLES = [[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 5], [7, 8, 9, 9, 9, 9, 9], [1, 2, 3, 4]]


def write(folder, samples, **columns):
    path = folder / "rollouts.jsonl"
    rows = [{"input_ids": ids} | {name: values[i] for name, values in columns.items()} for i, ids in enumerate(samples)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drawn(capsys, *arguments):
    assert run([*map(str, arguments)]) == 0
    assert capsys.readouterr().err == ""


def data_of(page):
    text = re.search(r'id="data">([^<]*)<', page.read_text())[1]
    return json.loads(zlib.decompress(base64.b64decode(text)))


@pytest.mark.parametrize("placement", ["shared", "stream"])
def test_the_page_leads_back_to_the_file(tmp_path, capsys, placement):
    """Lines count from 1, and one that does not fit counts as well."""
    rows = [("a", 1.0, 0.5), ("a", -1.0, 0.0), ("b", 0.0, 1.5), ("b", 0.0, 2.0), ("c", 3.0, 0.0), ("c", 4.0, 2.5)]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(("group_id", "advantage", "reward"))}
    path, page = write(tmp_path, SAMPLES, **columns), tmp_path / "report.html"
    drawn(capsys, "inspect", path, "--max-tokens", 6, "--html", page, "--placement", placement)
    (tree,) = data_of(page)["trees"]
    values = tree["of_samples"]
    found = {
        row[0]: row[1:] for row in zip(*(values[n] for n in ("line", "group_id", "advantage", "reward")), strict=True)
    }
    assert found == {i + 1: row for i, row in enumerate(rows) if i != 4}
    for name, number in (("length", 4), ("terms", 3)):
        assert values[name][values["line"].index(6)] == number


def test_the_page_of_several_files(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 3]}\n')
    page = tmp_path / "page.html"
    drawn(capsys, "inspect", tmp_path / "*.jsonl", "--html", page)
    values = data_of(page)["trees"][0]["of_samples"]
    places = sorted(zip(values["file"], values["line"], strict=True))
    assert places == [("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)]
