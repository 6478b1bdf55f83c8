"""The same rows through `datasets.map` and Ray Data: the trees are those of `treepack.pack` on each batch."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers import says
from offline_rows import assert_equal, rollouts

import treepack
from treepack import PackError

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")

from treepack import offline  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


def columns_of(samples):
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def table_of(samples):
    """An Arrow table with the types of the samples; tables of two numbers a token as fixed-size lists."""
    columns = {}
    for name, values in columns_of(samples).items():
        if name == "table":
            columns[name] = pa.array([x.tolist() for x in values], pa.list_(pa.list_(pa.int8(), 2)))
        elif name == "advantage":
            columns[name] = pa.array(values, pa.float32())
        else:
            columns[name] = pa.array(values)
    return pa.table(columns)


@pytest.mark.parametrize("as_table", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_batch(as_table, kept):
    samples = rollouts(groups=5, kept=kept)
    for sample in samples:
        sample["weight"] = np.float64(sample["advantage"] / 3)
        sample["advantage"] = np.float32(sample["advantage"])
        sample["turns"] = np.int16(len(sample["input_ids"]))
    expected = treepack.pack(samples, max_tokens=100)
    batch = table_of(samples) if as_table else columns_of(samples)
    got = offline.pack_batch(batch, max_tokens=100)
    assert isinstance(got, pa.Table)
    assert got.num_rows == len(expected)
    for tree, other in zip(offline.trees_of(got), expected, strict=True):
        assert_equal(tree, other)


def test_a_batch_is_left_as_it_was():
    batch = columns_of(rollouts(groups=2))
    batch["advantage"] = [1, 2, 3, 4, *np.arange(4)]
    before = {name: list(values) for name, values in batch.items()}
    offline.pack_batch(batch, max_tokens=100)
    assert all(a is b for name in before for a, b in zip(before[name], batch[name], strict=True))


def test_named_columns_and_options():
    samples = rollouts(groups=3)
    batch = {"tokens": [sample["input_ids"] for sample in samples], "text": ["x"] * 12}
    got = offline.pack_batch(
        batch, max_tokens=90, columns={"input_ids": "tokens"}, branching="label", pad_to_multiple_of=8
    )
    plain = [{"input_ids": sample["input_ids"]} for sample in samples]
    expected = treepack.pack(plain, max_tokens=90, branching="label", pad_to_multiple_of=8)
    for tree, other in zip(offline.trees_of(got), expected, strict=True):
        assert_equal(tree, other)


def test_a_batch_of_pairs():
    batch = {"chosen": [[1, 2, 3], [1, 4]], "rejected": [[1, 2, 5], [6]], "better": [0.5, 2.0]}
    columns = {"chosen.input_ids": "chosen", "rejected.input_ids": "rejected", "margin": "better"}
    (tree,) = offline.trees_of(offline.pack_batch(batch, max_tokens=16, pairs=True, columns=columns))
    assert tree.samples["chosen"].tolist() == [True, False] * 2
    assert tree.samples["margin"].tolist() == [0.5, 0.5, 2.0, 2.0]
    assert [ids.tolist() for ids in tree.unpack(tree.input_ids)] == [[1, 2, 3], [1, 2, 5], [1, 4], [6]]


@pytest.mark.parametrize(
    ("batch", "options", "parts"),
    [
        ({"tokens": [[1]]}, {}, ["no input_ids", "tokens"]),
        ({"tokens": [[1]]}, {"columns": {"input_ids": "ids"}}, ["no column 'ids'", "it has tokens"]),
        ({"input_ids": [[1]], "a": []}, {}, ["different numbers of rows", "'a': 0"]),
        ({"input_ids": [[1]]}, {"placement": "stream"}, ["'stream'", "'shared' or 'first_fit'"]),
        ({"input_ids": [[1]]}, {"pairs": True}, ["pairs need chosen.input_ids", "columns="]),
        ({"input_ids": []}, {}, ["the batch has no rows"]),
        ({"input_ids": [["a"]]}, {}, ["sample 0: input_ids"]),
    ],
)
def test_batches_that_cannot_be_packed(batch, options, parts):
    with pytest.raises((PackError, TypeError)) as error:
        offline.pack_batch(batch, **{"max_tokens": 16, **options})
    says(error, *parts)


def test_a_column_that_is_named_like_a_sample():
    batch = {"input_ids": [[1, 2], [1, 3]], "sample 7": [[1, 2], [1]]}
    with pytest.raises(PackError, match=r"^sample 1: sample 7 has 1 row; input_ids has 2 tokens") as error:
        offline.pack_batch(batch, max_tokens=16)
    assert error.value.sample == 1
    batch = {f"{side}.{name}": values for side in ("chosen", "rejected") for name, values in batch.items()}
    with pytest.raises(PackError, match=r"^pair 1 \(chosen\): sample 7 has 1 row; input_ids has 2 tokens"):
        offline.pack_batch(batch, max_tokens=16, pairs=True)


def twice():
    return pa.Table.from_arrays([pa.array([[1, 2]])] * 2, ["input_ids"] * 2)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (twice(), ["2 columns named 'input_ids'"]),
        ([{"input_ids": [1]}], ["of type list", "a dict of columns or a pyarrow Table"]),
        ({"input_ids": [[1, 2]], "x": 5}, ["column 'x'", "of type int", "one value per row"]),
        ({"input_ids": "text"}, ["column 'input_ids'", "of type str"]),
    ],
)
def test_what_is_no_batch(batch, parts):
    with pytest.raises((PackError, TypeError)) as error:
        offline.pack_batch(batch, max_tokens=8)
    says(error, *parts)


def test_a_record_batch():
    batch = pa.RecordBatch.from_pydict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
    (tree,) = offline.trees_of(offline.pack_batch(batch, max_tokens=8))
    assert tree.input_ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_batch_of_which_nothing_fits_has_the_columns_of_others(pairs):
    batch = {"chosen.input_ids": [[1, 2]], "rejected.input_ids": [[1, 3]]} if pairs else {"input_ids": [[1, 2]]}
    batch["weight"] = [0.5]
    none, some = (offline.pack_batch(batch, max_tokens=n, overlong="skip", pairs=pairs) for n in (1, 3))
    assert (none.num_rows, some.num_rows) == (0, 1)
    assert none.schema == some.schema
    assert offline.trees_of(none) == []


# ---------------------------------------------------------------------------------------------------------- datasets


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    module = pytest.importorskip("datasets", reason="needs datasets")
    module.disable_progress_bars()
    return module


@pytest.mark.parametrize("format", [None, "numpy", "arrow"])
def test_through_datasets(datasets, tmp_path, format):
    samples = [{name: x for name, x in sample.items() if name != "table"} for sample in rollouts(groups=6)]
    data = datasets.Dataset(table_of(samples)).with_format(format)
    pack = partial(offline.pack_batch, max_tokens=100)
    packed = data.map(pack, batched=True, batch_size=8, remove_columns=data.column_names).with_format("arrow")
    assert packed.column_names[:3] == ["first_sample", "num_tokens", "num_samples"]
    expected = [tree for at in range(0, 24, 8) for tree in treepack.pack(samples[at : at + 8], max_tokens=100)]
    trees = offline.trees_of(packed[:])
    assert len(trees) == len(expected)
    for tree, other in zip(trees, expected, strict=True):
        same_values(tree, other)
        if format == "arrow":
            assert_equal(tree, other)  # nothing on the way turned arrays into Python lists
    packed.to_parquet(str(tmp_path / "part.parquet"))
    for tree, other in zip(offline.load(tmp_path), trees, strict=True):
        assert_equal(tree, other)


def same_values(tree, other):
    """Structure exact, columns by value: a list of Python floats has no dtype of its own."""
    for name in [name for name in other.arrays if "." not in name]:
        np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))
        assert getattr(tree, name).dtype == getattr(other, name).dtype
    for kind in ("terms", "samples"):
        for name, value in getattr(other, kind).items():
            np.testing.assert_array_equal(getattr(tree, kind)[name], value)


def test_datasets_reads_the_shards(datasets, tmp_path):
    samples = rollouts(groups=6, kept=True)
    pq.write_table(table_of(samples), tmp_path / "in.parquet")
    offline.pack_file(tmp_path / "in.parquet", tmp_path / "out", max_tokens=100, columns={"depth": "depth"})
    data = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    ).with_format("arrow")
    for tree, other in zip(offline.trees_of(data[:]), offline.load(tmp_path / "out"), strict=True):
        assert_equal(tree, other)


# --------------------------------------------------------------------------------------------------------------- Ray


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[data]")
def test_through_ray_as_the_page_does(tmp_path):
    """In a process of its own, with one local worker: Ray keeps threads and warns of its own deprecations."""
    samples = rollouts(groups=6)
    (tmp_path / "rollouts").mkdir()
    pq.write_table(
        pa.table({"tokens": [sample["input_ids"] for sample in samples]}), tmp_path / "rollouts" / "a.parquet"
    )
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (recipe,) = [block for block in blocks if "import ray" in block]
    start = """
        from functools import partial
        import ray
        from treepack import offline
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
    """
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-c", textwrap.dedent(start) + recipe + "\nray.shutdown()\n"]
    # Ray puts sockets there, whose paths may have 107 bytes: pytest's own folder is too deep.
    with tempfile.TemporaryDirectory() as short:
        environment["RAY_TMPDIR"] = short
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = treepack.pack([{"input_ids": sample["input_ids"]} for sample in samples], max_tokens=16384)
    trees = offline.load(tmp_path / "packed")
    assert len(trees) == len(expected)
    for tree, other in zip(trees, expected, strict=True):
        assert_equal(tree, other)
