"""Offline packing: the trees that come back from disk are the trees that were packed, for every kind of column."""

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import as_arrays, sample_lists, says
from hypothesis import given
from hypothesis import strategies as st
from offline_rows import ListRows, assert_equal, packed_windows, rollouts, windows_of

import treepack
from treepack import PackError

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")

from treepack import offline  # noqa: E402


def write(samples, folder, **options):
    return offline.write(ListRows(samples), folder, offline.Options(**options))


# ------------------------------------------------------------------------------------------------ the same trees


@given(
    sample_lists(),
    st.sampled_from(["token", "label"]),
    st.sampled_from([None, 4]),
    st.sampled_from(["shared", "first_fit"]),
    st.sampled_from([5, 12, 10_000]),
)
def test_trees_come_back_as_they_were_packed(samples, branching, multiple, placement, window):
    samples = as_arrays(samples)
    options = {"max_tokens": 16, "branching": branching, "pad_to_multiple_of": multiple, "placement": placement}
    expected = packed_windows(samples, window, **options)
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(samples, folder, window=window, shard_tokens=12, **options)
        trees = offline.load(folder)
        assert len(trees) == len(expected)
        for tree, other in zip(trees, expected, strict=True):
            assert_equal(tree, other)
        numbers = sorted(int(x) for i in range(len(trees)) for x in trees.sample_numbers(i))
    assert numbers == list(range(len(samples)))
    assert sum(shard.samples for shard in manifest.shards) == manifest.rows == len(samples)
    assert sum(shard.raw_tokens for shard in manifest.shards) == sum(len(sample["input_ids"]) for sample in samples)


@pytest.mark.parametrize("kept", [False, True])
def test_a_stream_is_the_micro_batches_of_packer(tmp_path, kept):
    samples = rollouts(kept=kept)
    packer = treepack.Packer(max_tokens=128)
    closed = [trees for sample in samples for trees in packer.add(sample)] + packer.flush()
    expected = [tree for trees in closed for tree in trees]
    manifest = write(samples, tmp_path, max_tokens=128, placement="stream", shard_tokens=256)
    trees = offline.load(tmp_path)
    for tree, other in zip(trees, expected, strict=True):
        assert_equal(tree, other)
    assert [len(trees.sample_numbers(i)) for i in range(len(trees))] == [len(tree.sample_index) for tree in expected]
    assert sorted(int(x) for i in range(len(trees)) for x in trees.sample_numbers(i)) == list(range(len(samples)))
    assert sum(shard.packed_tokens for shard in manifest.shards) == packer.stats.packed_tokens


def test_every_dtype_of_a_column(tmp_path):
    dtypes = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"]
    random = np.random.default_rng(0)
    samples = []
    for _ in range(6):
        sample = {"input_ids": random.integers(0, 3, 9)}
        for dtype in [*dtypes, "float64"]:
            sample[f"token_{dtype}"] = random.integers(0, 2, (9, 2, 3)).astype(dtype)
            sample[f"sample_{dtype}"] = np.dtype(dtype).type(random.integers(0, 2))
        samples.append(sample)
    samples[0]["token_float32"][0, 0, 0] = np.nan
    samples[0]["token_uint64"][0, 0, 0] = 2**64 - 1
    write(samples, tmp_path, max_tokens=64)
    expected = treepack.pack(samples, max_tokens=64)
    assert expected[0].terms["token_uint64"].shape[1:] == (2, 3)
    for tree, other in zip(offline.load(tmp_path), expected, strict=True):
        assert_equal(tree, other)


def test_a_column_that_parquet_does_not_have(tmp_path):
    samples = [{"input_ids": [1, 2], "phase": np.zeros(2, np.complex64)}]
    with pytest.raises(PackError) as error:
        write(samples, tmp_path, max_tokens=8)
    says(error, "'phase' holds complex64", "convert it before packing")
    assert list(tmp_path.iterdir()) == []


def test_windows_that_bring_integers_where_the_first_had_floats(tmp_path):
    """JSON writes 1 for 1.0: known columns are floats whatever was written, others take the dtype of the first."""
    samples = [{"input_ids": [1, 2], "advantage": 1, "weight": w} for w in (0.5, 2, 3)]
    write(samples, tmp_path, max_tokens=2, window=2)
    trees = list(offline.load(tmp_path))
    assert [tree.samples["advantage"].dtype for tree in trees] == [np.float32] * 3
    assert [tree.samples["weight"].tolist() for tree in trees] == [[0.5], [2.0], [3.0]]
    with pytest.raises(PackError) as error:
        write(list(reversed(samples)), tmp_path / "other", max_tokens=2, window=2)
    says(error, "samples 2 to 2", "'weight' holds float32 here, and int64 before", "1.0 instead of 1")


def test_samples_that_fit_no_tree(tmp_path):
    samples = rollouts(groups=3)
    samples[5] = {name: np.concatenate([v, v]) if np.ndim(v) else v for name, v in samples[5].items()}
    with pytest.raises(PackError) as error:
        write(samples, tmp_path, max_tokens=60, window=100)
    says(error, "sample 5: it has", "max_tokens=60")  # its number in the file, not in its window
    manifest = write(samples, tmp_path, max_tokens=60, window=100, overlong="skip")
    assert manifest.skipped == 1
    trees = offline.load(tmp_path)
    numbers = sorted(int(x) for i in range(len(trees)) for x in trees.sample_numbers(i))
    assert numbers == [i for i in range(12) if i != 5]


def test_nothing_fits(tmp_path):
    manifest = write(rollouts(groups=2), tmp_path, max_tokens=4, overlong="skip")
    assert (manifest.skipped, manifest.shards, manifest.finished) == (8, [], True)
    assert list(offline.load(tmp_path)) == []


@pytest.mark.parametrize("placement", ["first_fit", "stream"])
def test_an_error_names_the_sample_of_the_file(tmp_path, placement):
    samples = rollouts(groups=5)
    samples[17]["old_log_probs"] = samples[17]["old_log_probs"][:-1]
    with pytest.raises(PackError) as error:
        write(samples, tmp_path, max_tokens=64, window=150, placement=placement)
    says(error, "sample 17: ")


@pytest.mark.parametrize("name", ["sample 7", "samples 7 and 9", "pair 7"])
@pytest.mark.parametrize("placement", ["first_fit", "stream"])
def test_a_column_that_is_named_like_a_sample(tmp_path, placement, name):
    """Samples are counted over the file, and what a user named stays as it is."""
    samples = [{"input_ids": [number] * 10, name: [5] * 10} for number in range(20)]
    call = {"max_tokens": 20, "window": 40, "placement": placement}
    samples[17][name] = [5] * 9
    with pytest.raises(PackError) as error:
        write(samples, tmp_path, **call)
    assert str(error.value).startswith(f"sample 17: {name} has 9 rows; input_ids has 10 tokens, so 10 are needed; ")
    assert (error.value.sample, error.value.token) == (17, None)
    samples[17][name] = ["a"] * 10
    with pytest.raises(TypeError) as error:
        write(samples, tmp_path, **call)
    assert str(error.value).startswith(f"sample 17: {name} is ")
    assert error.value.sample == 17
    del samples[17][name]
    with pytest.raises(PackError) as error:
        write(samples, tmp_path, **call)
    other = "sample 16 has it" if placement == "first_fit" else "the first sample of the stream has one: give it in "
    assert str(error.value).startswith("sample 17: ")
    assert f"column {name!r}" in str(error.value)
    assert f"; {other}" in str(error.value)


def test_a_group_that_is_named_like_a_sample(tmp_path):
    samples = [{"input_ids": [number] * 10, "group_id": number} for number in range(20)]
    samples[17]["group_id"] = "samples 7 and 9"
    with pytest.raises(PackError) as error:
        write(samples, tmp_path, max_tokens=40, placement="stream")
    assert "sample 17: group_id is 'samples 7 and 9', no integer; " in str(error.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"window": 0}, ["window is 0", "1 or more"]),
        ({"shard_tokens": "many"}, ["shard_tokens is 'many'", "integer"]),
        ({"placement": "random"}, ["placement is 'random'", "'stream'"]),
        ({"branching": "tree"}, ["branching is 'tree'", "'label'"]),
        ({"pairs": True, "placement": "stream"}, ["placement is 'stream'", "pairs"]),
        ({"pairs": True, "max_terms": 5}, ["max_terms is 5", "pairs"]),
    ],
)
def test_options_that_are_not_allowed(tmp_path, options, parts):
    with pytest.raises((PackError, TypeError)) as error:
        write(rollouts(groups=1), tmp_path / "out", **{"max_tokens": 64, **options})
    says(error, *parts)
    assert not (tmp_path / "out").exists()


def test_integers_of_numpy_are_options(tmp_path):
    manifest = write(rollouts(groups=2), tmp_path, max_tokens=np.int64(128), window=np.int32(500))
    assert manifest.options["max_tokens"] == 128
    assert len(offline.load(tmp_path, rank=np.int64(0), world_size=np.int64(2))) >= 1


def test_a_file_of_rollouts(tmp_path, monkeypatch):
    samples = rollouts()
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    table = {name: [sample[name] for sample in samples] for name in names}
    table["tokens"] = table.pop("input_ids")
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(table), "rollouts.parquet")
    seen = []
    manifest = offline.pack_file(
        "rollouts.parquet", "out", max_tokens=128, window=500, columns={"input_ids": "tokens"}, progress=seen.append
    )
    plain = [{name: sample[name] for name in names} for sample in samples]
    for tree, other in zip(offline.load("out"), packed_windows(plain, 500, max_tokens=128), strict=True):
        assert np.array_equal(tree.input_ids, other.input_ids)
        assert np.array_equal(tree.terms["old_log_probs"], other.terms["old_log_probs"])
    assert manifest.source["name"] == "rollouts.parquet"
    assert seen[-1].rows == len(samples)
    assert [one.trees for one in seen] == sorted(one.trees for one in seen)


def test_memory_is_bounded_by_the_window(tmp_path):
    """No more samples are alive than those of a window and a batch."""
    import gc
    import weakref

    class Ids(np.ndarray):
        """An array that can be watched."""

    given_out = []

    class Watched(ListRows):
        def batches(self, samples=1024, *, start=0):
            for batch in super().batches(samples, start=start):
                for sample in batch:
                    sample["input_ids"] = sample["input_ids"].copy().view(Ids)
                    given_out.append(weakref.ref(sample["input_ids"]))
                yield batch

    samples, most = rollouts(groups=25), 0
    longest = max(len(window) for window in windows_of(samples, 400))

    def look(now):
        nonlocal most
        gc.collect()
        most = max(most, sum(ref() is not None for ref in given_out))

    rows = Watched(samples, size=5)
    offline.write(rows, tmp_path, offline.Options(max_tokens=128, window=400, shard_tokens=800), progress=look)
    assert 0 < most <= 2 * longest + 2 * 5


# ----------------------------------------------------------------------------------------------- without treepack


def test_shards_say_what_they_are(tmp_path):
    write(rollouts(kept=True), tmp_path, max_tokens=128)
    path = tmp_path / "shard-00000.parquet"
    schema = pq.read_schema(path)
    assert schema.field("input_ids").type == pa.list_(pa.int64())
    assert schema.field("subtree_end").type == pa.list_(pa.int32())
    assert schema.field("terms.table").type == pa.list_(pa.list_(pa.int8(), 2))
    said = {name.decode(): value.decode() for name, value in schema.metadata.items()}
    assert said["treepack.version"] == treepack.__version__
    assert said["treepack.layout_version"] == "1"
    assert '"max_tokens": 128' in said["treepack.options"]
    assert "rows" in said["treepack.source"]


def test_plain_readers(tmp_path):
    pandas = pytest.importorskip("pandas")
    samples = rollouts(kept=True)
    write(samples, tmp_path, max_tokens=128)
    trees = treepack.pack(samples, max_tokens=128)
    frame = pandas.read_parquet(tmp_path / "shard-00000.parquet")
    assert frame["num_tokens"].tolist() == [tree.num_tokens for tree in trees]
    for row, tree in zip(frame.itertuples(), trees, strict=True):
        assert np.array_equal(row.input_ids, tree.input_ids)
        assert np.array_equal(frame["terms.advantage"][row.Index], tree.terms["advantage"])
        assert np.array_equal(np.stack(frame["terms.table"][row.Index]), tree.terms["table"])


def test_treepack_itself_needs_no_pyarrow():
    code = "import sys, treepack; assert not {'pyarrow', 'torch', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pyarrow_one_line_says_how_to_get_it():
    code = "import sys; sys.modules['pyarrow'] = None; from treepack.offline import load"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("treepack.offline needs pyarrow: pip install 'treepack[cli]'")


def test_the_real_rollouts_come_back(tmp_path, treepack_data):
    with np.load(Path(treepack_data) / "data" / "lats_agent_tree.npz") as file:
        cuts, ids, mask = file["offsets"], file["tokens"].astype(np.int64), file["completion_mask"]
    samples = [{"input_ids": ids[a:b], "completion_mask": mask[a:b]} for a, b in pairwise(cuts)]
    write(samples, tmp_path, max_tokens=4096, window=30_000)
    for tree, other in zip(offline.load(tmp_path), packed_windows(samples, 30_000, max_tokens=4096), strict=True):
        assert_equal(tree, other)
