"""Numbers as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .._pages import page
from ..errors import shown
from ..inputs.account import ColumnAccount
from ..reports.groups import lines_of as group_lines
from .terminal import print_table, printable

_TITLES = {"shared": "shared", "first_fit": "first fit", "stream": "stream", "no_budget": "no budget"}
#: Raw over packed tokens below which the table says that packing saves nothing to speak of.
_WORTH_IT = 1.05


def print_survey(console: Console, numbers: dict[str, Any]) -> None:
    """What `treepack inspect` prints."""
    taken = ", ".join(
        shown(name) if name == column else f"{shown(name)} from {shown(column)}"
        for name, column in numbers["columns"].items()
    )
    console.print(printable(f"{numbers['file']} ({numbers['format']}): {taken}"), soft_wrap=True)
    if "account" in numbers:
        lines = ColumnAccount.from_json(numbers["account"]).lines()
        for line in (line for line in lines if not line.startswith("read: ")):  # those are in the line above
            console.print(printable(line), soft_wrap=True)
    print_table(console, _file_table(numbers))
    if numbers.get("budgets"):
        print_table(console, _budget_table(numbers["budgets"], numbers["expected"]["placement"]))
    print_table(console, _placement_table(numbers))
    if numbers.get("groups"):
        print_table(console, _group_table(numbers["groups"]))
    if "quality" in numbers:
        print_table(console, _quality_table(numbers["quality"]))
    for note in _notes(numbers):
        console.print(note)


def _file_table(numbers: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    samples, windows = numbers["samples"], numbers["windows"]
    mean = numbers["raw_tokens"] / samples
    pairs = [("pairs", numbers["pairs"], "chosen and rejected lie in one tree")] if numbers.get("pairs") else []
    rows = [
        *pairs,
        ("samples", samples, f"up to {numbers['limit']:,} were asked for" if numbers["limit"] else ""),
        ("raw tokens", numbers["raw_tokens"], f"{mean:,.0f} a sample, the longest has {numbers['longest_sample']:,}"),
        ("loss terms", numbers["loss_terms"], "packing merges none"),
        ("exact duplicates", numbers["exact_duplicates"], "samples with the ids of an earlier one"),
        ("strict prefixes", numbers["strict_prefixes"], "samples that another one goes on from" + _within(windows)),
        ("do not fit", numbers["skipped"]["samples"], "left out of every other number"),
    ]
    for name, value, note in rows:
        table.add_row(name, f"{value:,}", note)
    return table


def _three_columns(title: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, title=title, title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _group_table(groups: dict[str, Any]) -> Table:
    return _three_columns("groups, in one tree without a budget", group_lines(groups))


def _quality_table(quality: dict[str, Any]) -> Table:
    return _three_columns("data quality", quality_lines(quality))


def quality_lines(quality: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and note of each number, for a table in a terminal or on a page."""
    rows: list[tuple[str, str, str]] = []
    terms, log_probs = quality["without_terms"], quality["non_finite_log_probs"]
    groups, long = quality["zero_advantage_groups"], quality["beyond_positions"]
    note = _first(map(str, terms["first"]), "samples") or "nothing of them is trained"
    rows.append(("samples without a term", f"{terms['samples']:,}", note))
    if log_probs is not None:
        first = (f"sample {x['sample']} at token {x['token']}: {x['value']}" for x in log_probs["first"])
        note = _first(first) or "at trained tokens"
        rows.append(("NaN or infinite log-probs", f"{log_probs['samples']:,}", note))
    if groups is not None:
        note = (
            _first((printable(str(group)) for group in groups["first"]), "groups")
            or f"all of which are 0; of {groups['of']:,} groups"
        )
        rows.append(("groups without an advantage", f"{groups['groups']:,}", note))
    if long is not None:
        first = (f"sample {x['sample']} with {x['tokens']:,}" for x in long["first"])
        note = _first(first) or f"of {long['max_positions']:,} (--max-positions)"
        rows.append(("longer than the positions", f"{long['samples']:,}", note))
    return rows


def _first(shown: Iterable[str], noun: str = "") -> str:
    listed = list(shown)
    return f"first {noun} {', '.join(listed)}".replace("  ", " ") if listed else ""


def _within(windows: int) -> str:
    return ", within windows" if windows > 1 else ""


def _placement_table(numbers: dict[str, Any]) -> Table:
    terms = f", max_terms = {numbers['max_terms']:,}" if numbers["max_terms"] else ""
    title = f"packed with max_tokens = {numbers['max_tokens']:,}{terms}"
    table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    placements = numbers["placements"]
    for name in placements:
        table.add_column(_TITLES[name], justify="right", no_wrap=True)
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "packed tokens": lambda p: f"{p['packed_tokens']:,}",
        "raw / packed tokens": lambda p: f"{p['packing_ratio']:.2f}",
        "attention work, alone / packed": lambda p: f"{p['attention_ratio']:.2f}",
        "sharing that the budget leaves": lambda p: _percent(p["sharing_kept"]),
        "trees": lambda p: f"{p['trees']:,}" if p["fill"] is not None else "",
        "fill of the trees": lambda p: _percent(p["fill"]),
    }
    for label, show in rows.items():
        table.add_row(label, *(show(placement) for placement in placements.values()))
    return table


def _budget_table(rows: list[dict[str, Any]], placement: str) -> Table:
    """A line for each budget; what cutting would save is what the budget packs more than one tree would."""
    table = Table(box=box.SIMPLE, title=f"by budget ({_TITLES[placement]})", title_justify="left", title_style="bold")
    for name in ("budget", "packed tokens", "raw / packed", "trees", "fill", "cutting saves", "do not fit", ""):
        table.add_column(name, justify="right", no_wrap=not name)
    for row in rows:
        cutting = "" if row["cutting_saves"] is None else f"{row['cutting_saves']:,}"
        table.add_row(
            f"{row['max_tokens']:,}",
            f"{row['packed_tokens']:,}",
            f"{row['packing_ratio']:.2f}",
            f"{row['trees']:,}",
            _percent(row["fill"]),
            cutting,
            f"{row['skipped']:,}",
            "<- knee" if row["knee"] else "",
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _notes(numbers: dict[str, Any]) -> list[str]:
    expected, skipped = numbers["expected"], numbers["skipped"]
    notes = []
    if numbers.get("budgets"):
        notes.append(
            "Knee: the smallest budget whose trees hold at most 5 % more tokens than those of the best one. Cutting "
            f"saves: what a tree over several micro-batches would spare. GiB beside tokens: {page('choose-a-budget')}"
        )
    if numbers["windows"] > 1:
        windows = f"{numbers['windows']:,} windows of {numbers['window_tokens']:,} raw tokens"
        notes.append(
            f"Shared, first fit and no budget: sums over {windows} in file order (--window); what two windows share "
            "counts in both. The stream runs through the file."
        )
    if "cut" in numbers:
        notes.append(_cut_note(numbers))
    if skipped["samples"]:
        notes.append(
            f"Do not fit: first {skipped['first'][0]['reason']}; the longest has {skipped['longest']} tokens. All fit "
            f"with {what_fits(numbers)}."
        )
    notes.append(
        f"Expect ({_TITLES[expected['placement']]}; counted, not measured; against the samples alone without padding): "
        f"linear layers do {expected['linear']:.2f} times less work, attention {expected['attention']:.2f} times. The "
        "speed-up of a step is at most the larger of the two; the loss, of which no term is merged, and fixed costs "
        f"pull it down. Measured steps: {page('when-packing-helps')}"
    )
    if expected["linear"] < _WORTH_IT:
        notes.append("Hardly anything is shared here: packing gives batches without padding, and little else.")
    if numbers["html"]:
        notes.append(printable(f"Drawn in {numbers['html']}"))
    return notes


def _cut_note(numbers: dict[str, Any]) -> str:
    """What one tree, cut into ranges, would save over the placement that the summary is about."""
    cut, chosen = numbers["cut"], numbers["expected"]["placement"]
    tokens = numbers["placements"][chosen]["packed_tokens"]
    saved = f"{100 * (1 - cut['packed_tokens'] / tokens):.1f} % fewer than {_TITLES[chosen]}" if tokens else "none"
    return (
        f"Cut (pack(cut=True), {page('ranges')}): {cut['packed_tokens']:,} tokens, {saved}, in {cut['ranges']:,} "
        f"ranges of up to {numbers['max_tokens']:,} rows that read the keys of up to {cut['most_ancestors']:,} "
        "ancestors."
    )


def what_fits(numbers: dict[str, Any]) -> str:
    """The options under which no sample is left out."""
    skipped = numbers["skipped"]
    tokens = f"--max-tokens {skipped['longest']}" if skipped["longest"] > numbers["max_tokens"] else ""
    most = numbers["max_terms"]
    terms = f"--max-terms {skipped['most_terms']}" if most and skipped["most_terms"] > most else ""
    return " and ".join(filter(None, (tokens, terms)))
