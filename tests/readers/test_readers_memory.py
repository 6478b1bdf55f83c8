"""Tables in memory are read as files are: the same samples, the same columns, the same refusals."""

import json

import numpy as np
import pytest

import treepack
from treepack import offline
from treepack.readers import ReadError, open_rollouts

pa = pytest.importorskip("pyarrow", reason="tables of Arrow")

ROWS = [
    {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "uid": "a", "note": "x", "score": 1.0},
    {"tokens": [1, 2], "loss_mask": [0, 1], "uid": "b", "note": "y", "score": 0.5},
    {"tokens": [1, 2, 4, 5], "loss_mask": [0, 1, 0, 1], "uid": "a", "note": "z", "score": 0.0},
]


def frame():
    return pytest.importorskip("pandas").DataFrame(ROWS)


def data_set():
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


TABLES = {
    "DataFrame": frame,
    "Table": lambda: pa.Table.from_pylist(ROWS),
    "RecordBatch": lambda: pa.RecordBatch.from_pylist(ROWS),
    "Dataset": data_set,
    "slice": lambda: data_set()[:],
    "columns": lambda: {name: [row[name] for row in ROWS] for name in ROWS[0]},
    "list": lambda: [dict(row) for row in ROWS],
}


def plain(samples):
    return [{name: np.asarray(x).tolist() for name, x in sample.items()} for sample in samples]


@pytest.mark.parametrize("kind", list(TABLES))
def test_the_samples_of_a_file(tmp_path, kind):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    wanted, rollouts = open_rollouts(path), open_rollouts(TABLES[kind]())
    assert (rollouts.format, rollouts.size, rollouts.files) == ("table", 3, [])
    assert rollouts.columns == wanted.columns
    assert rollouts.account == wanted.account
    for samples in (1, 2, 100):
        for start in range(4):
            got = [sample for batch in rollouts.batches(samples, start=start) for sample in batch]
            assert plain(got) == plain(sample for batch in wanted.batches(start=start) for sample in batch)
    assert rollouts.fraction == 1.0
    (batch,) = rollouts.batches()
    assert treepack.pack(batch, max_tokens=8)[0].num_tokens == 5


@pytest.mark.parametrize("kind", list(TABLES))
def test_refusals_name_the_row(kind):
    table = TABLES[kind]
    with pytest.raises(ReadError, match=r"row 2: column 'loss_mask' is not read, and its values are 0 and 1"):
        open_rollouts(table(), columns={"completion_mask": ""})
    bad = [*ROWS, {**ROWS[0], "loss_mask": [0, 1, 7]}]
    with pytest.raises(ReadError, match=r"row 3: loss_mask\[2\] is 7; allowed are 0"):
        list(open_rollouts(bad).batches())


def test_messages_of_a_table_in_memory(tmp_path):
    pytest.importorskip("transformers")
    chats = [{"messages": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(ReadError, match="holds chat messages"):
        open_rollouts(chats)


def test_the_fingerprint_is_of_the_values(tmp_path):
    prints = [open_rollouts(table()).fingerprint for table in (frame, frame)]
    assert prints[0] == prints[1]
    other = frame()
    other.loc[1, "score"] = 0.75
    assert open_rollouts(other).fingerprint != prints[0]


def test_it_can_be_packed_offline(tmp_path):
    manifest = offline.write(open_rollouts(frame()), tmp_path / "out", offline.Options(max_tokens=8))
    assert manifest.rows == 3
    assert manifest.source["columns"]["trains"] == "what loss_mask marks"
    assert sorted(offline.load(tmp_path / "out")[0].input_ids.tolist()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("what", [7, None, 1.5, [1, 2], [], np.zeros(3), {1, 2}])
def test_what_is_no_table(what):
    with pytest.raises(TypeError, match="a path is needed, or a DataFrame"):
        open_rollouts(what)


def test_columns_of_different_lengths():
    with pytest.raises(ReadError, match=r"dict: the columns have different numbers of rows: \{'tokens': 2, 'x': 1\}"):
        open_rollouts({"tokens": [[1], [2]], "x": [1]})
    with pytest.raises(ReadError, match="dict: no column of token ids"):
        open_rollouts({"x": [1]})


def test_rows_that_lack_a_column():
    rows = [ROWS[0], {name: x for name, x in ROWS[1].items() if name != "loss_mask"}]
    with pytest.raises(ReadError, match="row 1: loss_mask is null"):
        list(open_rollouts(rows).batches())
