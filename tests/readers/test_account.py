"""Every column of a file is accounted for: read, carried or not read; and what is not read is looked at.

CASES 56 and 75 (as a rule on columns), from files of every format and through the commands."""

import json

import pytest
from helpers import says

import treepack
from treepack.inputs.account import ColumnAccount, ColumnUse, joined
from treepack.readers import ReadError, open_rollouts

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")

from rollout_files import WRITERS, jsonl, message, npz, parquet, terms

IDS = list(range(10, 16))
MASK = [0, 0, 1, 0, 1, 1]
LABELS = [-100, -100, 12, -100, 14, 15]
EVERYTHING = "every token, as there is no mask of what is trained (completion_mask)"


# --- the object -----------------------------------------------------------------------------------------------------


def test_an_account_is_plain_data():
    account = ColumnAccount(trains="what loss_mask marks", notes=["not used: x"])
    account.read("ids", "input_ids", "given")
    account.carry("version", "version")
    account.leave("question", "text")
    assert account.columns == {"input_ids": "ids", "version": "version"}
    assert account.unread == {"question": "text"}
    assert account.lines() == [
        "read: input_ids from ids (given)",
        "carried: version",
        "not read: question (text)",
        "trained: what loss_mask marks",
        "not used: x",
    ]
    assert ColumnAccount.from_json(json.loads(json.dumps(account.to_json()))) == account
    both = joined([("chosen.", account), ("rejected.", account)])
    assert both.columns["rejected.input_ids"] == "ids"
    assert [use for use in both if use.use == "not read"] == [ColumnUse("question", "not read", None, "text")]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_what_becomes_of_each_column(tmp_path, write):
    row = {
        "question": "2 + 2",
        "tokens": IDS,
        "loss_mask": MASK,
        "labels": LABELS,
        "rewards": 1.0,
        "score": 2.0,
        "version": [3] * 6,
        "meta": {"a": 1},
    }
    rollouts = open_rollouts(write(tmp_path, row), columns={"version": "version", "score": ""})
    account = rollouts.account
    assert {one.column: (one.use, one.name) for one in account} == {
        "question": ("not read", None),
        "tokens": ("read", "input_ids"),
        "loss_mask": ("read", "completion_mask"),
        "labels": ("not read", None),
        "rewards": ("read", "reward"),
        "score": ("not read", None),
        "version": ("carried", "version"),
        "meta": ("not read", None),
    }
    assert account.columns == rollouts.columns
    assert account.unread == {
        "question": "text",
        "labels": "completion_mask is loss_mask",
        "score": "left out",
        "meta": "objects",
    }
    assert account.trains == "what loss_mask marks"
    assert str(account) in repr(rollouts)


def test_what_is_trained_is_said(tmp_path):
    def trains(**row):
        return open_rollouts(jsonl(tmp_path, row)).account.trains

    assert trains(input_ids=IDS) == EVERYTHING
    assert trains(input_ids=IDS, labels=LABELS) == "what labels has, but -100"
    assert trains(prompt_ids=IDS, completion_ids=[1]) == "all of completion_ids"
    assert trains(input_ids=IDS, prompt_ids=IDS[:4]) == "what follows prompt_ids in input_ids"


# --- a mask under any name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["env_mask", "tool_mask", "loss_masks", "train_mask", "zork"])
def test_a_mask_under_any_name_stops(tmp_path, write, name):
    """CASE 56; and each remedy does what it says."""
    path = write(tmp_path, {"input_ids": IDS, name: MASK}, {"input_ids": IDS, name: MASK[::-1]})
    said = message(path)
    number = {jsonl: "line 1"}.get(write, "sample 0" if write is npz else "row 0")
    assert said.startswith(f"FILE, {number}: column {name!r} is not read, and its values are 0 and 1, as of a mask")
    assert f"--column completion_mask={name} trains what it marks" in said
    assert f"--column {name}={name} carries it along" in said
    assert terms(path, columns={"completion_mask": name}) == [12, 14, 15, 11, 13]
    assert terms(path, columns={name: ""}) == IDS[1:] * 2
    (batch,) = open_rollouts(path, columns={name: name}).batches()
    (tree,) = treepack.pack(batch, max_tokens=99)
    assert tree.terms[name].tolist() == MASK[1:] + MASK[::-1][1:]
    assert tree.num_terms == 10


def test_booleans_and_labels_stop_as_well(tmp_path):
    path = jsonl(tmp_path, {"input_ids": IDS, "zork": [bool(x) for x in MASK]})
    assert "its values are 0 and 1" in message(path)
    path = jsonl(tmp_path, {"input_ids": IDS, "targets": LABELS})
    assert "its values are token ids and one negative number, as of labels" in message(path)
    assert terms(path, columns={"labels": "targets"}) == [12, 14, 15]


@pytest.mark.parametrize("write", [jsonl, parquet, npz])
def test_a_later_row_tells(tmp_path, write):
    """Far behind the first rows, all of which train what no mask trains."""
    rows = [{"input_ids": IDS, "zork": [0, 1, 1, 1, 1, 1]}] * 100
    assert terms(write(tmp_path, *rows)) == IDS[1:] * 100
    path = write(tmp_path, *rows, {"input_ids": IDS, "zork": MASK})
    assert {jsonl: "FILE, line 101:", parquet: "FILE, row 100:", npz: "FILE, sample 100:"}[write] in message(path)
    path = write(tmp_path, *rows, {"input_ids": IDS, "zork": [0, 1, 2, 3, 4, 6]}, {"input_ids": IDS, "zork": MASK})
    assert len(terms(path)) == 102 * 5


def test_a_column_that_some_lines_lack(tmp_path):
    rows = [{"input_ids": IDS, "zork": [1] * 6, "note": "x"}, {"input_ids": IDS}, {"input_ids": IDS, "zork": None}]
    assert len(terms(jsonl(tmp_path, *rows))) == 15
    assert "line 4: column 'zork' is not read" in message(jsonl(tmp_path, *rows, {"input_ids": IDS, "zork": MASK}))


def test_a_column_that_comes_up_in_a_later_line(tmp_path):
    plain, later = {"input_ids": IDS}, {"input_ids": IDS, "zork": MASK}
    for rows in ([plain, later], [plain] * 200 + [later]):
        path = jsonl(tmp_path, *rows)
        assert f"line {len(rows)}: column 'zork' is not read, and its values are 0 and 1" in message(path)
        assert len(terms(path, columns={"zork": ""})) == 5 * len(rows)
    fine = {"input_ids": IDS, "zork": [0, 0, 1, 1, 2, 2], "note": "x", "reward": 1.0}
    assert len(terms(jsonl(tmp_path, plain, fine, later))) == 15  # turns, of which a line before has three
    masked = {"input_ids": IDS, "completion_mask": [0, 0, 1, 1, 1, 1]}
    path = jsonl(tmp_path, masked, masked | {"tool_mask": MASK})
    assert "line 2: completion_mask and tool_mask disagree on token 3" in message(path)
    assert len(terms(jsonl(tmp_path, masked, masked | {"tool_mask": masked["completion_mask"]}))) == 8


def test_padding_is_cut_before_a_look(tmp_path):
    real = [0, 0, 1, 1, 1, 1, 0]
    row = {"input_ids": [0, 0, 10, 11, 12, 13, 0], "attention_mask": real, "position_ids": [1, 1, 0, 1, 2, 3, 1]}
    assert len(terms(jsonl(tmp_path, row))) == 3
    row |= {"completion_mask": [0, 0, 0, 0, 1, 1, 0], "tool_mask": [1, 0, 0, 0, 1, 1, 1]}
    assert len(terms(jsonl(tmp_path, row))) == 2
    row["tool_mask"][5] = 0
    assert "completion_mask and tool_mask disagree on token 3, 1 and 0" in message(jsonl(tmp_path, row))


def test_a_second_mask_in_some_files(tmp_path):
    masked = {"input_ids": IDS, "completion_mask": [0, 0, 1, 1, 1, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(masked | {"tool_mask": masked["completion_mask"]}))
    (tmp_path / "b.jsonl").write_text(json.dumps(masked))
    assert len(terms(tmp_path)) == 8
    (tmp_path / "c.jsonl").write_text(json.dumps(masked | {"tool_mask": MASK}))
    with pytest.raises(ReadError, match=r"c\.jsonl, line 1: completion_mask and tool_mask disagree on token 3"):
        terms(tmp_path)


def test_another_file_of_a_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": IDS}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"input_ids": IDS, "zork": MASK}))
    with pytest.raises(ReadError, match=r"b\.jsonl, line 1: column 'zork' is not read, and its values are 0 and 1"):
        open_rollouts(tmp_path)


def test_the_completion_of_a_pair_has_a_mask_as_well(tmp_path):
    """CASE 75 as a rule: as long as the completion, or as what else is there for each of its tokens."""
    path = jsonl(tmp_path, {"prompt_ids": IDS[:2], "completion_ids": IDS[2:], "tool_mask": MASK[2:]})
    assert "column 'tool_mask' is not read" in message(path)
    assert terms(path, columns={"completion_mask": "tool_mask"}) == [12, 14, 15]
    row = {"input_ids": IDS, "prompt_ids": IDS[:2], "zork": MASK[2:]}
    assert "column 'zork' is not read" in message(jsonl(tmp_path, row))


def test_numbers_of_other_lengths_are_no_masks(tmp_path):
    row = {"input_ids": IDS, "tests_passed": [0, 1, 1], "version": [3, 3, 3, 4, 4, 4], "turn": [0, 0, 1, 1, 2, 2]}
    row |= {"token_type_ids": [0] * 6, "special_tokens_mask": [1, 0, 0, 0, 0, 1], "scores": [0.0] * 6}
    row |= {
        "rewards": [0, 0, 0, 0, 0, 1],
        "reward": 1.0,
        "entropy": [0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
        "n": 6,
        "none": None,
        "empty": [],
    }
    assert len(terms(jsonl(tmp_path, row))) == 5


# --- where it is shown ----------------------------------------------------------------------------------------------


def test_it_is_shown_everywhere(tmp_path, capsys):
    pytest.importorskip("typer", reason="the command line needs treepack[cli]")
    from treepack import offline
    from treepack.cli.commands import run

    path = jsonl(tmp_path, *[{"tokens": IDS, "version": [3] * 6, "question": "2 + 2"}] * 3)
    lines = ["carried: version (given)", "not read: question (text)", f"trained: {EVERYTHING}"]
    given = ["--column", "version=version"]

    def called(*arguments):
        assert run([str(x) for x in arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    page = tmp_path / "page.html"
    out = called("inspect", path, *given, "--tokenizer", "models/qwen")
    assert "the tokenizer models/qwen makes no ids" in out
    out = called("inspect", path, *given, "--html", page)
    assert all(line in out.splitlines() for line in lines)
    assert all(line in page.read_text() for line in lines)
    account = json.loads(called("inspect", path, *given, "--json"))["account"]
    assert ColumnAccount.from_json(account).lines() == ["read: input_ids from tokens", *lines]
    out = called("pack", path, *given, "--out", tmp_path / "out")
    assert out.splitlines()[1:] == ["read: input_ids from tokens", *lines]
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["columns"]
    assert stored == account == json.loads(called("pack", path, *given, "--out", tmp_path / "b", "--json"))["account"]
    manifest = offline.pack_file(path, tmp_path / "c", max_tokens=99, columns={"version": "version"})
    assert manifest.source["columns"] == account


def test_commands_refuse_what_readers_refuse(tmp_path, capsys):
    pytest.importorskip("typer", reason="the command line needs treepack[cli]")
    from treepack import offline
    from treepack.cli.commands import run

    path = jsonl(tmp_path, {"input_ids": IDS, "env_mask": MASK})
    for arguments in (["inspect", path], ["pack", path, "--out", tmp_path / "out"]):
        assert run([str(x) for x in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "column 'env_mask' is not read" in err
    assert not (tmp_path / "out").exists()
    batch = {"input_ids": [IDS], "env_mask": [MASK]}
    with pytest.raises(treepack.PackError) as caught:
        offline.pack_batch(batch, max_tokens=99)
    says(caught, "sample 0: it has a column 'env_mask' and no completion_mask")
    carried = offline.pack_batch(batch, max_tokens=99, columns={"input_ids": "input_ids", "env_mask": "env_mask"})
    (tree,) = offline.trees_of(carried)
    assert tree.terms["env_mask"].tolist() == MASK[1:]
    with pytest.raises(treepack.PackError, match=r"completion_maks.*did you mean 'completion_mask'"):
        offline.pack_batch(batch, max_tokens=99, columns={"input_ids": "input_ids", "completion_maks": "env_mask"})


@pytest.mark.parametrize("placement", ["shared", "stream"])
def test_a_column_that_was_asked_for_is_meant(tmp_path, placement):
    """Also where each micro-batch of a stream has a packer of its own."""
    from treepack import offline

    path = jsonl(
        tmp_path, *[{"input_ids": IDS, "version": [0, 0, 0, 1, 1, 1]}] * 3, {"input_ids": IDS, "version": [0] * 6}
    )
    options = {"max_tokens": 6, "placement": placement, "columns": {"version": "version"}}
    offline.pack_file(path, tmp_path / "out", **options)
    trees = offline.load(tmp_path / "out")
    assert sum(tree.num_terms for tree in trees) == 20
    assert sum(tree.terms["version"].sum() for tree in trees) == 9


def test_pairs_are_accounted_for(tmp_path):
    from treepack import offline

    path = jsonl(tmp_path, {"prompt_ids": IDS, "chosen_ids": [1], "rejected_ids": [2, 3], "margin": 0.5, "note": "x"})
    pairs = offline.open_pairs(path, columns={"margin": "margin"})
    assert pairs.account.columns == pairs.columns
    assert pairs.account.unread == {"note": "text"}
    assert pairs.account.trains == "all of chosen_ids"
    path = jsonl(tmp_path, {"chosen_ids": [1, 2], "rejected_ids": [1, 3]})
    assert offline.open_pairs(path).account.trains == "what comes after the common prefix of the two"
