"""Trees to one page: numbers as JSON, pictures as PNG, with the template, style and script of assets/ around them.

The page is at most `PAGE_BYTES` long, whatever is packed: it draws the first `TREES` trees, which share `SEGMENTS` bars
and `PICTURE_BYTES` of pictures; the totals and the histograms are those of all trees. It says what it leaves out.
"""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from .._core import PackError
from .._optional import require
from .._version import __version__
from ..inputs.account import ColumnAccount
from ..tree.packed import Packed
from ..tree.tree import PackedTree
from .details import Details, groups_of, made_with
from .drawn import drawn_tree
from .groups import Groups, lines_of
from .histograms import Histogram, length_histogram, sharing_histogram
from .samples import Given, valid
from .texts import checked
from .totals import Totals, Trees, totals_of, trees_of

if TYPE_CHECKING:
    from jinja2 import Template

#: No page is longer than this.
PAGE_BYTES = 3_000_000
#: Trees that are drawn.
TREES = 32
#: Segments that are drawn as bars of their own, over all drawn trees.
SEGMENTS = 16_000
#: Letters of a title.
TITLE = 200
#: Groups that have a line of their own.
GROUPS = 100
#: Letters of a line about the columns of the input.
LINE = 2000

SCRIPTS = ("format.js", "bars.js", "samples.js", "icicle.js", "search.js", "pictures.js", "charts.js", "main.js")


@dataclass(frozen=True, repr=False)
class Report:
    """A page about a packing. In a notebook it shows itself."""

    html: str
    """The whole page: it loads nothing from anywhere."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, all or nothing: a temporary file beside it is renamed once it is whole.

        Raises:
            PackError: the file cannot be written there.
        """
        target = Path(path)
        if not target.name:
            raise PackError(f"the report cannot be written to {os.fspath(path)!r}: name a file, say report.html")
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            try:
                beside.write_text(self.html, encoding="utf-8")
                beside.replace(target)
            except BaseException:
                with suppress(OSError):
                    beside.unlink()
                raise
        except OSError as error:
            raise PackError(
                f"the report cannot be written to {target}: {error.strerror}; name a file in a folder that is there "
                "and can be written to"
            ) from error

    def _repr_html_(self) -> str:
        """The page in a frame that can reach neither the notebook nor the network."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escape(self.html)}" title="treepack report" '
            'style="width: 100%; height: 860px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({len(self.html.encode()):,} bytes of HTML; .save(path) writes them)"


@overload
def report(
    packed: Packed,
    *,
    title: str | None = None,
    columns: ColumnAccount | None = None,
    samples: Given | None = None,
    tokenizer: Any = None,
    details: Details | None = None,
) -> Report: ...
@overload
def report(
    packed: PackedTree,
    *,
    title: str | None = None,
    columns: ColumnAccount | None = None,
    samples: Given | None = None,
    tokenizer: Any = None,
    details: Details | None = None,
) -> Report: ...
@overload
def report(
    packed: Sequence[PackedTree],
    *,
    title: str | None = None,
    columns: ColumnAccount | None = None,
    samples: Given | None = None,
    tokenizer: Any = None,
    details: Details | None = None,
) -> Report: ...
@overload
def report(
    packed: Sequence[Sequence[PackedTree]],
    *,
    title: str | None = None,
    columns: ColumnAccount | None = None,
    samples: Given | None = None,
    tokenizer: Any = None,
    details: Details | None = None,
) -> Report: ...
def report(
    packed: Trees,
    *,
    title: str | None = None,
    columns: ColumnAccount | None = None,
    samples: Given | None = None,
    tokenizer: Any = None,
    details: Details | None = None,
) -> Report:
    """A page that shows what was packed: the trees as nested bars, attention masks, tiles, lengths and sharing.

    Args:
        packed: what `pack` returns, or trees of it (on any device), or micro-batches of a `Packer`.
        title: the page's headline, as plain text.
        columns: what became of the columns of the input, say `rollouts.account` of `treepack.readers.open_rollouts`.
        samples: a dict of values for each sample, by its number in what was packed: the row of a file, say. The page
            shows them beside the columns that were packed, and finds samples by them.
        tokenizer: with a `decode(ids)`; the page then shows the text of segments.
        details: further tables for the end of the page: title -> rows of name, value and note.

    Raises:
        PackError: `packed` is something else, or the tokenizer cannot decode its ids.
        ModuleNotFoundError: jinja2 is not installed.

    >>> import treepack
    >>> treepack.report(treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=8), title="one sample").html[:15]
    '<!doctype html>'
    """
    if title is not None and not isinstance(title, str):
        raise PackError(f"report: title is a {type(title).__name__}; it has to be a string")
    tokenizer = checked(tokenizer)
    template = _template()
    trees = trees_of(packed)
    totals = totals_of(packed, trees)
    title = valid(title or "What was packed")[:TITLE]
    drawn = trees[:TREES]
    bars = _shares([len(tree.segment_parent) for tree in drawn], SEGMENTS)
    data = {
        "trees": [
            drawn_tree(tree, most, len(drawn), samples, tokenizer) for tree, most in zip(drawn, bars, strict=True)
        ],
        "lengths": _histogram(length_histogram(trees)),
        "sharing": _histogram(sharing_histogram(trees)),
    }
    groups = groups_of(trees, samples)
    tables = {"Made with": made_with(packed), **(details or {})}
    lines = [] if columns is None else [_shortened(valid(line)) for line in columns.lines()]
    return Report(_render(template, title, totals, len(drawn), data, lines, groups, tables))


def _template() -> Template:
    """The page before anything is filled in."""
    require("jinja2", "treepack.report", "cli")
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    return environment.from_string(_asset("page.html.j2"))


def _shortened(line: str) -> str:
    return line if len(line) <= LINE else f"{line[:LINE]}..."


def _render(
    template: Template,
    title: str,
    totals: Totals,
    drawn: int,
    data: dict[str, Any],
    columns: Sequence[str],
    groups: Groups,
    tables: Details,
) -> str:
    """The template with everything in place. Only the page's own style and script can run: it names their hashes."""
    style, script = _asset("report.css"), "".join(map(_asset, SCRIPTS))
    return template.render(
        title=title,
        totals=totals,
        drawn=drawn,
        data=_packed(data),
        columns=columns,
        group_rows=lines_of(numbers) if (numbers := groups.finish()) else [],
        groups=groups.largest(GROUPS),
        more_groups=max(len(groups) - GROUPS, 0),
        tables={
            valid(title): [tuple(_shortened(valid(cell)) for cell in row) for row in rows]
            for title, rows in tables.items()
        },
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        version=__version__,
    )


def _packed(data: dict[str, Any]) -> str:
    """JSON, deflated, in base64: a third of its size, and no text in it can end the script element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return _base64(zlib.compress(text.encode(), 9))


def _shares(wants: Sequence[int], total: int) -> list[int]:
    """`total` shared out: nobody gets more than it wants, and what some leave goes to the others."""
    given = [0] * len(wants)
    for done, place in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        given[place] = min(wants[place], total // (len(wants) - done))
        total -= given[place]
    return given


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {**histogram._asdict(), "values": [round(value, 4) for value in histogram.values]}


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + _base64(sha256(text.encode()).digest())


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
