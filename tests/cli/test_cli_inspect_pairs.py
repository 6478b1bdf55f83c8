"""`treepack inspect --pairs`: numbers against an oracle, the page, and what does not go with pairs."""

import base64
import json
import re
import zlib

import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

from treepack.cli.commands import run

PAIRS = [
    {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]},
    {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [6, 7, 8]},
    {"prompt_ids": [9] * 4, "chosen_ids": [1] * 5, "rejected_ids": [2] * 5},
    {"prompt_ids": [8], "chosen_ids": [3], "rejected_ids": [3]},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return str(path)


def inspect(capsys, *arguments):
    assert run(["inspect", *map(str, arguments), "--pairs", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def samples(pairs):
    return [pair["prompt_ids"] + pair[f"{side}_ids"] for pair in pairs for side in ("chosen", "rejected")]


def tree(members):
    """Positions of one tree that holds these samples, and pairs of a query and a key that it sees."""
    prefixes = {tuple(ids[: n + 1]) for ids in members for n in range(len(ids))}
    return len(prefixes), sum(map(len, prefixes))


def test_numbers_by_eye(file, capsys):
    numbers = inspect(capsys, file, "--max-tokens", 8)
    there = [pair for pair in PAIRS if len(pair["chosen_ids"]) < 5]  # the third pair has 14 positions
    members = samples(there)
    assert (numbers["pairs"], numbers["samples"]) == (3, 6)
    assert numbers["raw_tokens"] == sum(map(len, members)) == 4 + 3 + 3 + 5 + 2 + 2
    assert numbers["longest_sample"] == 5
    assert numbers["loss_terms"] == 2 + 1 + 1 + 3 + 1 + 1  # the completions
    assert numbers["exact_duplicates"] == 1  # both sides of the last pair
    assert numbers["strict_prefixes"] == 1
    assert numbers["skipped"]["samples"] == 2
    assert (numbers["skipped"]["shortest"], numbers["skipped"]["longest"]) == (14, 14)
    first = numbers["skipped"]["first"][0]
    assert first["sample"] == 2
    assert first["reason"].startswith(
        "pair 2: chosen and rejected have 14 tokens, their common prefix once; max_tokens=8"
    )
    assert set(numbers["placements"]) == {"shared", "first_fit", "no_budget"}
    free = numbers["placements"]["no_budget"]
    assert (free["packed_tokens"], free["attention_pairs"]) == tree(members)
    assert numbers["attention_pairs_alone"] == sum(len(ids) * (len(ids) + 1) // 2 for ids in members)
    for name in ("shared", "first_fit"):
        placement = numbers["placements"][name]
        # The three pairs have 5 + 6 + 2 positions, and the first two share 1 2 3: 8 and 2.
        assert (placement["packed_tokens"], placement["trees"]) == (10, 2)
        assert placement["sharing_kept"] == 1.0
    assert numbers["columns"]["chosen.completion_ids"] == "chosen_ids"
    assert numbers["account"]["trains"] == "all of chosen_ids"


def test_windows_and_a_limit(file, capsys):
    assert inspect(capsys, file, "--limit", 2)["pairs"] == 2
    numbers = inspect(capsys, file, "--window", 1)
    assert (numbers["pairs"], numbers["windows"]) == (4, 4)
    alone = [tree(samples([pair]))[0] for pair in PAIRS]
    assert numbers["placements"]["shared"]["packed_tokens"] == sum(alone)


@pytest.mark.parametrize("placement", ["shared", "first_fit"])
def test_the_table_and_the_page(file, tmp_path, capsys, placement):
    pytest.importorskip("jinja2", reason="the page needs jinja2")
    page = tmp_path / "page.html"
    assert run(["inspect", file, "--pairs", "--placement", placement, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "pairs               4   chosen and rejected lie in one tree" in out
    assert "stream" not in out
    assert "pairs.jsonl" in page.read_text()
    data = json.loads(zlib.decompress(base64.b64decode(re.search(r'id="data">([^<]*)<', page.read_text())[1])))
    sides = [
        row for of in (tree["of_samples"] for tree in data["trees"]) for row in zip(of["line"], of["side"], strict=True)
    ]
    assert sorted(sides) == [(line, side) for line in range(1, 5) for side in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--placement", "stream"], "placement is 'stream'; pairs stay together by 'shared' and 'first_fit' alone"),
        (["--max-terms", "3"], "max_terms is 3; with pairs max_tokens is the one budget"),
        (["--max-tokens", "1"], "none of the 8 samples fits into a tree (pair 0: chosen and rejected have 5 tokens"),
        (["--column", "pair=x"], "pair is the number of the pair"),
    ],
)
def test_what_does_not_go_with_pairs(file, capsys, arguments, says):
    assert run(["inspect", file, "--pairs", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
