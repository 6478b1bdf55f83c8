"""Folders below folders, suffixes in any case, data sets of Hugging Face by pyarrow alone: CASE 74 and must 6."""

import gzip
import json
import sys

import numpy as np
import pytest

from treepack.readers import ReadError, open_rollouts

pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")

ROWS = [{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}, {"input_ids": [4, 5], "completion_mask": [0, 1]}]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def ids(path, **options):
    return [sample["input_ids"].tolist() for batch in open_rollouts(path, **options).batches() for sample in batch]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in (".parquet", ".pq"):
        pq.write_table(pa.Table.from_pylist(data), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


@pytest.mark.parametrize(
    "name", ["A.JSONL", "A.Jsonl.GZ", "A.NDJSON.Zst", "A.JSONL.ZST", "A.JSON.gz", "A.PARQUET", "A.Pq", "A.NPZ"]
)
def test_suffixes_in_any_case(tmp_path, name):
    """CASE 74."""
    path, kind = tmp_path / name, name.lower()
    if kind.endswith((".parquet", ".pq")):
        write(path, ROWS)
    elif kind.endswith(".npz"):
        with path.open("wb") as file:
            np.savez(file, tokens=np.arange(1, 6), offsets=[0, 3, 5])
    elif kind.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(TEXT)
    else:
        path.write_bytes(gzip.compress(TEXT) if kind.endswith(".gz") else TEXT)
    assert ids(path) == [[1, 2, 3], [4, 5]]
    assert ids(tmp_path) == [[1, 2, 3], [4, 5]]


def test_folders_below_a_folder(tmp_path):
    write(tmp_path / "b" / "1.jsonl", ROWS[:1])
    write(tmp_path / "a" / "deep" / "2.JSONL", ROWS[1:])
    write(tmp_path / "0.jsonl", ROWS[:1])
    write(tmp_path / ".cache" / "x.jsonl", ROWS)
    write(tmp_path / "a" / "_tmp" / "x.jsonl", ROWS)
    (tmp_path / "a" / "README.md").write_text("text")
    (tmp_path / "b" / "info.json").write_text("{}")
    assert ids(tmp_path) == [[1, 2, 3], [4, 5], [1, 2, 3]]
    write(tmp_path / "b" / "2.parquet", ROWS)
    with pytest.raises(ReadError, match="files of more than one format"):
        open_rollouts(tmp_path)
    (tmp_path / "empty" / "below").mkdir(parents=True)
    with pytest.raises(ReadError, match="nothing to read in this folder or below"):
        open_rollouts(tmp_path / "empty")


def test_a_folder_from_the_hub(tmp_path):
    """Parquet shards below `data`, with what else lies there."""
    for name in ("README.md", ".gitattributes", "dataset_infos.json"):
        (tmp_path / name).write_text("{}")
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    assert ids(tmp_path) == [[1, 2, 3], [4, 5]]
    write(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS)
    with pytest.raises(ReadError) as caught:
        open_rollouts(tmp_path)
    assert "it holds the splits test, train, which belong into no packing together" in str(caught.value)
    assert "data/train-00000-of-00002.parquet" in str(caught.value)
    assert ids(tmp_path / "data" / "train-*.parquet") == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("layout", ["{}/part.jsonl", "{}.jsonl", "{}_1.jsonl", "x/{}/0.jsonl"])
def test_splits_are_not_mixed(tmp_path, layout):
    for split in ("train", "validation"):
        write(tmp_path / layout.format(split), ROWS)
    with pytest.raises(ReadError, match="it holds the splits train, validation"):
        open_rollouts(tmp_path)


def test_names_that_begin_like_a_split_are_none(tmp_path):
    for name in ("training_a.jsonl", "trainer.jsonl", "testimony.jsonl", "devices.jsonl"):
        write(tmp_path / name, ROWS[:1])
    assert len(ids(tmp_path)) == 4


@pytest.fixture
def data_set(tmp_path):
    datasets = pytest.importorskip("datasets", reason="writes the folder")
    datasets.disable_progress_bars()
    rows = [{"input_ids": [i, i + 1, i + 2], "completion_mask": [0, 1, 1], "note": f"{i}"} for i in range(20)]
    data = datasets.Dataset.from_list(rows).select(range(3, 17))
    data.save_to_disk(str(tmp_path / "set"), num_shards=3)
    return tmp_path / "set"


def test_a_data_set_needs_pyarrow_alone(data_set, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    rollouts = open_rollouts(data_set)
    assert (rollouts.format, rollouts.size) == ("datasets", 14)
    assert rollouts.account.unread == {"note": "text"}
    wanted = [[i, i + 1, i + 2] for i in range(3, 17)]
    assert ids(data_set) == wanted
    for start in range(15):
        for samples in (1, 4, 100):
            got = [x["input_ids"].tolist() for batch in rollouts.batches(samples, start=start) for x in batch]
            assert got == wanted[start:]
    assert rollouts.fraction == 1.0


def test_several_data_sets_below_a_folder(data_set, tmp_path):
    import shutil

    shutil.copytree(data_set, tmp_path / "another")
    assert len(ids(tmp_path)) == 28


def test_what_is_wrong_with_a_data_set(data_set):
    state = json.loads((data_set / "state.json").read_text())
    shard = data_set / state["_data_files"][1]["filename"]
    kept = shard.read_bytes()
    for broken in (b"", b"nothing of Arrow", kept[: len(kept) // 2]):
        shard.write_bytes(broken)
        with pytest.raises(ReadError, match="not a dataset of save_to_disk"):
            ids(data_set)
    shard.unlink()
    with pytest.raises(ReadError, match=rf"not a dataset of save_to_disk: {shard.name}: "):
        open_rollouts(data_set)
    (data_set / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(ReadError, match=r"save it again after \.flatten_indices\(\)"):
        open_rollouts(data_set)
    for text in ("{}", "[]", "nothing", '{"_data_files": [1]}'):
        (data_set / "state.json").write_text(text)
        with pytest.raises(ReadError, match="not a dataset of save_to_disk"):
            open_rollouts(data_set)
