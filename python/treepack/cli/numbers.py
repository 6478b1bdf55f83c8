"""Numbers as people write them on a command line: 16384, 16,384, 16k, 1m; and several of them."""

from __future__ import annotations

import re
from typing import Any

import typer

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_ALLOWED = "needed is a whole number from 1 on, say 16384 or 16k, which is the same"


def number(text: str) -> int:
    """One number; k and m stand for 1,024 and 1,048,576.

    Raises:
        typer.BadParameter: it is none, or below 1.
    """
    found = re.fullmatch(r"(\d[\d_]*)([km]?)", str(text).strip().lower())
    value = int(found[1].replace("_", "")) * _UNITS[found[2]] if found else 0
    if not value:
        raise typer.BadParameter(f"{text!r}: {_ALLOWED}")
    return value


def numbers_in(option: str, text: str) -> tuple[int, ...]:
    """One or several with commas between them, in order of size, each once; 16,384 is one.

    Raises:
        typer.BadParameter: as of `number`, with the name of the option.
    """
    text = text.strip()
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text):
        text = text.replace(",", "")
    try:
        return tuple(sorted({number(part) for part in text.split(",")}))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option} {error.message}") from None


def count_option(help: str) -> Any:
    """An option that takes one number."""
    return typer.Option(parser=number, metavar="N", help=help)
