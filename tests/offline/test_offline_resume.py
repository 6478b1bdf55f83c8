"""A packing that is killed, wherever that is, continues to the same bytes; what has changed since is refused."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import says
from offline_rows import ListRows, contents, rollouts

from treepack import PackError

pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")

from treepack import offline

OPTIONS = {"max_tokens": 128, "window": 400, "shard_tokens": 300}


class Stopped(Exception):
    """What a progress callback raises to stop a run."""


def write(folder, samples=None, progress=None, size=7, fingerprint="rows", resume=False, overwrite=False, **options):
    rows = ListRows(rollouts(groups=20) if samples is None else samples, size, fingerprint)
    given = offline.Options(**{**OPTIONS, **options})
    return offline.write(rows, folder, given, resume=resume, overwrite=overwrite, progress=progress)


def stop_at(call):
    """A callback that raises at this call."""
    calls = iter(range(10**6))

    def progress(now):
        if next(calls) == call:
            raise Stopped

    return progress


@pytest.mark.parametrize("placement", ["shared", "first_fit", "stream"])
def test_stopped_at_every_point_it_continues_to_the_same_bytes(tmp_path, placement):
    whole, seen = tmp_path / "whole", []
    write(whole, placement=placement, progress=seen.append)
    expected = contents(whole)
    assert len(expected) >= 4  # shards and the manifest
    for call in range(len(seen)):
        folder = tmp_path / str(call)
        with pytest.raises(Stopped):
            write(folder, placement=placement, progress=stop_at(call))
        left = contents(folder)
        # Nothing half-written: finished shards, as they will be, and their manifest.
        assert all(left[name] == expected[name] for name in left if name != "manifest.json")
        assert not [name for name in left if name.startswith(".")]
        # Batches cut elsewhere change nothing, since windows do not depend on them.
        write(folder, placement=placement, resume=True, size=3)
        assert contents(folder) == expected


def test_stopped_again_and_again(tmp_path):
    write(tmp_path / "whole")
    for _ in range(40):
        try:
            write(tmp_path / "often", progress=stop_at(5), resume=True)
            break
        except Stopped:
            pass
    else:
        pytest.fail("a run that is stopped at its sixth step does not get on")
    assert contents(tmp_path / "often") == contents(tmp_path / "whole")


def test_what_a_killed_run_leaves_is_cleared_away(tmp_path):
    write(tmp_path / "whole")
    with pytest.raises(Stopped):
        write(tmp_path / "killed", progress=stop_at(5))
    count = len(list((tmp_path / "killed").glob("*.parquet")))
    assert count >= 1
    # Killed between the rename of a shard and its entry into the manifest, and in the middle of another file.
    name = f"shard-{count:05}.parquet"
    (tmp_path / "killed" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    (tmp_path / "killed" / f".shard-{count + 1:05}.parquet.part").write_bytes(b"half")
    (tmp_path / "killed" / ".manifest.json.part").write_bytes(b"half")
    write(tmp_path / "killed", resume=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


PROGRAM = """
    import sys
    sys.path[:0] = {tests!r}
    from test_offline_resume import write

    def progress(now):
        print(now.shards, flush=True)
        if now.shards >= 1 and {wait}:
            sys.stdin.read()  # until killed

    write({folder!r}, progress=progress, resume=True)
"""


def test_a_killed_process(tmp_path):
    def start(wait):
        code = textwrap.dedent(PROGRAM).format(
            tests=list(map(str, Path(__file__).parents[:2])), folder=str(tmp_path / "killed"), wait=wait
        )
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    with start(wait=True) as process:
        until = time.monotonic() + 60
        while process.stdout.readline().strip() != "1":
            assert time.monotonic() < until, "no shard was finished"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not json.loads((tmp_path / "killed" / "manifest.json").read_text())["finished"]
    with pytest.raises(PackError) as error:
        offline.load(tmp_path / "killed")
    says(error, "unfinished packing", "--resume")
    with start(wait=False) as process:
        process.communicate()
    assert process.returncode == 0
    write(tmp_path / "whole")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_finished_packing_is_left_alone(tmp_path):
    first = write(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = write(tmp_path, resume=True)
    assert again == first
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(PackError) as error:
        write(tmp_path)
    says(error, "holds a packing (finished)", "--resume", "--overwrite")


def test_an_unfinished_packing_needs_a_word(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path, progress=stop_at(5))
    with pytest.raises(PackError) as error:
        write(tmp_path)
    says(error, "begun, with", "--resume", "--overwrite")


def test_other_options(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path, progress=stop_at(5))
    with pytest.raises(PackError) as error:
        write(tmp_path, resume=True, max_tokens=256, order="first_seen")
    says(error, "max_tokens 128 (now 256)", "order 'largest_first' (now 'first_seen')", "--overwrite")


def test_another_input(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path, progress=stop_at(5))
    with pytest.raises(PackError) as error:
        write(tmp_path, resume=True, fingerprint="other rows")
    says(error, "has changed since", "--overwrite")


def test_a_file_that_changed(tmp_path):
    source = tmp_path / "rollouts.jsonl"
    source.write_text("\n".join(json.dumps({"input_ids": [i, 1, 2]}) for i in range(30)) + "\n")
    with pytest.raises(Stopped):
        offline.pack_file(source, tmp_path / "out", max_tokens=8, window=9, shard_tokens=18, progress=stop_at(5))
    with source.open("a") as file:
        file.write(json.dumps({"input_ids": [7]}) + "\n")
    with pytest.raises(PackError) as error:
        offline.pack_file(source, tmp_path / "out", max_tokens=8, window=9, shard_tokens=18, resume=True)
    says(error, "rollouts.jsonl", "has changed since")
    manifest = offline.pack_file(source, tmp_path / "out", max_tokens=8, window=9, shard_tokens=18, overwrite=True)
    assert manifest.rows == 31


def test_another_version(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path, progress=stop_at(5))
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "treepack": "0.0.1"}))
    with pytest.raises(PackError) as error:
        write(tmp_path, resume=True)
    says(error, "treepack 0.0.1", "--overwrite")


def test_a_shard_that_is_gone(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path, progress=stop_at(5))
    (tmp_path / "shard-00000.parquet").unlink()
    with pytest.raises(PackError) as error:
        write(tmp_path, resume=True)
    says(error, "shard-00000.parquet is missing or was changed", "--overwrite")


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "else"}', '{"kind": "treepack shards", "shards": [1]}'])
def test_a_manifest_that_is_none(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    for call in (lambda: write(tmp_path, resume=True), lambda: offline.load(tmp_path)):
        with pytest.raises(PackError) as error:
            call()
        says(error, "manifest.json is no manifest", "another folder")


def test_shards_without_a_manifest(tmp_path):
    write(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(PackError) as error:
        write(tmp_path)
    says(error, "holds shards without a manifest.json", "--overwrite")
    write(tmp_path, overwrite=True)


def test_overwrite_leaves_other_files(tmp_path):
    write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    manifest = write(tmp_path, samples=rollouts(groups=2), overwrite=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt", "manifest.json", *(shard.file for shard in manifest.shards)}


def test_resume_and_overwrite(tmp_path):
    with pytest.raises(PackError) as error:
        write(tmp_path, resume=True, overwrite=True)
    says(error, "resume and overwrite")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError) as error:
        write(tmp_path / "file" / "out")
    says(error, "no folder can be made there")


def test_the_same_run_twice_gives_the_same_bytes(tmp_path):
    write(tmp_path / "a", samples=rollouts(kept=True))
    write(tmp_path / "b", samples=rollouts(kept=True))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert sum(np.frombuffer(data, np.uint8).size for data in contents(tmp_path / "a").values()) > 0
