"""How the command line prints: tables on stdout, and names from files so that they cannot steer a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import escaped

#: Columns for which tables are made. A narrower terminal breaks their lines, but loses no digit.
_COLUMNS = 80
_ANY_WIDTH = 1 << 12


def stdout() -> Console:
    """What is printed is text: brackets and colons in it mean nothing."""
    return Console(highlight=False, markup=False, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table, wider than the terminal where the words and numbers in it need that."""
    least = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).minimum
    width = console.width
    console.width = max(width, least, _COLUMNS)
    console.print(table)
    console.width = width


def progress_bar() -> Progress:
    """A bar on stderr, nothing where that is no terminal: what is done, how much, in numbers (the field `done`), since
    when. On 60 columns all of it is there."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),
        TaskProgressColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def printable(text: str) -> str:
    """The text on one line; escape sequences and what is no character (a file name that is not UTF-8) spelled out."""
    return escaped(" ".join(text.split()))


def counted(number: int, noun: str) -> str:
    """ "1 tree", "2 trees"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
