"""Every format gives the same samples, from any start, in any batch size; columns by the usual names or as given."""

import gzip
import json

import numpy as np
import pytest

import treepack
from treepack import synthetic
from treepack.readers import ReadError, open_rollouts

FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "npz", "datasets"]
NAMES = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")


def rollouts():
    """18 samples of different lengths in three groups."""
    samples = []
    for group in range(3):
        made = synthetic.multi_turn(group, rollouts=2, turns=4, prompt=9, thinking=5, answer=3, tool=4, kept_sets=False)
        samples += [{**sample, "group_id": group} for sample in made]
    return samples


def plain(sample):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def write(folder, format, samples):
    path = folder / f"rollouts.{format}"
    if format.startswith("jsonl"):
        text = "".join(json.dumps(plain(sample)) + "\n" for sample in samples).encode()
        if format == "jsonl.zst":
            pa = pytest.importorskip("pyarrow", reason="zst needs pyarrow")
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write(text)
        else:
            path.write_bytes(gzip.compress(text) if format == "jsonl.gz" else text)
    elif format == "npz":
        flat = {name: np.concatenate([sample[name] for sample in samples]) for name in NAMES[:3]}
        offsets = np.cumsum([0] + [len(sample["input_ids"]) for sample in samples])
        scalars = {name: np.array([sample[name] for sample in samples]) for name in NAMES[3:]}
        np.savez_compressed(path, tokens=flat.pop("input_ids"), offsets=offsets, **flat, **scalars)
    else:
        pa = pytest.importorskip("pyarrow", reason="Parquet and datasets need pyarrow")
        table = pa.table({name: [sample[name] for sample in samples] for name in NAMES})
        if format == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        else:
            datasets = pytest.importorskip("datasets", reason="folders of datasets need datasets")
            datasets.disable_progress_bars()
            datasets.Dataset(table).save_to_disk(str(path))
    return path


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert set(one) == set(other)
        for name, value in other.items():
            assert np.array_equal(one[name], value), name
            assert isinstance(one[name], np.ndarray) == isinstance(value, np.ndarray), name


def read(path, samples=1024, start=0, **options):
    return [sample for batch in open_rollouts(path, **options).batches(samples, start=start) for sample in batch]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_same_samples(tmp_path, format):
    samples = rollouts()
    path = write(tmp_path, format, samples)
    opened = open_rollouts(path)
    assert opened.format == format.split(".")[0]
    assert opened.size == (None if format.startswith("jsonl") else len(samples))
    assert opened.columns == {name: "tokens" if (format, name) == ("npz", "input_ids") else name for name in NAMES}
    got = read(path)
    assert_equal(got, samples)
    assert got[0]["input_ids"].dtype == np.int64
    packed, wanted = treepack.pack(got, max_tokens=64), treepack.pack(samples, max_tokens=64)
    assert [tree.input_ids.tolist() for tree in packed] == [tree.input_ids.tolist() for tree in wanted]


@pytest.mark.parametrize("format", FORMATS)
def test_from_any_start_in_any_batches(tmp_path, format):
    samples = rollouts()
    path = write(tmp_path, format, samples)
    for start in (0, 1, 6, 7, 8, 17, 18, 30):
        for size in (1, 5, 100):
            batches = list(open_rollouts(path).batches(size, start=start))
            assert all(0 < len(batch) <= size for batch in batches)
            assert_equal([sample for batch in batches for sample in batch], samples[start:])


def test_progress_and_chosen_names(tmp_path):
    opened = open_rollouts(write(tmp_path, "parquet", rollouts()))
    seen = []
    batches = list(opened.batches(7, start=3, progress=lambda done: seen.append((done, opened.fraction)), names=()))
    assert [done for done, _ in seen] == list(np.cumsum([3] + [len(batch) for batch in batches]))[1:]
    assert seen[-1][0] == 18
    assert opened.fraction == 1.0
    assert all(set(sample) == {"input_ids"} for batch in batches for sample in batch)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "npz"])
def test_chunks_end_after_so_many_tokens(tmp_path, monkeypatch, format):
    """Long samples come in small batches: what is in memory does not grow with them."""
    from treepack.readers import arrow, jsonl, npz

    monkeypatch.setattr(arrow, "CHUNK_TOKENS", 100)
    monkeypatch.setattr(npz, "CHUNK_TOKENS", 100)
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 1000)
    samples = rollouts()
    batches = list(open_rollouts(write(tmp_path, format, samples)).batches())
    assert len(batches) > 3
    assert_equal([sample for batch in batches for sample in batch], samples)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_shards_of_a_folder_or_glob(tmp_path, format):
    samples = rollouts()
    for number, part in enumerate((samples[:5], samples[5:6], samples[6:])):
        write(tmp_path, format, part).rename(tmp_path / f"part-{number}.{format}")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "README.md").write_text("not rollouts")
    (tmp_path / "dataset_info.json").write_text('{\n"says": "what a tool wrote about it"\n}')
    empty = write(tmp_path, format, samples[:1]).rename(tmp_path / f"part-1b.{format}")
    if format == "jsonl":
        empty.write_text("\n")
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pq.read_table(empty).slice(1), empty)
    for path in (tmp_path, tmp_path / f"*.{format}"):
        assert_equal(read(path), samples)
        for start in (4, 5, 6, 9, 18):
            assert_equal(read(path, 4, start), samples[start:])


def test_fingerprint_changes_with_the_file_and_the_columns(tmp_path):
    path = write(tmp_path, "jsonl", rollouts())
    before = open_rollouts(path).fingerprint
    assert before == open_rollouts(path).fingerprint
    assert before != open_rollouts(path, columns={"advantage": ""}).fingerprint
    with path.open("a") as file:
        file.write("\n")
    assert before != open_rollouts(path).fingerprint


# --- columns --------------------------------------------------------------------------------------------------------


def one(tmp_path, row, **options):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (sample,) = read(path, **options)
    return plain(sample)


def test_prompt_and_completion_say_what_is_trained(tmp_path):
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0], "uid": "a", "rewards": None}
    sample = one(tmp_path, row)
    assert np.isnan(sample.pop("reward"))
    assert sample == {
        "input_ids": [1, 2, 3, 4, 5],
        "completion_mask": [0, 0, 1, 1, 1],
        "old_log_probs": [0, 0, -1.0, -2.0, -3.0],
        "group_id": "a",
    }
    # A tool result within the completion; a whole column beside one of the completion.
    row |= {"completion_mask": [1, 0, 1], "logprobs": [0.0, 0.0, -1.0, -2.0, -3.0]}
    sample = one(tmp_path, row)
    assert sample["completion_mask"] == [0, 0, 1, 0, 1]
    assert sample["old_log_probs"] == [0, 0, -1.0, -2.0, -3.0]


def test_labels_and_float_masks(tmp_path):
    ids = {"input_ids": [5, 6, 7]}
    assert one(tmp_path, ids | {"labels": [-100, 6, 7]})["completion_mask"] == [0, 1, 1]
    assert one(tmp_path, ids | {"loss_mask": [0.0, 1.0, 0.0]})["completion_mask"] == [0, 1, 0]
    assert one(tmp_path, ids | {"response_mask": [False, True, True]})["completion_mask"] == [0, 1, 1]
    assert "completion_mask" not in one(tmp_path, ids)


def test_padding_is_cut_out(tmp_path):
    row = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, -100, 6], "advantage": 0.5}
    assert one(tmp_path, row) == {"input_ids": [5, 6], "completion_mask": [0, 1], "advantage": 0.5}


def test_columns_as_given(tmp_path):
    row = {"mine": [1, 2, 3], "input_ids": [9], "weight": 2.0, "advantage": 1.0}
    sample = one(tmp_path, row, columns={"input_ids": "mine", "weight": "weight", "advantage": ""})
    assert sample == {"input_ids": [1, 2, 3], "weight": 2.0}


def test_kept_sets_and_identity(tmp_path):
    row = {"input_ids": [1, 2], "sampling_mask": [2, 7], "sampling_mask_counts": [0, 2], "identity": [[1, 0], [1, 1]]}
    assert one(tmp_path, row) == row
    path = tmp_path / "one.parquet"
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist([row]), path)
    (sample,) = read(path)
    assert plain(sample) == row
    assert treepack.pack([sample], max_tokens=8)[0].sampling_mask.tolist() == [2, 7]


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_size_list", "int32", "uint16"])
def test_arrow_types_of_ids(tmp_path, kind):
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    types = {
        "list": pa.list_(pa.int64()),
        "large_list": pa.large_list(pa.int64()),
        "fixed_size_list": pa.list_(pa.int64(), 2),
        "int32": pa.list_(pa.int32()),
        "uint16": pa.list_(pa.uint16()),
    }
    ids = [[1, 2], [3, 4], [5, 6], [7, 8]]
    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table({"input_ids": pa.array(ids, types[kind])}), tmp_path / "x.parquet"
    )
    assert [sample["input_ids"].tolist() for sample in read(tmp_path / "x.parquet", start=1)] == ids[1:]


def test_int64_ids_of_parquet_are_not_copied(tmp_path):
    path = write(tmp_path, "parquet", rollouts())
    (batch, *_) = open_rollouts(path).batches()
    assert batch[0]["input_ids"].base is not None
    gap = batch[1]["input_ids"].ctypes.data - batch[0]["input_ids"].ctypes.data
    assert gap == 8 * len(batch[0]["input_ids"])  # both are views of one Arrow buffer


def test_real_rollouts(treepack_data):
    path = treepack_data / "data" / "qwen_math_n8.npz"
    with np.load(path) as file:
        tokens, offsets, mask = file["tokens"], file["offsets"], file["completion_mask"]
    samples = read(path)
    assert len(samples) == len(offsets) - 1
    assert np.array_equal(np.concatenate([sample["input_ids"] for sample in samples]), tokens)
    assert np.array_equal(np.concatenate([sample["completion_mask"] for sample in samples]), mask)
    with pytest.raises(ReadError, match="no column 'nothing'"):
        open_rollouts(path, columns={"input_ids": "nothing"})
