"""A path, folder or glob -> the files it names, each opened in its format."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from . import jsonl
from .source import ReadError, Source, first_line

_ALLOWED = ".jsonl (.gz, .zst), .parquet, .npz, or a folder of these or of datasets.save_to_disk"


def open_sources(name: str) -> tuple[str, list[Source]]:
    """The format, "jsonl", "parquet", "npz" or "datasets", and the files by name; of several, those with samples.

    Raises:
        ReadError: nothing there, nothing that can be read, no samples.
    """
    format, files = _files(name)
    sources = [_open(format, file) for file in files]
    filled = [source for source in sources if source.size != 0]  # a shard of a filtered set may be empty
    if not filled:
        raise ReadError(f"{name}: it holds no samples; at least one is needed")
    return format, filled


def _files(name: str) -> tuple[str, list[Path]]:
    """Format and files of a path, folder or glob; files by name."""
    if not name:
        raise ReadError("the name of the file to read is empty; name a file, a folder or a glob")
    if name == "-":
        raise ReadError(
            "-: standard input cannot be read, since the head of a file is read first, for the columns; write it to a "
            "file: COMMAND > rollouts.jsonl && treepack inspect rollouts.jsonl"
        )
    path = Path(name)
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _format(path), [path]
    except OSError as error:
        raise ReadError(f"{name}: it cannot be read: {first_line(error)}") from None
    shards = sorted(Path(found) for found in glob.glob(name, recursive=True))
    shards = [shard for shard in shards if shard.is_file()]
    if not shards:
        if path.exists():
            raise ReadError(
                f"{name}: neither a file nor a folder; a pipe cannot be read, since its head is read first, for the "
                "columns"
            )
        raise ReadError(f"{name}: no such file or folder")
    return _one_format(name, shards)


def _folder(path: Path) -> tuple[str, list[Path]]:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise ReadError(f"{path}: a dataset with the splits {splits}; name one of them: {path}/SPLIT")
    shards = sorted(_below(path))
    # Next to data, .json files are what tools say about it (dataset_info.json, manifests).
    shards = [shard for shard in shards if shard.suffix.lower() != ".json"] or shards
    if not shards:
        raise ReadError(f"{path}: nothing to read in this folder or below; allowed are {_ALLOWED}")
    by_split = {split: shard for shard in reversed(shards) if (split := _split(shard.relative_to(path)))}
    if len(by_split) > 1:
        raise ReadError(
            f"{path}: it holds the splits {', '.join(sorted(by_split))}, which belong into no packing together; name "
            f"one, a folder or a glob of it: {by_split[max(by_split)]}"
        )
    return _one_format(str(path), shards)


def _below(path: Path) -> Iterator[Path]:
    """Files that can be read in a folder and in those below it, and folders of `save_to_disk`, which are one each."""
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield path
        return
    for entry in path.iterdir():
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _below(entry)
        elif entry.is_file() and _suffix(entry):
            yield entry


_SPLITS = re.compile(r"(train|test|validation|valid|val|dev|eval)(?:ing|uation)?(?:$|[-_.\d])", re.IGNORECASE)


def _split(shard: Path) -> str | None:
    """The split that the folders and the name of a file say it is of: "data/test-00000-of-00001.parquet"."""
    found = next(filter(None, map(_SPLITS.match, shard.parts)), None)
    return found[1].lower() if found else None


def _one_format(name: str, shards: list[Path]) -> tuple[str, list[Path]]:
    formats = sorted({_format(shard) for shard in shards})
    if len(formats) > 1:
        raise ReadError(f"{name}: files of more than one format ({', '.join(formats)}); name one, say {name}/*.parquet")
    return formats[0], shards


def _suffix(path: Path) -> str | None:
    if path.is_dir():
        return "datasets"
    name = path.name.lower()
    if name.endswith(jsonl.SUFFIXES):
        return "jsonl"
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    return "npz" if name.endswith(".npz") else None


def _format(path: Path) -> str:
    found = _suffix(path)
    if found is None:
        raise ReadError(f"{path}: unknown format {path.suffix or 'without a suffix'!r}; allowed are {_ALLOWED}")
    return found


def _open(format: str, path: Path) -> Source:
    try:
        if path.is_file():
            path.open("rb").close()  # a library would say in its own words that it may not be read
        if format == "jsonl":
            return jsonl.open_json(path)
        if format == "npz":
            from .npz import Npz

            return Npz(path)
        from .arrow import Dataset, Parquet

        return Dataset(path) if format == "datasets" else Parquet(path)
    except OSError as error:
        raise ReadError(f"{path}: it cannot be read: {first_line(error)}") from None
