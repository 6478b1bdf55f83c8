"""manifest.json: what a folder of shards holds, from what, and how far the run is that writes it.

It names finished shards alone, is replaced at once and never edited, so a run that is killed at any moment leaves a
folder that can be read up to the last shard and continued from there.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._core import PackError
from .options import differences
from .schema import LAYOUT_VERSION

NAME = "manifest.json"
_KIND = "treepack shards"


@dataclass(frozen=True)
class Shard:
    """A finished shard, and the counts of what it holds."""

    file: str
    trees: int
    first_row: int
    """The row of the input at which it starts."""
    rows: int
    samples: int
    skipped: int
    raw_tokens: int
    packed_tokens: int
    padding: int
    terms: int
    attention_pairs: int
    attention_pairs_alone: int
    bytes: int


@dataclass
class Manifest:
    """The manifest of a folder. `rows`: rows of the input in finished shards, or passed without a tree."""

    options: dict[str, Any]
    source: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)
    rows: int = 0
    skipped: int = 0
    """Samples in no shard, since they fit no tree."""
    finished: bool = False
    treepack: str = ""
    layout: int = LAYOUT_VERSION

    def write(self, folder: Path) -> None:
        """Replace the manifest of a folder."""
        text = json.dumps({"kind": _KIND, **asdict(self)}, indent=1)
        part = folder / f".{NAME}.part"
        with part.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / NAME)

    def continues(self, other: Manifest, folder: Path) -> None:
        """PackError where `other`, the run that is to continue this one, is of other options or another source."""
        if self.treepack != other.treepack or self.layout != other.layout:
            raise PackError(
                f"{folder} was begun by treepack {self.treepack} (layout {self.layout}), this is {other.treepack} "
                f"(layout {other.layout}): finish it with that version, or start over with --overwrite"
            )
        changed = differences(self.options, other.options)
        if changed:
            raise PackError(
                f"{folder} was begun with {changed}: give the same options, start over with --overwrite, or name "
                "another folder"
            )
        if self.source["fingerprint"] != other.source["fingerprint"]:
            raise PackError(
                f"{folder} was begun from {self.source['name']} as it was then, and {other.source['name']} is another "
                "input, has changed since or is read by other columns: start over with --overwrite, or name another "
                "folder"
            )

    @property
    def empty(self) -> bool:
        """Whether nothing was done yet."""
        return not (self.shards or self.rows or self.finished)


def check_kind(folder: Path) -> None:
    """PackError for a file of the manifest's name that is no manifest of shards, of whatever version."""
    path = folder / NAME
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("kind")
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError):
        kind = None
    if kind != _KIND:
        raise PackError(f"{path} was not written by treepack, and a manifest would replace it: name another folder")


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none. PackError for what is no manifest of this version."""
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PackError(f"{path}: it cannot be read: {error.strerror or error}") from None
    try:
        content = json.loads(text)
        if content.pop("kind") != _KIND:
            raise KeyError("kind")
        shards = [Shard(**shard) for shard in content.pop("shards")]
        outside = [shard.file for shard in shards if not _is_name(shard.file)]
        names = {one.name for one in fields(Manifest)} - {"shards"}
        found = Manifest(shards=shards, **{name: content[name] for name in names})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PackError(
            f"{path} is no manifest of treepack shards of layout {LAYOUT_VERSION}; name another folder"
        ) from None
    if outside:
        raise PackError(
            f"{path} names the shard {outside[0]!r}; allowed are files of this folder, by their names alone: pack "
            "again, or name another folder"
        )
    return found


def _is_name(file: Any) -> bool:
    """Whether a file lies in the folder that names it, and nowhere else on any system."""
    return isinstance(file, str) and re.fullmatch(r"[^/\\:\0]+", file) is not None and file not in (".", "..")
