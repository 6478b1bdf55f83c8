"""What benches of attention read from a command line: head sizes ("128", "192/128") and whole layers
("64:64/8:window=128:sinks")."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple


class Sizes(NamedTuple):
    """The head sizes of a call."""

    head: int
    """Of q and k."""
    value: int
    """Of v and the output."""

    @staticmethod
    def read(text: str) -> Sizes:
        """Of "128" or "192/128"."""
        found = re.fullmatch(r"(\d+)(?:/(\d+))?", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no head size: give 128, or q and k / v, 192/128")
        head, value = found.groups()
        return Sizes(int(head), int(value or head))

    def __str__(self) -> str:
        return f"{self.head}" if self.head == self.value else f"{self.head}/{self.value}"


class Shape(NamedTuple):
    """One layer of attention."""

    sizes: Sizes
    heads: int
    """Of q."""
    kv: int
    """Of k and v."""
    window: int | None = None
    sinks: bool = False

    @staticmethod
    def read(text: str) -> Shape:
        """Of head sizes, heads of q / of k and v, and options: "192/128:32/32", "64:64/8:window=128:sinks"."""
        found = re.fullmatch(r"([\d/]+):(\d+)/(\d+)(?::window=(\d+))?(:sinks)?", text)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no shape: give SIZE:HEADS/KV, then :window=W and :sinks where there are, as "
                "192/128:32/32 or 64:64/8:window=128:sinks"
            )
        sizes, heads, kv, window, sinks = found.groups()
        return Shape(Sizes.read(sizes), int(heads), int(kv), int(window) if window else None, sinks is not None)

    def __str__(self) -> str:
        window = f"  window {self.window}" if self.window else ""
        return f"D {self.sizes}  heads {self.heads}/{self.kv}{window}{'  sinks' if self.sinks else ''}"
