"""Docstrings as the site shows them: examples become blocks of code, lists become lists.

Markdown takes `>>>` for a quotation: everything from the first such line to the next empty one is put between fences,
at the indentation that it has. A list needs an empty line before it.
"""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(listed(obj.docstring.value))


def listed(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        item = line.lstrip().startswith("- ")
        if item and not inside and lines and lines[-1].strip():
            lines.append("")
        inside = item or (inside and bool(line.strip()))
        lines.append(line)
    return "\n".join(lines)


def fenced(text: str) -> str:
    lines: list[str] = []
    open_at: str | None = None
    for line in [*text.splitlines(), ""]:
        margin = line[: len(line) - len(line.lstrip())]
        if open_at is None and line.lstrip().startswith(">>> "):
            open_at = margin
            lines.append(f"{margin}```pycon")
        elif open_at is not None and not line.strip():
            lines.append(f"{open_at}```")
            open_at = None
        lines.append(line.replace("  # doctest: +SKIP", "").rstrip() if open_at is not None else line)
    return "\n".join(lines).rstrip()
