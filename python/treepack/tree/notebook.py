"""A packing to a small table of HTML, for a notebook: the sums, and a bar for each of the first trees."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .tree import HostTree

#: Trees that have a line of their own.
TREES = 12


def html_of(packed: Sequence[HostTree], stats: Any, ranks: int) -> str:
    """What a notebook shows of a packing with these `Stats`. Nothing of it is run or loaded; colours are those of the
    notebook."""
    sums = [
        ("samples", f"{stats.samples:,}" + (f", {stats.skipped:,} skipped" if stats.skipped else "")),
        ("tokens", f"{stats.raw_tokens:,} → {stats.packed_tokens:,} ({stats.packing_ratio:.2f} times fewer)"),
        ("loss terms", f"{stats.terms:,}"),
        ("trees", f"{stats.trees:,}" + (f" on {ranks:,} ranks" if ranks > 1 else "")),
    ]
    if stats.padding:
        sums.append(("padding", f"{stats.padding:,}"))
    head = "".join(f'<tr><th style="text-align:left">{name}</th><td>{value}</td></tr>' for name, value in sums)
    shown = packed[:TREES]
    largest = max((tree.num_tokens for tree in shown), default=0) or 1
    rows = "".join(
        f"<tr><td>{i}</td><td>{len(tree.sample_index):,}</td><td>{tree.num_tokens:,}</td><td>{tree.num_terms:,}</td>"
        f'<td><div style="width:{160 * tree.num_tokens // largest}px;height:0.7em;background:#559fcd"></div></td></tr>'
        for i, tree in enumerate(shown)
    )
    names = sorted({name for tree in shown for name in (*tree.terms, *tree.samples, *tree.positions)})
    columns = f"<p>columns: {escape(', '.join(names))}</p>" if names else ""
    more = f"<p>and {len(packed) - TREES:,} more trees</p>" if len(packed) > TREES else ""
    titles = "".join(f"<th>{title}</th>" for title in ("tree", "samples", "positions", "terms", ""))
    trees = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>" if shown else ""
    return f"<div><b>Packed</b><table><tbody>{head}</tbody></table>{trees}{more}{columns}</div>"
