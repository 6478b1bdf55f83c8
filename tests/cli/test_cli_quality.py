"""`treepack inspect` says what is wrong with numbers, `treepack pack` refuses the worst of it: CASE 77 and must 5."""

import json

import numpy as np
import pytest
from helpers import says

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")
pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")

from treepack import PackError, offline
from treepack.cli.commands import run
from treepack.cli.quality import Quality, positions_of

NAN, INF = float("nan"), float("inf")


def row(ids=(1, 2, 3), mask=(0, 1, 1), old=(0.0, -1.0, -2.0), advantage=1.0, group="a", **more):
    columns = {"input_ids": ids, "completion_mask": mask, "old_log_probs": old, "advantage": advantage}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in columns.items()} | {"group_id": group, **more}


ROWS = [
    row(old=(NAN, -1.0, -2.0)),  # the prompt's: nobody reads it
    row(old=(0.0, NAN, -INF)),
    row(old=(0.0, -1.0, -2.0), ref_log_probs=[0.0, INF, 0.0]),
    row(mask=(1, 0, 0), old=(NAN, NAN, NAN)),  # no term: the first token is no target
    row(advantage=0.0, group="b"),
    row(advantage=[1.0, 0.0, 0.0], group="b"),  # none at a trained token
    row(advantage=0.0, group="c"),
    row(advantage=[0.0, 0.5, 0.0], group="c"),
    row(ids=(1, 2, 3, 4, 5), mask=(0, 1, 1, 1, 1), old=(0.0,) * 5),
    row(ids=(1, 2, 3, 4), mask=(0, 1, 1, 1), old=(0.0,) * 4),
]
for one in ROWS:
    one.setdefault("ref_log_probs", [0.0] * len(one["input_ids"]))


def write(folder, rows=ROWS):
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def inspected(capsys, path, *more):
    assert run(["inspect", str(path), "--json", *map(str, more)]) == 0
    return json.loads(capsys.readouterr().out)["quality"]


def test_counts_and_first_examples(tmp_path, capsys):
    quality = inspected(capsys, write(tmp_path), "--max-positions", 4)
    assert quality["without_terms"] == {"samples": 1, "first": [3]}
    assert quality["non_finite_log_probs"] == {
        "columns": ["old_log_probs", "ref_log_probs"],
        "samples": 2,
        "tokens": 3,
        "first": [
            {"sample": 1, "column": "old_log_probs", "token": 1, "value": "nan"},
            {"sample": 2, "column": "ref_log_probs", "token": 1, "value": "inf"},
        ],
    }
    assert quality["zero_advantage_groups"] == {"groups": 1, "of": 3, "first": ["b"]}
    assert quality["beyond_positions"] == {
        "max_positions": 4,
        "samples": 1,
        "longest": 5,
        "first": [{"sample": 8, "tokens": 5}],
    }


def test_the_table(tmp_path, capsys):
    assert run(["inspect", str(write(tmp_path)), "--max-positions", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for line in (
        "samples without a term 1 first samples 3",
        "NaN or infinite log-probs 2 first sample 1 at token 1: nan, sample 2 at",
        "groups without an advantage 1 first groups b",
        "longer than the positions 1 first sample 8 with 5",
    ):
        assert line in out


def test_what_cannot_be_looked_at_is_left_out(tmp_path, capsys):
    path = write(tmp_path, [{"input_ids": [1, 2]}])
    quality = inspected(capsys, path)
    assert quality["without_terms"] == {"samples": 0, "first": []}
    assert [quality[name] for name in quality if name != "without_terms"] == [None] * 3
    assert run(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "samples without a term" in out
    assert "advantage" not in out


def test_five_examples_of_many(tmp_path, capsys):
    quality = inspected(capsys, write(tmp_path, [ROWS[1], ROWS[3], ROWS[4]] * 20), "--max-positions", 2)
    assert quality["without_terms"] == {"samples": 20, "first": [1, 4, 7, 10, 13]}
    assert [x["sample"] for x in quality["non_finite_log_probs"]["first"]] == [0, 3, 6, 9, 12]
    assert len(quality["beyond_positions"]["first"]) == 5


def test_columns_of_quality_change_no_other_number(tmp_path, capsys):
    """They are not packed, so a column of them that differs from sample to sample is no error here."""
    rows = [row(advantage=1.0), row(advantage=[0.5, 0.5, 0.5])]
    assert inspected(capsys, write(tmp_path, rows))["zero_advantage_groups"]["groups"] == 0


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"config.json": {"max_position_embeddings": 7}, "tokenizer_config.json": {"model_max_length": 9}}, 7),
        ({"config.json": {"n_positions": 5}}, 5),
        ({"config.json": {"text_config": {"max_position_embeddings": 6}}}, 6),
        ({"tokenizer_config.json": {"model_max_length": 9}}, 9),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, None),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, None),
        ({"config.json": [], "tokenizer_config.json": {"model_max_length": True}}, None),
        ({}, None),
    ],
)
def test_positions_of_the_model_of_a_tokenizer(tmp_path, files, limit):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert positions_of(str(tmp_path)) == limit


def test_positions_of_nothing(tmp_path):
    assert positions_of(None) is None
    assert positions_of(str(tmp_path / "nowhere")) is None
    (tmp_path / "config.json").write_text("not JSON")
    assert positions_of(str(tmp_path)) is None


def test_memory_is_of_groups_alone():
    quality = Quality(None)
    for i in range(1000):
        quality.add({"input_ids": np.arange(3), "advantage": 0.0, "group_id": i % 7})
    assert quality.finish()["zero_advantage_groups"] == {"groups": 7, "of": 7, "first": [0, 1, 2, 3, 4]}


# --- pack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["shared", "first_fit", "stream"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_pack_refuses_log_probs_that_are_no_numbers(tmp_path, placement, value):
    good = [row(group=i) for i in range(70)]
    path = write(tmp_path, [*good, row(old=(value, -1.0, value), group=70)])
    options = {"max_tokens": 8, "placement": placement, "window": 12}
    with pytest.raises(PackError) as caught:
        offline.pack_file(path, tmp_path / "out", **options)
    says(caught, f"sample 70: old_log_probs[2] is {value} at a trained token", "finite", "non_finite_log_probs='keep'")
    assert "and at" not in str(caught.value)
    offline.pack_file(path, tmp_path / "kept", **options, non_finite_log_probs="keep")
    trees = offline.load(tmp_path / "kept")
    assert sum(int((~np.isfinite(tree.terms["old_log_probs"])).sum()) for tree in trees) == 1
    fine = write(tmp_path, [*good, row(old=(value, -1.0, -1.0), group=70)])
    offline.pack_file(fine, tmp_path / "fine", **options)


def test_at_the_command_line(tmp_path, capsys):
    path = write(tmp_path, [row(), row(old=(0.0, NAN, NAN))])
    command = ["pack", str(path), "--out", str(tmp_path / "out")]
    assert run(command) == 2
    err = capsys.readouterr().err
    assert "sample 1: old_log_probs[1] is nan at a trained token and at 1 more" in err
    assert "keep them with --non-finite-log-probs keep" in err
    assert not (tmp_path / "out").exists()
    assert run([*command, "--non-finite-log-probs", "keep"]) == 0


def test_a_run_that_was_stopped_by_one_goes_on(tmp_path):
    path = write(tmp_path, [row(group=i, old=(0.0, NAN if i == 20 else -1.0, -1.0)) for i in range(30)])
    options = {"max_tokens": 8, "window": 12, "shard_tokens": 6}
    with pytest.raises(PackError, match="sample 20: old_log_probs"):
        offline.pack_file(path, tmp_path / "out", **options)
    manifest = offline.pack_file(path, tmp_path / "out", **options, resume=True, non_finite_log_probs="keep")
    assert manifest.rows == 30


def test_both_sides_of_a_pair(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"chosen_ids": [1, 2], "rejected_ids": [1, 3], "c": [0.0, -1.0], "r": [0.0, -1.0]}] * 3
    rows.append(rows[0] | {"r": [0.0, NAN]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"chosen.ref_log_probs": "c", "rejected.ref_log_probs": "r"}
    options = {"max_tokens": 8, "pairs": True, "columns": columns}
    with pytest.raises(PackError, match=r"pair 3 \(rejected\): ref_log_probs\[1\] is nan at a trained token"):
        offline.pack_file(path, tmp_path / "out", **options)
    offline.pack_file(path, tmp_path / "out", **options, non_finite_log_probs="keep")


def test_batches_of_tools():
    batch = {"input_ids": [[1, 2], [1, 3]], "old_log_probs": [[0.0, -1.0], [0.0, NAN]]}
    with pytest.raises(PackError, match=r"sample 1: old_log_probs\[1\] is nan at a trained token"):
        offline.pack_batch(batch, max_tokens=8)
    assert offline.pack_batch(batch, max_tokens=8, non_finite_log_probs="keep").num_rows == 1
    pair = {"chosen.input_ids": [[1, 2]], "rejected.input_ids": [[1, 3]], "ref_log_probs": [[0.0, NAN]]}
    with pytest.raises(PackError, match=r"pair 0 \(chosen\): ref_log_probs\[1\] is nan"):
        offline.pack_batch(pair, max_tokens=8, pairs=True)
    with pytest.raises(PackError, match="non_finite_log_probs is 'drop'; allowed is 'raise' or 'keep'"):
        offline.pack_batch(batch, max_tokens=8, non_finite_log_probs="drop")
