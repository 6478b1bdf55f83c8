"""The loader: every tree once over all ranks, the same number for each, lazily, through worker processes."""

import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers import says
from offline_rows import ListRows, assert_equal, rollouts

import treepack
from treepack import PackError

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")

from treepack import offline  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Several shards of several row groups."""
    out = tmp_path_factory.mktemp("packed")
    options = offline.Options(max_tokens=96, window=400, shard_tokens=300)
    offline.write(ListRows(rollouts(groups=20, kept=True)), out, options)
    return out


def image(tree):
    return tree.buffer.tobytes()


def numbers(trees):
    return sorted(int(x) for i in range(len(trees)) for x in trees.sample_numbers(i))


def test_it_is_a_sequence(folder):
    trees = offline.load(folder)
    assert len(trees) > 10
    assert [image(tree) for tree in trees] == [image(trees[i]) for i in range(len(trees))]
    assert image(trees[-1]) == image(trees[len(trees) - 1])
    assert [image(tree) for tree in trees[2:8:3]] == [image(trees[2]), image(trees[5])]
    assert image(trees[np.int64(3)]) == image(trees[3])
    for index in (len(trees), -len(trees) - 1):
        for ask in (trees.__getitem__, trees.sample_numbers):
            with pytest.raises(
                IndexError, match=f"^tree {index} is asked for; there are {len(trees)}, counted from 0$"
            ):
                ask(index)
    with pytest.raises(AttributeError, match=r"'to' is of a tree, and Trees is a sequence of \d+: loop over it"):
        trees.to("cpu")
    assert repr(trees).startswith(f"Trees({len(trees)} trees in ")


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_rank_has_the_same_number_and_every_sample_is_there_once(folder, world_size, seed):
    ranks = [offline.load(folder, shuffle_seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)]
    total = len(offline.load(folder))
    assert {len(trees) for trees in ranks} == {-(-total // world_size)}
    assert sorted(x for trees in ranks for x in numbers(trees)) == list(range(80))
    dummies = [tree for trees in ranks for tree in trees if len(tree.sample_index) == 0]
    assert len(dummies) == sum(trees.dummies for trees in ranks) == -total % world_size
    # In step i all ranks have neighbours of the order, and a dummy comes at the very end.
    for step in range(len(ranks[0]) - 1):
        assert all(len(trees[step].sample_index) for trees in ranks)


@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("branching", ["token", "label"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_dummy_is_that_of_pack(tmp_path, multiple, branching, kept):
    samples = rollouts(groups=1, kept=kept)
    options = offline.Options(max_tokens=96, branching=branching, pad_to_multiple_of=multiple)
    offline.write(ListRows(samples), tmp_path, options)
    trees = offline.load(tmp_path, rank=1, world_size=2)
    (dummy,) = trees
    _, expected = treepack.pack(samples[:1], ranks=2, max_tokens=96, branching=branching, pad_to_multiple_of=multiple)
    assert_equal(dummy, expected)
    assert trees.dummies == 1
    assert numbers(trees) == []


def test_a_seed_is_an_order(folder):
    orders = [[image(tree) for tree in offline.load(folder, shuffle_seed=seed)] for seed in (1, 1, 2, None)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(orders[3])


def test_it_reads_a_row_group_for_a_tree_and_no_more(tmp_path):
    """Trees of usual size lie in a row group each; small ones in groups of 2^14 positions."""
    options = offline.Options(max_tokens=20_000)
    samples = [{"input_ids": np.arange(at, at + 18_000)} for at in range(3)]
    offline.write(ListRows(samples + [{"input_ids": [i]} for i in range(50_000, 50_100)]), tmp_path, options)
    metadata = pq.read_metadata(tmp_path / "shard-00000.parquet")
    assert metadata.num_row_groups == len(offline.load(tmp_path)) == 3
    options = offline.Options(max_tokens=64)
    offline.write(ListRows(rollouts(groups=100)), tmp_path, options, overwrite=True)
    trees = offline.load(tmp_path)
    metadata = pq.read_metadata(tmp_path / "shard-00000.parquet")
    tokens = sum(tree.num_tokens for tree in trees)
    assert len(trees) > 50
    assert metadata.num_row_groups == 1
    assert tokens < 2**14


def test_a_tree_does_not_keep_its_file(folder):
    tree = offline.load(folder)[3]
    assert tree.buffer.base is not None
    assert tree.buffer.base.nbytes <= tree.buffer.nbytes + 64
    assert tree.buffer.ctypes.data % 64 == 0
    tree.input_ids[0] = 5  # a buffer of its own: it may be written


def test_it_pickles_by_name_and_reads_anew(folder):
    trees = offline.load(folder, shuffle_seed=3, rank=1, world_size=3)
    first = image(trees[0])
    pickled = pickle.dumps(trees)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled)
    assert [image(tree) for tree in again] == [image(tree) for tree in trees]
    assert image(trees[0]) == first


def test_more_shards_than_open_files(tmp_path):
    options = offline.Options(max_tokens=96, window=60, shard_tokens=30)
    manifest = offline.write(ListRows(rollouts(groups=12)), tmp_path, options)
    assert len(manifest.shards) > 16
    trees = offline.load(tmp_path, shuffle_seed=0)
    assert numbers(trees) == list(range(48))
    assert len(trees._open) == 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_opens_its_own_files(folder):
    """Run in a process of its own, since this one may have threads."""
    code = """
        import os, sys
        from treepack import offline
        trees = offline.load(sys.argv[1])
        first, files = trees[0].buffer.tobytes(), list(trees._open.values())
        read, write = os.pipe()
        if os.fork() == 0:
            same = trees[0].buffer.tobytes() == first and list(trees._open.values()) != files
            os.write(write, b"1" if same else b"0")
            os._exit(0)
        assert os.read(read, 1) == b"1"
        os.wait()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(folder)], check=True)


def test_a_torch_data_loader_with_workers(folder):
    torch = pytest.importorskip("torch")
    trees = offline.load(folder, shuffle_seed=7)
    loader = torch.utils.data.DataLoader(trees, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    got = list(loader)
    assert len(got) == len(trees)
    for tree, expected in zip(got, trees, strict=True):
        assert isinstance(tree, treepack.PackedTree)
        assert_equal(tree, expected)
    moved = got[0].to("cpu")
    assert moved.input_ids.tolist() == trees[0].input_ids.tolist()


def test_loading_needs_no_torch(folder):
    code = "import sys; from treepack import offline; offline.load(sys.argv[1])[0]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"world_size": 0}, ["world_size is 0", "1 or more"]),
        ({"rank": 2, "world_size": 2}, ["rank is 2", "0 to 1"]),
        ({"rank": -1}, ["rank is -1", "0 to 0"]),
        ({"shuffle_seed": -1}, ["shuffle_seed is -1", "0 or more"]),
        ({"shuffle_seed": "x"}, ["shuffle_seed is 'x'", "integer"]),
    ],
)
def test_arguments(folder, arguments, parts):
    with pytest.raises((PackError, TypeError)) as error:
        offline.load(folder, **arguments)
    says(error, *parts)


def test_no_shards(tmp_path):
    for path, has in ((tmp_path, "holds no shards"), (tmp_path / "none", "is no folder")):
        with pytest.raises(PackError) as error:
            offline.load(path)
        says(error, has, "treepack pack FILE --out")


def copy(folder, out, **changed):
    for path in folder.iterdir():
        text = changed.get(path.name, path.read_bytes())
        if text is not None:
            (out / path.name).write_bytes(text)


def test_a_shard_that_is_gone_or_cut(folder, tmp_path):
    copy(folder, tmp_path)
    (tmp_path / "shard-00001.parquet").write_bytes(b"cut")
    with pytest.raises(PackError) as error:
        offline.load(tmp_path)
    says(error, "shard-00001.parquet has 3 bytes", "pack again")
    (tmp_path / "shard-00001.parquet").unlink()
    with pytest.raises(PackError) as error:
        offline.load(tmp_path)
    says(error, "shard-00001.parquet is missing")


def test_shards_that_went_bad_after_opening(folder, tmp_path):
    copy(folder, tmp_path)
    trees = offline.load(tmp_path)
    path = tmp_path / "shard-00000.parquet"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(PackError) as error:
        trees[0]
    says(error, "shard-00000.parquet", "cannot be read")
    copy(folder, tmp_path)
    trees = offline.load(tmp_path)
    data = bytearray(path.read_bytes())
    data[300:900] = b"\xff" * 600  # the footer is whole
    path.write_bytes(data)
    with pytest.raises(PackError) as error:
        list(trees)
    says(error, "shard-00000.parquet, row ", "it cannot be read", "pack again")


def test_another_layout(folder, tmp_path):
    manifest = (folder / "manifest.json").read_text().replace('"layout": 1', '"layout": 2')
    copy(folder, tmp_path, **{"manifest.json": manifest.encode()})
    with pytest.raises(PackError) as error:
        offline.load(tmp_path)
    says(error, "layout 2", "layout 1")


def test_parquet_that_holds_no_trees(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), tmp_path / "a.parquet")
    with pytest.raises(PackError) as error:
        offline.load(tmp_path)
    says(error, "a.parquet has no column 'position_ids'", "input_ids, position_ids, parent")
    (tmp_path / "a.parquet").write_bytes(b"text")
    with pytest.raises(PackError) as error:
        offline.load(tmp_path)
    says(error, "a.parquet: not a Parquet file")


def test_tables_that_hold_no_trees(folder):
    table = pq.read_table(folder / "shard-00000.parquet")
    at = table.schema.get_field_index("parent")
    text = table.set_column(at, "parent", pa.array([["x"]] * len(table)))
    with pytest.raises(PackError) as error:
        offline.trees_of(text)
    says(error, "column 'parent' has type list<", "list<int32> is needed")
    nothing = table.set_column(at, "parent", pa.nulls(len(table), pa.list_(pa.int32())))
    with pytest.raises(PackError) as error:
        offline.trees_of(nothing)
    says(error, "row 0: column 'parent' is null")
    holes = table.set_column(at, "parent", pa.array([[None]] * len(table), pa.list_(pa.int32())))
    with pytest.raises(PackError) as error:
        offline.trees_of(holes)
    says(error, "nulls")


def test_a_table_in_pieces_and_slices(folder):
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])
    expected = list(offline.load(folder))
    assert table.column("input_ids").num_chunks > 1
    for tree, other in zip(offline.trees_of(table), expected, strict=True):
        assert_equal(tree, other)
    for tree, other in zip(offline.trees_of(table.slice(3, 5)), expected[3:8], strict=True):
        assert_equal(tree, other)
    large = table.set_column(0, "first_sample", pa.nulls(len(table), pa.int64()))
    for name in ("input_ids", "terms.table"):
        kind = pa.large_list(table.schema.field(name).type.value_type)
        large = large.set_column(large.schema.get_field_index(name), name, large.column(name).cast(kind))
    for tree, other in zip(offline.trees_of(large), expected, strict=True):
        assert_equal(tree, other)
