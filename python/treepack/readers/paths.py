"""Columns within columns: `trajectory[].tokens.prompt_ids` is, of each item of the list `trajectory`, what `tokens` has
under `prompt_ids`. A row -> a sample for each item, what stands above the list repeated for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .branches import as_branches
from .messages import decoded
from .source import ReadError, kind

_STEP = re.compile(r"([^.\[\]]+)((?:\[\])*)")


class Path(NamedTuple):
    """A column within a column."""

    text: str
    steps: tuple[tuple[str, int], ...]
    """The names on the way, and how many lists follow each."""

    @property
    def column(self) -> str:
        """The column of the file that it begins in."""
        return self.steps[0][0]

    @property
    def lists(self) -> int:
        """How many lists it goes through."""
        return sum(count for _, count in self.steps)


def is_path(name: str) -> bool:
    """Whether a name can only be a path, if there is no column of that name."""
    return "." in name or "[]" in name


def parse(text: str, option: str = "") -> Path:
    """A path from its text. ReadError for what is none; `option`: how it was given, for the message."""
    steps = [_STEP.fullmatch(step) for step in text.split(".")]
    if not all(steps):
        raise ReadError(
            f"{option or text}: {text!r} is no path; allowed are names with [] after each that holds a list, and dots "
            "between them, say trajectory[].tokens.prompt_ids"
        )
    return Path(text, tuple((step[1], len(step[2]) // 2) for step in steps if step))


def take(row: Mapping[str, Any], path: Path, where: str) -> Any:
    """What lies at the end of a path in a row; lists of it for lists on the way. None where something is missing.

    Raises ReadError for what is no list or no object. `where`: "FILE, line 3".
    """
    return _take(row, path, 0, where, "")


def expand(
    values: Mapping[str, Any], paths: Mapping[str, Path], where: str, named: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where in the row, {name: value}) for each sample of a row; of a row that has none, nothing.

    values: what `take` gives, by names of `paths`. Lists at the same depth are walked in step. where: "FILE, line 3";
    named: the path that says where in the row a sample is, if it is one of `paths`.

    Raises ReadError for lists that do not have the same number of items.
    """
    lists = {name: path.lists for name, path in paths.items()}
    ordered = sorted(paths, key=lambda name: name != named)
    yield from _spread({name: values[name] for name in ordered}, lists, paths, "", 0, where)


def _spread(
    values: dict[str, Any], lists: dict[str, int], paths: Mapping[str, Path], label: str, depth: int, where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    deeper = [name for name in values if lists[name] > depth]
    if not deeper:
        yield label, values
        return
    present = [name for name in deeper if values[name] is not None]
    if not present:
        return
    longest = max(present, key=lambda name: lists[name])
    count = len(values[longest])
    for name in present:
        if len(values[name]) != count:
            raise ReadError(
                f"{where}{label}: {paths[name].text} has {len(values[name])} items and {paths[longest].text} {count}; "
                "one of each for each sample is needed"
            )
    step = paths[longest].text.split("[]")[depth]
    for at in range(count):
        one = {
            name: value if name not in deeper else None if value is None else value[at]
            for name, value in values.items()
        }
        yield from _spread(one, lists, paths, f"{label or ', '}{step}[{at}]", depth + 1, where)


def _take(value: Any, path: Path, first: int, where: str, place: str) -> Any:
    """What lies at the end of a path, from its step `first` on; a list of it for each list on the way. None where
    something is missing. `place`: that of `value` in the row."""
    for at in range(first, len(path.steps)):
        name, lists = path.steps[at]
        value = decoded(value)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ReadError(
                f"{where}{place}: {path.text} looks for {name!r} in {kind(value)}; an object is needed there"
            )
        value = value.get(name)
        place = f"{place}.{name}" if place else f", {name}"
        if lists:
            return _items(value, lists, path, at + 1, where, place)
    return value


def _items(value: Any, lists: int, path: Path, rest: int, where: str, place: str) -> Any:
    value = as_branches(decoded(value), f"{where}{place}")
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        raise ReadError(f"{where}{place}: {path.text} goes through {kind(value)}; a list is needed there")
    if lists > 1:
        return [_items(x, lists - 1, path, rest, where, f"{place}[{n}]") for n, x in enumerate(value)]
    if rest == len(path.steps):
        return value
    return [_take(x, path, rest, where, f"{place}[{n}]") for n, x in enumerate(value)]
