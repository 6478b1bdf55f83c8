"""Whether what was read trains anything: a file of samples without a loss term is not what was meant."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from .messages import ASSISTANT
from .source import ReadError, ReadWarning


class Terms:
    """Counts samples, and those of them that have a mask and no trained token with one before it."""

    def __init__(self, path: object):
        self._path = path
        self.samples = self.without = 0
        self._first = ""

    def add(self, sample: Mapping[str, Any], where: str) -> None:
        """Take a sample; `where`: "line 3"."""
        mask = sample.get("completion_mask")
        self.samples += 1
        if mask is not None and not mask[1:].any():
            self.without += 1
            self._first = self._first or where

    def check(self, whole: bool, mask: str, roles: Collection[str] = ()) -> None:
        """What to say of the samples so far.

        whole: they are all that the file has. mask: what says what is trained. roles: of chats, those in the samples
        without a term.

        Raises ReadError where no sample of a whole file has a term; warns where no sample of a part has one, or some
        conversations have none.
        """
        without, self.without = self.without, 0  # said once
        if not without:
            return
        if whole and without == self.samples:
            raise ReadError(f"{self._path}: none of its {self.samples} samples has a loss term: {_why(mask, roles)}")
        if roles or without == self.samples:
            warnings.warn(
                f"{self._path}: {without} of {self.samples} samples have no loss term, the first is {self._first}: "
                f"{_why(mask, roles)}",
                ReadWarning,
                stacklevel=3,
            )


def _why(mask: str, roles: Collection[str]) -> str:
    if not roles:
        return f"{mask} trains no token that has one before it"
    there = ", ".join(sorted(map(repr, roles)))
    if ASSISTANT in roles:
        return (
            f"no message there is trained; the roles are {there}; weight, loss or train may say so, or a template that "
            "marks nothing of them"
        )
    return (
        f"messages of the role {ASSISTANT!r} are trained, and the roles there are {there}: rename the one whose "
        f"messages are to be trained to {ASSISTANT!r}"
    )
