"""Where tokens lie in the text that they were made of -> the range of token ids of a part of that text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Offsets:
    """The spans of the tokens of one text, as a fast tokenizer gives them.

    Byte-level tokenizers may trim spaces from the spans: "Ġyes" then seems to begin after its space, and "Ġ" alone has
    an empty span behind it. `decode`: a token id -> its text, which tells what was trimmed.
    """

    def __init__(self, ids: Array, spans: Any, decode: Any):
        self._ids, self._decode = ids, decode
        self._starts, self._ends = np.array(spans, np.int64).reshape(-1, 2).T
        # Where the text of all tokens before ends. An empty token has its text between there and its span.
        self._before = np.concatenate([[0], np.maximum.accumulate(self._ends)[:-1]]) if len(ids) else self._ends
        empty = self._starts == self._ends
        self._true = np.where(empty, np.minimum(self._before, self._starts), self._starts)

    def tokens(self, start: int, end: int) -> slice:
        """The tokens of text[start:end], as a range: those with an empty span within it are part of it. A token that
        reaches over either end is not."""
        inside = np.flatnonzero((self._true >= start) & (self._true < end) & (self._ends <= end))
        if not len(inside):
            return slice(0, 0)
        first = int(inside[0])
        if self._before[first] < start < self._starts[first] + 1 and self._reaches_back(first, start):
            first += 1
        return slice(first, int(inside[-1]) + 1)

    def _reaches_back(self, token: int, start: int) -> bool:
        """Whether the text of a token begins before its span, in front of `start`."""
        text = self._decode(int(self._ids[token]))
        spaces = len(text) - len(text.lstrip())
        return bool(self._starts[token] - spaces < start)
