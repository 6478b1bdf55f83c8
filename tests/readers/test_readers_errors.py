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
        (
            {"input_ids": [1.0, 2.0]},
            "FILE, line 3: input_ids[0] is 1.0; token ids, integers from 0 to 2147483647, are needed",
        ),
        ({"input_ids": [1, None]}, "FILE, line 3: input_ids[1] is null; token ids, integers from 0"),
        ({"input_ids": [1, float("nan")]}, "FILE, line 3: input_ids[1] is nan; token ids, integers from 0"),
        ({"input_ids": [1, True, 0.5]}, "FILE, line 3: input_ids[1] is True; token ids"),
        ({"input_ids": [1, "cat"]}, "FILE, line 3: input_ids[1] is 'cat'; token ids"),
        ({"input_ids": [1, {}]}, "FILE, line 3: input_ids[1] is {}; token ids"),
        ({"input_ids": [1, 2**63]}, "FILE, line 3: input_ids[1] is 9223372036854775808; token ids"),
        ({"input_ids": {"a": 1}}, "FILE, line 3: input_ids is an object; a list of token ids is needed"),
        ({"input_ids": [{"role": "user"}]}, "FILE, line 3: input_ids holds chat messages; name a tokenizer"),
        ({"completion_mask": [0, 1, None]}, "FILE, line 3: completion_mask[2] is null; numbers are needed"),
        ({"old_log_probs": [0, "x", 0]}, "FILE, line 3: old_log_probs[1] is 'x'; numbers are needed"),
        ({"input_ids": None}, "FILE, line 3: input_ids is null"),
        ({"input_ids": 7}, "FILE, line 3: input_ids is a number; a list of token ids is needed"),
        ({"input_ids": []}, "FILE, line 3: no tokens in input_ids; a sample has at least one"),
        ({"input_ids": [1, -2, 3]}, "FILE, line 3: input_ids[1] is -2; allowed are ids from 0 to 2147483647"),
        ({"input_ids": [1, 2, 2**31]}, "FILE, line 3: input_ids[2] is 2147483648; allowed are ids"),
        ({"input_ids": [1, 2, 2**70]}, "FILE, line 3: input_ids[2] is 1180591620717411303424; token ids"),
        ({"input_ids": [[1, 2], [3]]}, "FILE, line 3: input_ids is ragged"),
        ({"completion_mask": [0, 1]}, "FILE, line 3: completion_mask has 2 values; needed is one for each of the 3"),
        (
            {"completion_mask": [[0], [1], [1]]},
            "FILE, line 3: completion_mask has shape (3, 1); one number for each tok",
        ),
        (
            {"advantage": [1e39, 0, 0]},
            "FILE, line 3: advantage holds 1e+39, and Python floats become float32, up to 3.4e",
        ),
        ({"completion_mask": [0, 2, 1]}, "FILE, line 3: completion_mask[1] is 2; allowed are 0 (context) and 1"),
        ({"completion_mask": [0.0, 0.5, 1.0]}, "FILE, line 3: completion_mask has dtype float32; allowed are"),
        ({"completion_mask": 1}, "FILE, line 3: completion_mask has the value 1; needed is one for each of the 3"),
        ({"advantage": None}, "FILE, line 3: advantage is null; a number, or one for each token, is needed"),
        ({"advantage": "high"}, "FILE, line 3: advantage is text ('high'); numbers are needed"),
        ({"advantage": [1.0, 2.0]}, "FILE, line 3: advantage has 2 values; needed is one for each of the 3 tokens"),
        ({"identity": [1.5, 2.5, 3.5]}, "FILE, line 3: identity has dtype float32; identity is compared for equality"),
        ({"advantage": {"a": 1}}, "FILE, line 3: advantage is {'a': 1}; a number"),
    ],
)
def test_a_wrong_value(tmp_path, change, expected):
    path = tmp_path / "x.jsonl"
    more = {"identity": [1, 2, 3], "old_log_probs": [0, 0, 0]}
    good = GOOD | {name: value for name, value in more.items() if name in change}
    path.write_text("\n".join(json.dumps(row) for row in (good, good, good | change)))
    assert message(path).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "FILE: it holds no samples; at least one is needed"),
        ("\n\n", "FILE: it holds no samples"),
        ('{"input_ids": [1, 2]\n', "FILE, line 1: not JSON: Expecting ',' delimiter at column"),
        ('{"input_ids": [1]}\n\n{"input_ids": [1, 2}\n', "FILE, line 3: not JSON: Expecting ',' delimiter at"),
        ('{"input_ids": [1]}\n\xff', "FILE, line 2: it cannot be parsed: 'utf-8' codec"),
        ('{\n "input_ids": [1]\n}', "FILE, line 1: not JSON: Expecting property name enclosed in double quotes at col"),
        ('{"input_ids": [1, ' + "9" * 5000 + "]}", "FILE, line 1: it cannot be parsed: Exceeds the limit"),
        ('{"input_ids": ' + "[" * 99999, "FILE, line 1: it cannot be parsed: maximum recursion depth"),
        ("null", "FILE, line 1: it is null; an object"),
        ("[1, 2]", "FILE, element 0: it is a number; an object with the columns of a sample is needed"),
        ('[{"input_ids": [1]}', "FILE, element 1: not JSON: the file ends within the array at letter 20"),
        ('[{"input_ids": [1]}, {"input_ids": [1 2]}]', "FILE, element 1: not JSON: Expecting ',' delimiter at letter"),
        ('[{"input_ids": [1]} {"input_ids": [1]}]', "FILE, element 1: not JSON: Expecting ',' delimiter at letter 21"),
        ('[{"input_ids": [1]}]\n[]', "FILE, element 1: not JSON: there is more after the array; one array, or one obj"),
        ('[{"input_ids": [1]}, {"ids": [1]}]', "FILE, element 1: no 'input_ids'; it has ids"),
        (
            '[{"input_ids": [1, 2]}, {"input_ids": [1, 2], "loss_mask": [0, 1]}]',
            "FILE, element 1: it has 'loss_mask', which element 0 has not; give it in every element, or leave it out",
        ),
        ('[{"input_ids": [1, ' + "9" * 5000 + "]}]", "FILE, element 0: not JSON: Exceeds the limit"),
        ('[{"input_ids": ' + "[" * 99999, "FILE, element 0: not JSON: maximum recursion depth"),
        ('[{"input_ids": "\xff"}]', "FILE: it cannot be parsed: 'utf-8' codec"),
        ("[]", "FILE: it holds no samples"),
        ("7", "FILE, line 1: it is a number; an object with the columns of a sample is needed"),
        ('{"input_ids": [1]}\n{"ids": [1]}', "FILE, line 2: no 'input_ids'; it has ids"),
        (
            '{"input_ids": [1, 2]}\n{"input_ids": [1, 2], "loss_mask": [0, 1]}',
            "FILE, line 2: it has 'loss_mask', which the first line has not; give it in every line, or leave it out "
            "with --column completion_mask=",
        ),
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


def test_what_is_trained_is_said_in_all_shards_or_in_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2], "x": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, 2], "score": 1}\n')
    with pytest.raises(ReadError, match=r"b.jsonl: it has the column 'labels', which .*a.jsonl has not"):
        open_rollouts(tmp_path)
    assert len(list(open_rollouts(tmp_path, columns={"labels": ""}).batches())) == 2


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
    assert message(path).startswith("FILE, row 1: input_ids[1] is null; token ids")
    write(pa.table({"input_ids": ["the cat", "sat"]}), path)
    assert message(path).startswith("FILE, row 0: input_ids is text ('the cat')")
    write(pa.table({"input_ids": pa.array([], pa.list_(pa.int64()))}), path)
    assert message(path) == "FILE: it holds no samples; at least one is needed"
    twice = pa.Table.from_arrays([pa.array([[1, 2]]), pa.array([1.0]), pa.array([2.0])], ["tokens", "reward", "reward"])
    write(twice, path)
    assert message(path).startswith("FILE: 2 columns are named 'reward', and reward is read from it: rename one")
    assert len(next(open_rollouts(path, columns={"reward": ""}).batches())) == 1


def test_packed_trees_are_no_rollouts(tmp_path):
    """A folder of shards has `input_ids` too: those of trees, whose numbers would say nothing."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from treepack import offline

    (tmp_path / "x.jsonl").write_text('{"input_ids": [1, 2]}')
    offline.pack_file(tmp_path / "x.jsonl", tmp_path / "out", max_tokens=8)
    assert "shard-00000.parquet: it holds packed trees" in message(tmp_path / "out")


@pytest.mark.skipif(not hasattr(__import__("os"), "mkfifo"), reason="pipes of POSIX")
def test_a_name_that_is_no_file(tmp_path):
    import os

    os.mkfifo(tmp_path / "x.jsonl")
    assert message(tmp_path / "x.jsonl").startswith("FILE: neither a file nor a folder")
    with pytest.raises(ReadError, match="the name of the file to read is empty"):
        open_rollouts("")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert message(tmp_path / "loop.jsonl") == "FILE: no such file or folder"


@pytest.mark.parametrize("name", ["x.npz", "x.parquet", "x.jsonl"])
def test_a_file_that_may_not_be_read_is_not_called_broken(tmp_path, monkeypatch, name):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from treepack.readers import files

    def refuse(self, *arguments):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / name).write_text("")
    monkeypatch.setattr(files.Path, "open", refuse)
    assert message(tmp_path / name) == "FILE: it cannot be read: Permission denied"


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


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_number_in_each_row_is_no_list_of_token_ids(tmp_path, form):
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_text('{"input_ids": 5}\n{"input_ids": 6}\n')
    else:
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"input_ids": pa.array([5, 6])}), path)
    with pytest.raises(ReadError) as caught:
        open_rollouts(path)
    assert str(caught.value) == (
        f"{path}: column 'input_ids' holds one number in each row; a list of token ids is needed, the tokens of one "
        "sample in one row"
    )
    first = "line 1" if form == "jsonl" else "row 0"
    with pytest.raises(ReadError) as caught:
        list(open_rollouts(path, columns={"input_ids": "input_ids"}).batches(8))
    assert str(caught.value) == f"{path}, {first}: input_ids is a number; a list of token ids is needed"


def test_no_tokens_are_said_with_their_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row, names in [
        ({"tokens": []}, "tokens"),
        ({"prompt_ids": [], "response_ids": []}, "prompt_ids and response_ids"),
    ]:
        path.write_text(json.dumps({name: [1, 2] for name in row}) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ReadError) as caught:
            list(open_rollouts(path).batches(8))
        assert str(caught.value) == (
            f"{path}, line 2: no tokens in {names}; a sample has at least one. Leave empty samples out"
        )
