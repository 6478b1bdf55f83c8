"""Offline packing and the files around it: what is not ours stays, any name of a folder, a disk that is full."""

import errno
import json

import pytest
from helpers import says
from offline_rows import ListRows, contents, rollouts

from treepack import PackError

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")

from treepack import offline  # noqa: E402
from treepack.offline import writer  # noqa: E402

OPTIONS = {"max_tokens": 128, "window": 400, "shard_tokens": 300}


def write(folder, **options):
    return offline.write(ListRows(rollouts(groups=20)), folder, offline.Options(**OPTIONS), **options)


def theirs(path, how):
    if how == "parquet":
        pq.write_table(pa.table({"input_ids": [[1, 2]]}), path)
    else:
        path.write_bytes(b"theirs")
    return path.read_bytes()


@pytest.mark.parametrize("how", ["parquet", "bytes"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_shard_of_somebody_else_is_never_replaced(tmp_path, how, options):
    """`shard-00000.parquet` is a usual name of data sets, and may be the very file that is packed."""
    path = tmp_path / "shard-00000.parquet"
    before = theirs(path, how)
    with pytest.raises(PackError) as error:
        write(tmp_path, **options)
    says(error, "shard-00000.parquet was not written by treepack", "another folder")
    assert contents(tmp_path) == {path.name: before}


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_nor_one_that_lies_beside_ours(tmp_path, options):
    shards = len(write(tmp_path).shards)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    before = theirs(tmp_path / "shard-train.parquet", "parquet")
    with pytest.raises(PackError, match=r"shard-train\.parquet was not written by treepack"):
        write(tmp_path, **options)
    assert (tmp_path / "shard-train.parquet").read_bytes() == before
    assert len(list(tmp_path.glob("shard-0*.parquet"))) == shards


def test_the_input_is_not_replaced(tmp_path):
    path = tmp_path / "shard-00000.parquet"
    before = theirs(path, "parquet")
    with pytest.raises(PackError):
        offline.pack_file(path, tmp_path, max_tokens=8, overwrite=True)
    assert contents(tmp_path) == {path.name: before}


@pytest.mark.parametrize("text", ["{}", "not JSON", "[1]", '{"kind": "another tool"}'])
def test_a_manifest_of_somebody_else_is_never_replaced(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(PackError) as error:
        write(tmp_path, overwrite=True)
    says(error, "manifest.json was not written by treepack", "another folder")
    assert (tmp_path / "manifest.json").read_text() == text


def test_overwrite_takes_shards_of_any_version(tmp_path):
    write(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "layout": 99, "more": 1}))
    write(tmp_path, overwrite=True)
    assert len(offline.load(tmp_path)) == sum(shard["trees"] for shard in manifest["shards"])


@pytest.mark.parametrize("name", ["run:1", "file:x", "s3:y", "with space", "ünï", "50%", "a?b#c", "[x]"])
def test_any_name_of_a_folder(tmp_path, monkeypatch, name):
    """pyarrow takes some names for addresses; relative ones are what people write."""
    monkeypatch.chdir(tmp_path)
    manifest = write(name)
    assert len(offline.load(name)[:]) == sum(shard.trees for shard in manifest.shards) > 0
    assert write(name, resume=True).finished
    (tmp_path / name / "manifest.json").unlink()
    assert len(offline.load(name)[:]) > 0


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_full_disk(tmp_path, monkeypatch, after):
    """One message that names the file; what is finished stays, and the run goes on to the same bytes."""
    real, calls = writer.parquet_writer, []

    class Full:
        def __init__(self, file, schema):
            self._writer = real(file, schema)

        def write_table(self, table, **options):
            calls.append(table)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._writer.write_table(table, **options)

        def close(self):
            self._writer.close()

    monkeypatch.setattr(writer, "parquet_writer", Full)
    with pytest.raises(PackError) as error:
        write(tmp_path / "out")
    says(error, ".shard-0000", "it cannot be written: No space left on device", "--resume")
    names = set(contents(tmp_path / "out"))
    assert not [name for name in names if name.startswith(".")]
    assert ("manifest.json" in names) == ("shard-00000.parquet" in names)
    monkeypatch.setattr(writer, "parquet_writer", real)
    write(tmp_path / "out", resume=True)
    write(tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_that_is_read_only(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("treepack.offline.manifest.os.replace", refuse)
    with pytest.raises(PackError) as error:
        write(tmp_path)
    says(error, "manifest.json: it cannot be written: Permission denied")
