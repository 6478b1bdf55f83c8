"""A reader of samples that remembers what they look like where their columns are ready.

A trainer packs the same kind of samples again and again. Where all columns of all samples are as they were before,
they are borrowed as they are, without a look from Python; others are read column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from .._core import Formats, PackError
from . import column_checks
from . import samples as columns_of
from .columns import Format, Inputs, ready_formats

__all__ = ["Reader", "Readers"]

T = TypeVar("T")


class _Look(NamedTuple):
    """What the columns of ready samples look like."""

    core: Formats
    formats: dict[str, Format]
    """Row format of each gathered column, by name."""
    looked_at: Sequence[str]
    """Columns whose values have to be looked at each time, lest one of them is a mask."""
    masked: bool


class Reader:
    """Reads samples of one kind. May be used from several threads: each call goes by what was known when it began."""

    def __init__(self) -> None:
        self._look: _Look | None = None

    def borrow(self, samples: Any, call: Callable[[Any, Formats], T | None]) -> tuple[T, dict[str, Format]] | None:
        """What `call` makes of samples that look as those before, and the formats of their gathered columns.

        None where none were before, where `call` gives None (something is not ready), and where it raises PackError:
        what is wrong is said by those who read the columns and know more.
        """
        look = self._look
        if look is None:
            return None
        if look.looked_at and not column_checks.harmless(samples, look.looked_at, look.masked):
            return None
        try:
            made = call(samples, look.core)
        except PackError:
            return None
        return None if made is None else (made, look.formats)

    def read(self, samples: Any, per_token: Sequence[str] = (), per_sample: Sequence[str] = ()) -> Inputs:
        """The columns of samples in any form that `treepack.pack` takes."""
        return columns_of.read(samples, per_token, per_sample)

    def learn(self, columns: Inputs, looked_at: Sequence[str] = ()) -> None:
        """Remember what columns look like that were read from a list of samples and could be packed. `looked_at`: those
        whose values are looked at again, in each list of samples that is borrowed."""
        if isinstance(columns.ids, list) and columns.ids:
            self._look = _Look(ready_formats(columns), columns.formats, looked_at, columns.mask is not None)


class Readers:
    """A reader for each kind of samples, by the names of their columns: callers with samples of their own kinds do not
    make each other forget. Remembers the `most` kinds that came last."""

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._readers: dict[frozenset[Any], Reader] = {}
        self._changing = Lock()

    def get_reader(self, samples: Any) -> Reader:
        """The reader for samples like the first one."""
        if not (type(samples) is list and samples and isinstance(samples[0], dict)):
            return Reader()
        names = frozenset(samples[0])
        found = self._readers.get(names)
        if found is None:
            with self._changing:
                found = self._readers.setdefault(names, Reader())
                if len(self._readers) > self._most:
                    del self._readers[next(iter(self._readers))]
        return found
