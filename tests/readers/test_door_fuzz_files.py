"""Files of rows with broken lines, nulls, nesting and wrong types: the samples that an oracle in plain Python expects,
from `open_rollouts` and from `treepack pack`, or one line with the file, the line or row and the column, and no folder
left behind.

The oracle judges `input_ids` and masks. Of other columns it says nothing, only that no other exception comes out.
"""

import json
import math
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")
pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

import treepack  # noqa: E402
from treepack import offline  # noqa: E402
from treepack.cli.commands import run  # noqa: E402
from treepack.errors import PackTypeError  # noqa: E402
from treepack.inputs.aliases import USUAL  # noqa: E402
from treepack.readers import ReadError, ReadWarning, open_rollouts  # noqa: E402

#: What stands where a list of numbers should be.
WRONG = [None, 5, "5 6", {}, {"a": [5]}, [], [[5, 6]], [5, None], ["5"], [5, [6]], [-1], [2**31], [2**70], [0.5, 1.5]]
BROKEN = ["{", "null", "[1, 2]", '"text"', "7", '{"input_ids": [5, 6]', "{} {}", "\0", '{"input_ids": [5 6]}']
MASKS = ["completion_mask", "loss_mask", "response_mask"]
OTHERS = ["old_log_probs", "advantage", "uid", "x", "note"]


def others(row):
    """The columns that the oracle does not judge, as they are right."""
    length = len(row["input_ids"]) if isinstance(row["input_ids"], list) else 0
    return {"old_log_probs": [-0.5] * length, "advantage": 0.5, "uid": "a", "x": [7] * length, "note": "b"}


@st.composite
def tables(draw):
    """Rows with the same keys; now and then a value in one of them that is another."""
    mask = draw(st.sampled_from([None, *MASKS]))
    more = draw(st.lists(st.sampled_from(OTHERS), max_size=2, unique=True))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 4))
        bits, ids = (st.lists(st.integers(*ends), min_size=length, max_size=length) for ends in ((0, 1), (5, 6)))
        row = {"input_ids": draw(ids)}
        if mask:
            row[mask] = draw(bits)
        rows.append(row | {name: others(row)[name] for name in more})
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        name = draw(st.sampled_from(list(row)))
        row[name] = draw(st.sampled_from([*WRONG, [0, 1, 2], [True, False], [1]]))
    return rows


def integers(value):
    return isinstance(value, list) and all(type(x) is int for x in value)


def faults(row):
    """The columns of which an error has to name one; None where the oracle cannot tell."""
    ids, mask = row["input_ids"], next((row[name] for name in MASKS if name in row), None)
    name = next((name for name in MASKS if name in row), "")
    if not (integers(ids) and ids and all(0 <= x < 2**31 for x in ids)):
        return {"input_ids"}
    if not name:
        return set()
    if not isinstance(mask, list) or any(type(x) not in (int, bool) or x not in (0, 1) for x in mask):
        return {name, "completion_mask"}
    return set() if len(mask) == len(ids) else None if len(mask) < len(ids) else {name, "completion_mask", "input_ids"}


def steps(rows):
    """The samples of rows that all hold lists of token ids and nothing beside them: a sample for each list. Else the
    rows as they are."""
    if all(row.keys() == {"input_ids"} and nested(row["input_ids"]) for row in rows):
        return [{"input_ids": ids} for row in rows for ids in row["input_ids"]]
    return rows


def nested(value):
    """Whether a value is a list of lists of token ids."""
    return isinstance(value, list) and bool(value) and all(integers(one) and one for one in value)


def expected(row):
    """Token ids, and the tokens that are trained."""
    mask = next((row[name] for name in MASKS if name in row), row["input_ids"])
    return row["input_ids"], [x for x, m in list(zip(row["input_ids"], mask, strict=True))[1:] if m]


def found(trees):
    out = []
    for tree in trees:
        targets = [[] for _ in range(tree.num_samples)]
        for place, target in zip(tree.term_sample.tolist(), tree.term_target.tolist(), strict=True):
            targets[place].append(target)
        out += zip([x.tolist() for x in tree.unpack(tree.input_ids)], targets, strict=True)
    return sorted(out)


def read(path):
    """The trees, or what the error says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReadWarning)
            samples = [sample for batch in open_rollouts(path).batches(2) for sample in batch]
        return treepack.pack(samples, max_tokens=64), ""
    except (ReadError, treepack.PackError, PackTypeError) as error:
        return None, str(error)


def pack(path, capsys):
    """The trees that the command wrote, or its line on stderr; an error leaves no folder."""
    out = path.parent / "out"
    code = run(["pack", str(path), "--out", str(out), "--max-tokens", "64", "--window", "8"])
    printed, said = capsys.readouterr()
    lines = [line for line in said.splitlines() if not line.startswith("treepack: warning: ")]
    if code == 0:
        assert lines == []
        return list(offline.load(out)), ""
    assert (code, printed, len(lines)) == (2, "", 1), (printed, said)
    assert not out.exists(), list(out.iterdir())
    assert str(path) in said
    return None, lines[0]


def check(path, rows, capsys, broken=None, line=""):
    """broken: the number of the line that is no row, from 1, or None; line: what stands there."""
    rows = steps(rows)
    wrong = [faults(row) for row in rows]
    if all(nested(row["input_ids"]) for row in rows):
        wrong = [None] * len(rows)  # other columns may be of the lists, or of what is in them
    judged = None not in wrong and all(
        x == others(row)[name] for row in rows for name, x in row.items() if name in OTHERS
    )
    bad = [at for at, one in enumerate(wrong) if one]
    for trees, said in (read(path), pack(path, capsys)):
        event("packed" if trees is not None else "refused")
        if trees is not None:
            assert broken is None
            assert not bad
            assert None in wrong or found(trees) == sorted(map(expected, rows))
            continue
        assert "\n" not in said
        if not judged:
            continue
        if not bad and broken is None:
            assert not any(expected(row)[1] for row in rows), f"these rows are right: {said}"
            assert "has a loss term" in said, said
        if broken is not None and not bad:
            array = broken == 1 and line.startswith("[")  # the whole file is read as one array
            assert ("element 0" if array else f"line {broken}") in said, said
        if broken is None and len(bad) == 1:
            no_row = "no column of token ids|one number in each row"
            number = rf"\b(line {bad[0] + 1}|row {bad[0]}|sample {bad[0]}|{no_row})\b"
            assert re.search(number, said), said
            assert any(name in said for name in wrong[bad[0]]), said


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


FIXTURES = settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])


@FIXTURES
@given(tables(), st.sampled_from([None, None, None, *BROKEN]), st.data())
def test_lines(folder, capsys, rows, line, data):
    lines, broken = [json.dumps(row) for row in rows], None
    if line is not None:
        broken = data.draw(st.integers(1, len(lines) + 1))
        lines.insert(broken - 1, line)
    path = emptied(folder) / "rows.jsonl"
    path.write_text("\n".join(lines) + data.draw(st.sampled_from(["", "\n", "\n\n"])))
    check(path, rows, capsys, broken, line)


@FIXTURES
@given(tables())
def test_parquet(folder, capsys, rows):
    try:
        table = pa.table({name: pa.array([row[name] for row in rows]) for name in rows[0]})
    except (pa.ArrowException, OverflowError, TypeError):
        return  # values that no table holds
    path = emptied(folder) / "rows.parquet"
    try:
        pq.write_table(table, path)
    except pa.ArrowException:
        return
    check(path, [{name: table[name][at].as_py() for name in rows[0]} for at in range(len(rows))], capsys)


NUMBERS = st.sampled_from([0, 1, 2, 3, -1, -100, 0.5, math.nan, math.inf, 1e300, 2**31, 2**63, 2**70, True])
LEAVES = st.one_of(NUMBERS, st.none(), st.sampled_from(["", "a", "[1]", "{}", "null", "user", "assistant"]))
KEYS = st.sampled_from(
    ["role", "content", "weight", "token_ids", "prompt_ids", "completion_ids", "tokens", "parent", "a"]
)
NESTED = st.recursive(LEAVES, lambda x: st.lists(x, max_size=4) | st.dictionaries(KEYS, x, max_size=3), max_leaves=8)
EVERY_NAME = sorted({name for names in USUAL.values() for name in names} | {"chosen", "rejected", "trajectory", "x"})


@FIXTURES
@given(st.data())
def test_anything_under_a_known_name(folder, data):
    """From a file and from memory: samples that pack, or an error that users may see."""
    length = data.draw(st.integers(0, 4))
    values = NESTED | st.lists(NUMBERS, min_size=length, max_size=length)
    base = {"input_ids": list(range(5, 5 + length))} if data.draw(st.booleans()) else {}
    names = data.draw(st.lists(st.sampled_from(EVERY_NAME), min_size=1, max_size=3, unique=True))
    rows = [base | {name: data.draw(values) for name in names} for _ in range(data.draw(st.integers(1, 3)))]
    path = emptied(folder) / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {source: read(given_)[1] for source, given_ in (("file", path), ("memory", rows))}
    event("refused" if said["file"] else "packed")
    assert (said["file"] == "") == (said["memory"] == ""), said
    assert not any("\n" in text for text in said.values())
