"""A folder of shards is safe: from other files, from a second run, from a manifest that points elsewhere."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from helpers import says

from treepack import PackError

pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")

from treepack import offline
from treepack.offline import lock
from treepack.readers import ReadError

ROWS = [{"input_ids": [1, 2, 3, group], "completion_mask": [0, 1, 1, 1]} for group in range(20)]
OPTIONS = {"max_tokens": 16, "window": 16, "shard_tokens": 16}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# --- other files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "data.parquet", "shard-1.parquet.bak", "model", ".git", "config.json"])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_with_other_files_is_refused(file, tmp_path, name, options):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).mkdir() if name in ("model", ".git") else (out / name).write_text("mine")
    before = sorted(out.iterdir())
    with pytest.raises(PackError) as caught:
        offline.pack_file(file, out, **OPTIONS, **options)
    says(caught, f"{out} holds other files ({name})", "shards want a folder of their own")
    assert sorted(out.iterdir()) == before


def test_an_error_takes_a_new_folder_away_and_no_other(tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps({"input_ids": [1, -1]}))
    (tmp_path / "old").mkdir()
    for out in (tmp_path / "new" / "deep", tmp_path / "old" / "deep", tmp_path / "old"):
        with pytest.raises(ReadError, match=r"line 1: input_ids\[1\] is -1"):
            offline.pack_file(wrong, out, **OPTIONS)
        assert sorted(tmp_path.rglob("*")) == [tmp_path / "old", wrong]


def test_the_folder_of_the_input_is_refused(file, tmp_path):
    with pytest.raises(PackError, match=r"holds other files \(rollouts\.jsonl\)"):
        offline.pack_file(file, tmp_path, **OPTIONS)


def test_many_other_files_are_counted(file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for i in range(7):
        (out / f"{i}.txt").write_text("")
    with pytest.raises(PackError, match=r"\(0\.txt, 1\.txt, 2\.txt and 4 more\)"):
        offline.pack_file(file, out, **OPTIONS)


def test_what_systems_leave_is_no_other_file(file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".DS_Store").write_text("")
    offline.pack_file(file, out, **OPTIONS)
    assert len(offline.load(out))


# --- a second run ---------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_the_first_is_not_disturbed(file, tmp_path):
    out, refused = tmp_path / "out", []

    def second(now):
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(PackError) as caught:
                offline.pack_file(file, out, **OPTIONS, **options)
            refused.append(str(caught.value))

    offline.pack_file(file, out, **OPTIONS, progress=second)
    assert set(refused) == {f"{out}: another run is writing there now; wait until it is done, or name another folder"}
    offline.pack_file(file, tmp_path / "whole", **OPTIONS)
    assert listing(out) == listing(tmp_path / "whole")  # and no lock file


PROGRAM = """
import sys
from treepack import offline
def progress(now):
    print(now.shards, flush=True)
    if now.shards == 2:
        sys.stdin.read()
offline.pack_file({file!r}, {out!r}, progress=progress, **{options!r})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_another_process_is_refused_and_a_killed_one_leaves_no_lock(file, tmp_path):
    out = tmp_path / "out"
    code = PROGRAM.format(file=str(file), out=str(out), options=OPTIONS)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if line.strip() == b"2":
                break
        with pytest.raises(PackError, match="another run is writing there now"):
            offline.pack_file(file, out, **OPTIONS, resume=True)
        process.send_signal(signal.SIGKILL)
    assert (out / lock.NAME).exists()  # the file is there; the lock is gone
    offline.pack_file(file, out, **OPTIONS, resume=True)
    offline.pack_file(file, tmp_path / "whole", **OPTIONS)
    assert listing(out) == listing(tmp_path / "whole")


def _hold(folder, turns, inside, failed):
    from pathlib import Path

    for _ in range(turns):
        try:
            with lock.locked(Path(folder)):
                with inside.get_lock():
                    inside.value += 1
                    if inside.value > 1:
                        failed.value = 1
                with inside.get_lock():
                    inside.value -= 1
        except PackError:
            pass


@pytest.mark.skipif(sys.platform == "win32", reason="the lock file stays there")
def test_no_two_hold_a_lock_however_often_it_changes_hands(tmp_path):
    context = multiprocessing.get_context("spawn")
    inside, failed = context.Value("i", 0), context.Value("i", 0)
    workers = [context.Process(target=_hold, args=(str(tmp_path), 2000, inside, failed)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert failed.value == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_finished_folder_that_cannot_be_written_to_is_still_finished(file, tmp_path):
    out = tmp_path / "out"
    first = offline.pack_file(file, out, **OPTIONS)
    out.chmod(0o500)
    try:
        assert offline.pack_file(file, out, **OPTIONS, resume=True) == first
    finally:
        out.chmod(0o700)


# --- a finished run, a manifest that points elsewhere ---------------------------------------------------------------


def test_resuming_a_finished_run_says_so(file, tmp_path, capsys):
    pytest.importorskip("typer", reason="the command line needs treepack[cli]")
    from treepack.cli.commands import run

    def called(*more):
        command = ["pack", str(file), "--out", str(tmp_path / "out"), "--max-tokens", "16", *more]
        assert run(command) == 0
        return capsys.readouterr().out

    said = "nothing was packed: {} holds this packing, finished by an earlier run".format(tmp_path / "out")
    assert said not in called("--resume")
    assert said in called("--resume")
    assert json.loads(called("--resume", "--json"))["already_finished"] is True
    assert json.loads(called("--overwrite", "--json"))["already_finished"] is False


@pytest.mark.parametrize(
    "name", ["../{}", "/{}", "below/{}", "..", ".", "", "..\\{}", "C:{}", "{}\0", 7, None, ["x"], "./{}"]
)
def test_a_manifest_that_names_a_file_outside_of_its_folder_is_refused(file, tmp_path, name):
    out = tmp_path / "out"
    offline.pack_file(file, out, **OPTIONS)
    content = json.loads((out / "manifest.json").read_text())
    shard = content["shards"][0]["file"]
    (tmp_path / shard).write_bytes((out / shard).read_bytes())
    named = name.format(shard) if isinstance(name, str) else name
    named = str(tmp_path / shard) if name == "/{}" else named
    content["shards"][0]["file"] = named
    (out / "manifest.json").write_text(json.dumps(content))
    for call in (lambda: offline.load(out), lambda: offline.pack_file(file, out, **OPTIONS, resume=True)):
        with pytest.raises(PackError) as caught:
            call()
        says(caught, f"names the shard {named!r}; allowed are files of this folder, by their names alone")


def test_a_shard_may_be_a_link(file, tmp_path):
    """As in the cache of the hub, where files are links to blobs."""
    out = tmp_path / "out"
    offline.pack_file(file, out, **OPTIONS)
    blob = out / "shard-00000.parquet"
    blob.rename(tmp_path / "blob")
    blob.symlink_to(tmp_path / "blob")
    assert len(list(offline.load(out))) == len(offline.load(out))
