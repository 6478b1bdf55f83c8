"""Trees to one page: numbers as JSON, pictures as PNG, with the template, style and script of assets/ around them.

The page is at most `PAGE_BYTES` long, whatever is packed: it draws the first `TREES` trees, which share `SEGMENTS` bars
and `PICTURE_BYTES` of pictures; the totals and the histograms are those of all trees. It says what it leaves out.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .._core import PackError
from .._optional import require
from .._version import __version__
from ..inputs.account import ColumnAccount
from ..tree.packed import Packed
from ..tree.tree import HostTree, PackedTree
from .bars import bars_of
from .histograms import Histogram, length_histogram, sharing_histogram
from .pictures import grey, mask_of, tiles_of
from .png import png
from .segments import segments_of
from .totals import Totals, Trees, totals_of, trees_of

if TYPE_CHECKING:
    from jinja2 import Template

#: No page is longer than this.
PAGE_BYTES = 3_000_000
#: Trees that are drawn.
TREES = 32
#: Segments that are drawn as bars of their own, over all drawn trees.
SEGMENTS = 16_000
#: Runs of prompt and trained tokens beyond one a bar, over all drawn trees.
RUNS = 24_000
#: Pictures of masks and tiles, over all drawn trees, before base64.
PICTURE_BYTES = 480_000
#: Pixels along one side of a picture, at most.
PIXELS = 512
#: Letters of a title and names of columns that are shown.
TITLE, COLUMNS = 200, 40
#: Letters of a line about the columns of the input.
LINE = 2000

SCRIPTS = ("format.js", "bars.js", "icicle.js", "pictures.js", "charts.js", "main.js")


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
def report(packed: Packed, *, title: str | None = None, columns: ColumnAccount | None = None) -> Report: ...
@overload
def report(packed: PackedTree, *, title: str | None = None, columns: ColumnAccount | None = None) -> Report: ...
@overload
def report(
    packed: Sequence[PackedTree], *, title: str | None = None, columns: ColumnAccount | None = None
) -> Report: ...
@overload
def report(
    packed: Sequence[Sequence[PackedTree]], *, title: str | None = None, columns: ColumnAccount | None = None
) -> Report: ...
def report(packed: Trees, *, title: str | None = None, columns: ColumnAccount | None = None) -> Report:
    """A page that shows what was packed: the trees as nested bars, attention masks, tiles, lengths and sharing.

    Args:
        packed: what `pack` returns, or trees of it (on any device), or micro-batches of a `Packer`.
        title: the page's headline, as plain text.
        columns: what became of the columns of the input, say `rollouts.account` of `treepack.readers.open_rollouts`.

    Raises:
        PackError: `packed` is something else.
        ModuleNotFoundError: jinja2 is not installed.

    >>> import treepack
    >>> treepack.report(treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=8), title="one sample").html[:15]
    '<!doctype html>'
    """
    if title is not None and not isinstance(title, str):
        raise PackError(f"report: title is a {type(title).__name__}; it has to be a string")
    template = _template()
    trees = trees_of(packed)
    totals = totals_of(packed, trees)
    title = _valid(title or "What was packed")[:TITLE]
    drawn = trees[:TREES]
    bars = _shares([len(tree.segment_parent) for tree in drawn], SEGMENTS)
    data = {
        "trees": [_tree(tree, most, len(drawn)) for tree, most in zip(drawn, bars, strict=True)],
        "lengths": _histogram(length_histogram(trees)),
        "sharing": _histogram(sharing_histogram(trees)),
    }
    lines = [] if columns is None else [_shortened(_valid(line)) for line in columns.lines()]
    return Report(_render(template, title, totals, len(drawn), data, lines))


def _template() -> Template:
    """The page before anything is filled in."""
    require("jinja2", "treepack.report", "cli")
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    # `tojson` writes <, >, & and ' as \u003c and so on: no text can end the script element that holds the data.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(_asset("page.html.j2"))


def _shortened(line: str) -> str:
    return line if len(line) <= LINE else f"{line[:LINE]}..."


def _render(
    template: Template, title: str, totals: Totals, drawn: int, data: dict[str, Any], columns: Sequence[str]
) -> str:
    """The template with everything in place. Only the page's own style and script can run: it names their hashes."""
    style, script = _asset("report.css"), "".join(map(_asset, SCRIPTS))
    return template.render(
        title=title,
        totals=totals,
        drawn=drawn,
        data=data,
        columns=columns,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        version=__version__,
    )


def _tree(tree: HostTree, bars: int, trees: int) -> dict[str, Any]:
    """What the page draws of one tree out of `trees`."""
    segments = segments_of(tree)
    drawn = bars_of(segments, bars, RUNS // trees)
    merged = np.flatnonzero(drawn.segments > 1)
    columns = sorted({*tree.terms, *tree.samples, *tree.positions})
    return {
        "tokens": int(tree.cu_segments[-1]),
        "padding": tree.num_tokens - int(tree.cu_segments[-1]),
        "alone": int((segments.tokens * segments.samples).sum()),
        "samples": len(tree.sample_index),
        "segments": len(segments.start),
        "rows": len(tree.row_position),
        "terms": len(tree.term_row),
        "pairs": int((tree.position_ids[: tree.cu_segments[-1]] + 1).sum()),
        "columns": [name[:TITLE] for name in columns[:COLUMNS]],
        "more_columns": max(len(columns) - COLUMNS, 0),
        "bars": {
            "parent": drawn.parent.tolist(),
            "tokens": drawn.tokens.tolist(),
            "samples": drawn.samples.tolist(),
            "trained": drawn.trained.tolist(),
            "runs": drawn.runs.tolist(),
            "grain": drawn.grain,
            "merged": np.stack([merged, drawn.segments[merged], drawn.reach[merged]]).T.tolist(),
        },
        **_pictures(tree, PICTURE_BYTES // trees),
    }


def _pictures(tree: HostTree, most: int) -> dict[str, Any]:
    """The mask and the tiles of a tree: half the pixels along a side until both files together are short enough."""
    pixels = PIXELS
    while True:
        mask, tiles = mask_of(tree.subtree_end, pixels), tiles_of(tree, pixels)
        none = np.zeros_like(tiles.full_shares)
        mask_png = png(grey(mask.shares))
        tiles_png = png(grey(np.stack([tiles.full_shares, tiles.partial_shares, none], axis=-1)))
        if len(mask_png) + len(tiles_png) <= most or pixels == 1:
            break
        pixels //= 2
    return {
        "mask": {"step": mask.step, "png": _base64(mask_png)},
        "tiles": {
            "step": tiles.step,
            "side": tiles.tiles,
            "full": tiles.full,
            "partial": tiles.partial,
            "png": _base64(tiles_png),
        },
    }


def _shares(wants: Sequence[int], total: int) -> list[int]:
    """`total` shared out: nobody gets more than it wants, and what some leave goes to the others."""
    given = [0] * len(wants)
    for done, place in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        given[place] = min(wants[place], total // (len(wants) - done))
        total -= given[place]
    return given


def _valid(text: str) -> str:
    """Text that UTF-8 can hold: of a file name that is not UTF-8 Python makes lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {**histogram._asdict(), "values": [round(value, 4) for value in histogram.values]}


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + _base64(sha256(text.encode()).digest())


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
