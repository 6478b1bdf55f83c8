"""Files of preference pairs with a wrong value now and then, and batches in memory: the pairs that plain Python says,
from `treepack pack --pairs`, `inspect --pairs` and `pack_batch`, or one line with the file, the line and the column,
and no folder left behind.
"""

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

import treepack  # noqa: E402
from treepack import offline  # noqa: E402
from treepack.cli.commands import run  # noqa: E402
from treepack.errors import PackTypeError  # noqa: E402

SLOW = [*settings().suppress_health_check, HealthCheck.function_scoped_fixture]
FIXTURES = settings(max_examples=settings().max_examples // 2, suppress_health_check=SLOW)  # two commands each
SIDES = ("chosen", "rejected")
#: What stands where a list of token ids or a mask should be.
WRONG = [None, 5, "5 6", {}, {"a": [5]}, [5, None], ["5"], [5, [6]], [-1], [2**31], [2**70], [0.5, 1.5]]


@st.composite
def files(draw):
    """(rows, the two samples of each row as ids and trained tokens). Prompts and answers have no token in common."""
    form = draw(st.sampled_from(["whole", "apart", "doubled"]))
    masked = draw(st.booleans())
    out, expected = [], []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(1, 3), min_size=4, max_size=6))
        row = {"prompt_ids": prompt} if form != "whole" else {}
        answers = [draw(st.lists(st.integers(5, 7), min_size=1, max_size=4)) for _ in SIDES]
        differ = next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), min(map(len, answers)))
        pair = []
        for side, answer in zip(SIDES, answers, strict=True):
            row[side] = answer if form == "apart" else prompt + answer
            trained = answer[differ:] if form == "whole" else answer
            if masked:
                mask = draw(st.lists(st.integers(0, 1), min_size=len(answer), max_size=len(answer)))
                row[f"{side}_loss_mask"] = mask if form == "apart" else [0] * len(prompt) + mask
                trained = [x for x, m in zip(answer, mask, strict=True) if m]
            pair.append((prompt + answer, trained))
        out.append(row)
        expected.append(pair)
    return out, expected


def pairs_of(trees):
    """The two samples of each pair, by its number."""
    found = {}
    for tree in trees:
        ids, terms = tree.unpack(tree.input_ids), tree.unpack_terms(tree.term_target)
        for at, number in enumerate(tree.samples["pair"].tolist()):
            found.setdefault(number, []).append((ids[at].tolist(), terms[at].tolist()))
    return [found[number] for number in sorted(found)]


def command(name, path, capsys, *more):
    """What a command said on stderr, '' where it did its work."""
    code = run([name, str(path), "--pairs", "--max-tokens", "64", *more])
    printed, said = capsys.readouterr()
    lines = [line for line in said.splitlines() if not line.startswith("treepack: warning: ")]
    assert (code, len(lines)) == ((2, 1) if lines else (0, 0)), (code, said)
    assert not lines or (printed == "" and str(path) in lines[0])
    return lines[0] if lines else ""


@FIXTURES
@given(files(), st.data())
def test_files_of_pairs(capsys, drawn, data):
    rows, expected = drawn
    at = name = None
    if data.draw(st.booleans()):
        at, name = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(list(rows[0])))
        rows[at] = {**rows[at], name: data.draw(st.sampled_from(WRONG))}
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "pairs.jsonl", Path(folder) / "out"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = command("pack", path, capsys, "--out", str(out))
        looked = command("inspect", path, capsys)
        event("refused" if said else "packed")
        if not said:
            assert name is None
            assert pairs_of(offline.load(out)) == expected
            assert looked == ""
            return
        assert not out.exists()
        sides = [[trained for _, trained in side] for side in zip(*expected, strict=True)]
        if not all(map(any, sides)):  # one of which nothing is trained stops, whatever else there is
            assert "has a loss term" in said or (name is not None and name in said)
            return
        assert name is not None, f"these pairs are right: {said}"
        assert looked
        for text in (said, looked):
            assert name in text, text
            assert re.search(rf"\b(line {at + 1}|no column of|some of|column '{name}')", text), text


@st.composite
def samples(draw):
    """Rows of a batch with a mask, one of them wrong now and then: (rows, its number and column or None)."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 5))
        ids, bits = (st.lists(st.integers(*ends), min_size=length, max_size=length) for ends in ((5, 7), (0, 1)))
        rows.append({"input_ids": draw(ids), "completion_mask": draw(bits)})
    if draw(st.booleans()):
        return rows, None
    at, name = draw(st.integers(0, len(rows) - 1)), draw(st.sampled_from(["input_ids", "completion_mask"]))
    rows[at] = {**rows[at], name: draw(st.sampled_from([*WRONG, [], [2] * 7]))}
    return rows, (at, name)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"input_ids": np.array(5)}, "column 'input_ids' of the batch is of type ndarray; one value per row is needed"),
        ({"input_ids": [[5]], "x": b"a"}, "column 'x' of the batch is of type bytes; one value per row is needed"),
        ({"input_ids": [[5]], "x": {"a": 1}}, "column 'x' of the batch is of type dict; one value per row is needed"),
        ({"input_ids": [[5]], 5: [1]}, "the batch has a column named 5; names are strings"),
    ],
)
def test_columns_that_are_none(batch, says):
    with pytest.raises(TypeError) as caught:
        offline.pack_batch(batch, max_tokens=8)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rejected.input_ids": [[5], None]}, "pair 1 (rejected): input_ids is None; allowed are integers"),
        ({"chosen.input_ids": [[], [5]]}, "pair 0 (chosen): input_ids is empty; a sample needs at least one token"),
        ({"chosen.input_ids": [[5], [0.5]]}, "pair 1 (chosen): input_ids has dtype float32; allowed are integers: "),
        ({"rejected.input_ids": [[5]]}, "the columns of the batch have different numbers of rows: {"),
        ({"identity": [[1], [1, 2]]}, "pair 1 (chosen): identity has 2 rows; input_ids has 1 tokens, so 1 are needed"),
        ({"identity": ["a", "b"]}, "pair 0 (chosen): identity is text"),
    ],
)
def test_pairs_in_memory_that_cannot_be_packed(changed, says):
    batch = {"chosen.input_ids": [[5], [6]], "rejected.input_ids": [[5], [7]], **changed}
    with pytest.raises((treepack.PackError, PackTypeError)) as caught:
        offline.pack_batch(batch, max_tokens=8, pairs=True)
    assert str(caught.value).startswith(says)


@given(samples(), st.sampled_from(["dict", "arrays", "table", "batches"]))
def test_batches_in_memory(drawn, form):
    rows, wrong = drawn
    batch = {name: [row[name] for row in rows] for name in rows[0]}
    if form == "arrays" and wrong is None:
        batch = {name: [np.array(value) for value in values] for name, values in batch.items()}
    if form in ("table", "batches"):
        try:
            batch = pa.table(batch)
        except (pa.ArrowException, OverflowError, TypeError):
            return  # values that no table holds
        batch = batch if form == "table" else batch.to_batches()[0]
    if wrong is not None:
        with pytest.raises((treepack.PackError, PackTypeError), match=rf"sample ({wrong[0]}|0)\b") as caught:
            offline.pack_batch(batch, max_tokens=64)
        assert "input_ids" in str(caught.value) or "completion_mask" in str(caught.value)
        return
    table = offline.pack_batch(batch, max_tokens=64)
    trees = offline.trees_of(table)
    found = [
        (ids.tolist(), terms.tolist())
        for tree in trees
        for ids, terms in zip(tree.unpack(tree.input_ids), tree.unpack_terms(tree.term_target), strict=True)
    ]
    right = [
        (x["input_ids"], [t for t, m in list(zip(x["input_ids"], x["completion_mask"], strict=True))[1:] if m])
        for x in rows
    ]
    assert sorted(found) == sorted(right)
