"""What is wrong with a file is said in one line: file, line or row, column, what it has, what is allowed."""

import gzip
import json

import numpy as np
import pytest

from treepack.readers import ReadError, open_rollouts


def message(path, **options):
    with pytest.raises(ReadError) as caught:
        for _ in open_rollouts(path, **options).batches():
            pass
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text.replace(f"{path}", "FILE")


GOOD = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "advantage": 1.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"input_ids": "the cat sat"}, "FILE, line 3: input_ids is text ('the cat sat'); token ids are needed"),
        ({"input_ids": ["the", "cat"]}, "FILE, line 3: input_ids is text (['the', 'cat']); token ids"),
        ({"input_ids": [1.0, 2.0]}, "FILE, line 3: input_ids has dtype float32; allowed are integers"),
        ({"input_ids": [1, None]}, "FILE, line 3: input_ids has dtype object; allowed are"),
        ({"input_ids": None}, "FILE, line 3: input_ids is null"),
        ({"input_ids": 7}, "FILE, line 3: input_ids has shape (); one axis is needed"),
        ({"input_ids": []}, "FILE, line 3: no tokens; a sample has at least one"),
        ({"input_ids": [1, -2, 3]}, "FILE, line 3: input_ids[1] is -2; allowed are ids from 0 to 2147483647"),
        ({"input_ids": [1, 2, 2**31]}, "FILE, line 3: input_ids[2] is 2147483648; allowed are ids"),
        ({"input_ids": [1, 2, 2**70]}, "FILE, line 3: input_ids holds 1180591620717411303424"),
        ({"input_ids": [[1, 2], [3]]}, "FILE, line 3: input_ids is ragged"),
        ({"completion_mask": [0, 1]}, "FILE, line 3: completion_mask has 2 values; needed is one for each of the 3"),
        ({"completion_mask": [0, 2, 1]}, "FILE, line 3: completion_mask[1] is 2; allowed are 0 (context) and 1"),
        ({"completion_mask": [0.0, 0.5, 1.0]}, "FILE, line 3: completion_mask has dtype float32; allowed are"),
        ({"completion_mask": 1}, "FILE, line 3: completion_mask has the value 1; needed is one for each of the 3"),
        ({"advantage": None}, "FILE, line 3: advantage is None; a number, or one for each token, is needed"),
        ({"advantage": "high"}, "FILE, line 3: advantage is text ('high'); numbers are needed"),
        ({"advantage": [1.0, 2.0]}, "FILE, line 3: advantage has 2 values; needed is one for each of the 3 tokens"),
        ({"identity": [1.5, 2.5, 3.5]}, "FILE, line 3: identity has dtype float32; identity is compared for equality"),
        ({"advantage": {"a": 1}}, "FILE, line 3: advantage is {'a': 1}; a number"),
    ],
)
def test_a_wrong_value(tmp_path, change, expected):
    path = tmp_path / "x.jsonl"
    good = GOOD | ({"identity": [1, 2, 3]} if "identity" in change else {})
    path.write_text("\n".join(json.dumps(row) for row in (good, good, good | change)))
    assert message(path).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "FILE: it holds no samples; one JSON object per line is needed"),
        ("\n\n", "FILE: it holds no samples"),
        ('{"input_ids": [1, 2]\n', "FILE, line 1: not JSON: Expecting ',' delimiter at column"),
        ('{"input_ids": [1]}\n\n{"input_ids": [1, 2}\n', "FILE, line 3: not JSON: Expecting ',' delimiter at"),
        ('{"input_ids": [1]}\n\xff', "FILE, line 2: not JSON"),
        ('[{"input_ids": [1]}]', "FILE, line 1: a JSON array; one object per line is needed (jq"),
        ('[\n{"input_ids": [1]}]', "FILE, line 1: a JSON array; one object per line is needed (jq"),
        ("7", "FILE, line 1: a int; an object with the columns of a sample is needed"),
        ('{"input_ids": [1]}\n{"ids": [1]}', "FILE, line 2: no 'input_ids'; it has ids"),
        ('{"a": [1], "b": 2}', "FILE: no column of token ids; it has a, b. Looked for input_ids, tokens"),
        ('{"prompt_ids": [1]}', "FILE: no column of token ids; it has prompt_ids."),
        ('{"input_ids": [5, 6, 7], "labels": [6, 7, 8]}', "FILE, line 1: labels[0] is 6 and the token is 5; a label"),
        (
            '{"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [0, 0, 0, 0]}',
            "FILE, line 1: logprobs has 4 values; needed is one for each of the 3 tokens or of the 2 completion tokens",
        ),
        ('{"input_ids": [1, 2], "attention_mask": [0, 0]}', "FILE, line 1: attention_mask marks every token as"),
    ],
)
def test_a_wrong_file(tmp_path, text, expected):
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.encode("latin-1"))
    assert message(path).startswith(expected)


def test_what_is_not_there_or_not_known(tmp_path):
    assert message(tmp_path / "nothing.jsonl") == "FILE: no such file or folder"
    (tmp_path / "empty").mkdir()
    assert "nothing to read in this folder" in message(tmp_path / "empty")
    (tmp_path / "x.csv").write_text("a,b")
    assert message(tmp_path / "x.csv").startswith("FILE: unknown format '.csv'; allowed are .jsonl")
    for name in ("x.parquet", "x.npz", "x.jsonl.gz"):
        (tmp_path / name).write_text("not what it says")
    assert message(tmp_path / "x.parquet").startswith("FILE: not a Parquet file")
    assert message(tmp_path / "x.npz").startswith("FILE: not an NPZ file")
    assert message(tmp_path / "x.jsonl.gz").startswith("FILE: it cannot be read: Not a gzipped file")
    assert "files of more than one format (jsonl, npz, parquet)" in message(tmp_path / "x.[jnp]*")


def test_a_folder_of_splits(tmp_path):
    datasets = pytest.importorskip("datasets", reason="folders of datasets need datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))
    assert "a dataset with the splits test, train; name one of them" in message(tmp_path / "both")
    assert open_rollouts(tmp_path / "both" / "train").size == 1


def test_shards_have_the_same_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1], "advantage": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1]}\n')
    with pytest.raises(ReadError, match=r"b.jsonl: no column 'advantage', which .*a.jsonl has"):
        open_rollouts(tmp_path)


def npz(tmp_path, **arrays):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    return message(path)


def test_npz_of_another_layout(tmp_path):
    tokens = np.arange(6)
    assert npz(tmp_path, tokens=tokens).startswith("FILE: no offsets (n + 1,)")
    assert "must start at 0 and never fall" in npz(tmp_path, tokens=tokens, offsets=np.array([0, 4, 3, 6]))
    assert "it holds no samples" in npz(tmp_path, tokens=tokens[:0], offsets=np.array([0]))
    assert "tokens has shape (6,); needed is a row for each of the 5 tokens or 2" in npz(
        tmp_path, tokens=tokens, offsets=np.array([0, 2, 5])
    )
    objects = np.array([None], object)
    assert "holds Python objects" in npz(tmp_path, tokens=tokens, offsets=np.array([0, 6]), extra=objects)
    text = np.array(["low", "high"])
    assert "FILE, sample 0: advantage is text ('low')" in npz(
        tmp_path, tokens=tokens, offsets=np.array([0, 2, 6]), advantage=text
    )


def test_parquet_rows(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    path = tmp_path / "x.parquet"
    write(pa.table({"input_ids": [[1, 2], None, [3]]}), path)
    assert message(path).startswith("FILE, row 1: input_ids is null")
    write(pa.table({"input_ids": [[1, 2], [3, None]]}), path)
    assert message(path).startswith("FILE, row 1: input_ids has dtype object")
    write(pa.table({"input_ids": ["the cat", "sat"]}), path)
    assert message(path).startswith("FILE, row 0: input_ids is text ('the cat')")
    write(pa.table({"input_ids": pa.array([], pa.list_(pa.int64()))}), path)
    assert message(path) == "FILE: it holds no samples (0 rows)"


@pytest.mark.parametrize("format", ["npz", "parquet", "jsonl.gz", "jsonl.zst", "jsonl"])
def test_a_damaged_file(tmp_path, format):
    """Bytes that changed, and a file that was cut off: an error of one line, nothing else."""
    ids = np.random.default_rng(0).integers(0, 50, (20, 40))
    path = tmp_path / f"x.{format}"
    lines = "".join(json.dumps({"input_ids": x}) + "\n" for x in ids.tolist()).encode()
    if format == "npz":
        np.savez_compressed(path, tokens=ids.ravel(), offsets=np.arange(0, ids.size + 1, 40))
    elif format == "parquet":
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"input_ids": list(ids)}), path)
    elif format == "jsonl.zst":
        pa = pytest.importorskip("pyarrow", reason="zst needs pyarrow")
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(lines)
    else:
        path.write_bytes(gzip.compress(lines, mtime=0) if format == "jsonl.gz" else lines)
    whole = path.read_bytes()
    said = []
    for at in range(0, len(whole), max(len(whole) // 60, 1)):
        for damaged in (whole[:at], whole[:at] + b"\xff\xff\xff" + whole[at + 3 :]):
            path.write_bytes(damaged)
            try:
                list(open_rollouts(path).batches())
            except ReadError as error:
                said.append(str(error))
    assert len(said) > 60
    assert not any("\n" in text for text in said)


@pytest.mark.parametrize(("name", "package"), [("x.parquet", "pyarrow"), ("x.jsonl.zst", "pyarrow")])
def test_a_missing_package(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    assert "needs pyarrow: pip install 'treepack[cli]'" in message(tmp_path / name)
