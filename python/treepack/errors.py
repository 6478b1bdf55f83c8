"""What is raised for input that cannot be packed: an object with fields, whose text is made last.

Who knows a sample by another number (its row in a batch, its place in a stream or a file) changes the number. A text is
never edited: it quotes what users named, and that may look like anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

#: How a token is named within a text, with its index for {}: by a place in a column, or as that of a kept set.
AT_INDEX, OF_TOKEN = "[{}]", " of token {}"


_PLAIN = re.compile(r"[\w.,/#$%+*()\[\]@-]+( [\w.,/#$%+*()\[\]@-]+)*")


def shown(name: object) -> str:
    """A name that a user gave, for a message: plain words as they are, else its repr, lest it look like the message."""
    return name if isinstance(name, str) and _PLAIN.fullmatch(name) else repr(name)


def listed(names: Iterable[object]) -> str:
    """Names that a user gave, for a message; '' where there are none."""
    return ", ".join(map(shown, names))


def escaped(text: str) -> str:
    """A text on one line, as any terminal prints it: what is not printable by its escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Refusal(Exception):
    """The fields that every error of the packer has, and its text."""

    def __init__(
        self,
        detail: str | tuple[str, str] = "",
        *,
        sample: int | None = None,
        token: int | None = None,
        against: tuple[int, str] | None = None,
        remedy: str = "",
        budget: str | None = None,
        needs: int | None = None,
        source: str = "",
        called: str = "sample {}",
        joint: str = ": ",
        token_as: str = AT_INDEX,
    ):
        """
        Args:
            detail: what is wrong, without sample and token; in two parts where the token is named between them.
            against: another sample that this one is compared with, and what that has: (0, "has an array there").
            called: how the sample is called, with its number for {}.
            joint: what stands between the sample and the detail.
            token_as: how the token is named between the two parts.
        """
        head, tail = (detail, None) if isinstance(detail, str) else detail
        super().__init__(head + (tail or ""))
        self.sample = sample
        """Number of the sample; None where the error is of a whole call."""
        self.token = token
        """Index of the token within the sample; None where it is of no single one."""
        self.remedy = remedy
        """What to do about it, or ''."""
        self.budget = budget
        """The option whose budget the sample breaks, say "max_tokens"; None for all other errors."""
        self.needs = needs
        """The smallest value of that option that takes the sample, padding included; None where there is none."""
        self.source = source
        """Where the samples are from, say the name of a file, or ''."""
        self._head, self._tail, self._token_as = head, tail, token_as
        self._called, self._joint = called, joint
        self._against = None if against is None else (against[0], "sample {}", against[1])

    @property
    def detail(self) -> str:
        """What is wrong, without sample and token."""
        return self._detail("")

    def shift(self, by: int) -> None:
        """Count samples from another one on: every number grows by `by`."""
        self.rename(lambda number: (number + by, "sample {}"))

    def rename(self, name: Callable[[int], tuple[int, str]]) -> None:
        """Give every sample that the error speaks of another number, and say how it is called: (7, "pair {}")."""
        if self.sample is not None:
            self.sample, self._called = name(self.sample)
        if self._against is not None:
            number, _, has = self._against
            self._against = *name(number), has

    def _detail(self, token: str) -> str:
        text = f"{self._head}{token}{self._tail or ''}"
        if self._against is None:
            return text
        number, called, has = self._against
        return f"{text}; {called.format(number)} {has}"

    def __str__(self) -> str:
        inside = self._tail is not None and self.token is not None
        names = [] if self.sample is None else [self._called.format(self.sample)]
        if self.token is not None and not inside:
            names.append(f"token {self.token}")
        source = f"{self.source}: " if self.source else ""
        where = ", ".join(names) + self._joint if names else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        return escaped(source + where + self._detail(self._token_as.format(self.token) if inside else "") + remedy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by the constructor: that of a subclass may take something else.
        return _again, (type(self), self.args, vars(self))


def _again(kind: type[_Refusal], args: tuple[Any, ...], fields: dict[str, Any]) -> _Refusal:
    """An error that was pickled or copied."""
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class PackError(_Refusal, ValueError):
    """Input that cannot be packed; says which sample, what it has, what is allowed.

    Attributes:
        sample: number of the sample (of the pair, where rows are pairs); None where the error is of a whole call.
        token: index of the token within the sample; None where it is of no single one.
        detail: what is wrong, without sample and token.
        remedy: what to do about it, or ''.
        budget: the option whose budget the sample breaks, say "max_tokens"; None for all other errors.
        needs: the smallest value of that option that takes the sample, padding included; None for all other errors.
        source: where the samples are from, say the name of a file, or ''.

    The text is made from these when it is asked for. A `TypeError` of a sample has the same attributes.

    >>> error = PackError("input_ids is empty", sample=3)
    >>> error.sample += 100
    >>> str(error)
    'sample 103: input_ids is empty'
    """

    __module__ = "treepack"


class PackTypeError(_Refusal, TypeError):
    """A value of the wrong type or dtype, with the fields of `PackError`."""


class Where(NamedTuple):
    """What a value is: a column, of one sample or of a whole batch."""

    column: str
    sample: int | None = None
    source: str = ""
    """What stands for the number where a sample has none yet, say "rollouts.jsonl, line 3"."""

    @property
    def is_of_batch(self) -> bool:
        return self.sample is None and not self.source

    def error(self, problem: str, index: int | None = None, against: tuple[int, str] | None = None) -> PackError:
        """ "sample 3: completion_mask is ragged", and with an index "sample 3: completion_mask[5] is 2"."""
        fields: dict[str, Any] = {"sample": self.sample, "source": self.source, "against": against}
        if index is not None and self.sample is not None:
            return PackError((shown(self.column), f" {problem}"), token=index, **fields)
        place = "" if index is None else AT_INDEX.format(index)
        return PackError(f"{shown(self.column)}{place} {problem}", **fields)

    def type_error(self, problem: str, against: tuple[int, str] | None = None) -> PackTypeError:
        """The same as a TypeError."""
        detail = f"{shown(self.column)} {problem}"
        return PackTypeError(detail, sample=self.sample, source=self.source, against=against)
