"""The elements of a JSON array in a file, one by one, out of a buffer that holds a block and an element.

The parser of the standard library wants whole values, so an element is tried as soon as there is text of it, and again
with twice the text where that ends too early: a text is parsed three times at most, and an error that is not at the end
of the text is one at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any

from .source import ReadError, first_line

#: Bytes that are read at once, where an element needs no more.
BLOCK = 1 << 20
#: Letters of an element, at most. What is broken may go on to the end of the file, which memory need not hold.
LARGEST = 1 << 28
#: A text that ends too early gives an error within so many letters of its end: an escaped pair of surrogates.
_NEAR_THE_END = 12
_SPACE = " \t\n\r"


def elements(read: Callable[[int], bytes], path: str) -> Iterator[tuple[Any, int]]:
    """Each element of the array, and how many letters it has; of a file without an array, each value.

    Raises ReadError with the element, its place in the file, and what is wrong there.
    """
    text = _Text(read, path)
    array = text.peek() == "["
    if array:
        text.at += 1
    number = 0
    while True:
        letter = text.peek()
        if not letter or (array and letter == "]"):
            break
        if array and number:
            if letter != ",":
                raise text.error(number, "Expecting ',' delimiter")
            text.at += 1
            text.peek()
        yield text.value(number)
        number += 1
    if array and not letter:
        raise text.error(number, "the file ends within the array")
    text.at += 1
    if array and text.peek():
        raise text.error(number, "there is more after the array; one array, or one object per line, is needed")


class _Text:
    """Text of a file from `at` on, read further where it is needed."""

    def __init__(self, read: Callable[[int], bytes], path: str):
        self.at = 0
        self._read, self._path = read, path
        self._buffer, self._ended = "", False
        self._before = 0  # letters in front of the buffer
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._parse = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next letter that is no space, where `at` then is; '' at the end of the file."""
        while True:
            while self.at < len(self._buffer):
                if self._buffer[self.at] not in _SPACE:
                    return self._buffer[self.at]
                self.at += 1
            if self._ended:
                return ""
            self._more()

    def value(self, number: int) -> tuple[Any, int]:
        """The value at `at`, and its letters."""
        while True:
            try:
                value, end = self._parse(self._buffer, self.at)
            except json.JSONDecodeError as error:
                early = error.pos >= len(self._buffer) - _NEAR_THE_END or error.msg.startswith("Unterminated")
                if self._ended or not early:
                    self.at = error.pos
                    raise self.error(number, error.msg) from None
                if len(self._buffer) - self.at > LARGEST:
                    raise self.error(number, f"it has more than {LARGEST:,} letters") from None
                self._more()
            except (ValueError, RecursionError) as error:  # integers of thousands of digits
                raise self.error(number, first_line(error)) from None
            else:
                size = end - self.at
                self.at = end
                return value, size

    def _more(self) -> None:
        data = self._read(max(BLOCK, len(self._buffer) - self.at))
        self._before += self.at
        try:
            self._buffer = self._buffer[self.at :] + self._decode.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise ReadError(f"{self._path}: it cannot be parsed: {first_line(error)}") from None
        self.at, self._ended = 0, not data

    def error(self, number: int, what: str) -> ReadError:
        return ReadError(f"{self._path}, element {number}: not JSON: {what} at letter {self._before + self.at + 1}")
