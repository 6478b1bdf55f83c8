"""The gathered columns of a tree, as mappings from names to arrays; an array is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from .._core import PackError


class Columns(Mapping[str, Any]):
    """The gathered columns of one kind ("terms", "samples", "positions") of a tree, by name.

    Args:
        kind: what the columns have a row for.
        fields: the full names of all arrays of the tree: "terms.advantage".
        array: an array of the tree by its full name.
        disagreements: (sample, sample, token) of each per-token column that has no value per position.
    """

    def __init__(
        self,
        kind: str,
        fields: Collection[str],
        array: Callable[[str], Any],
        disagreements: Mapping[str, tuple[int, int, int]],
    ):
        self._kind, self._fields, self._array = kind, fields, array
        self._disagreements = disagreements if kind == "positions" else {}

    def __getitem__(self, name: str) -> Any:
        if name in self._disagreements:
            a, b, token = self._disagreements[name]
            raise PackError(
                f"positions[{name!r}]: samples {a} and {b} share the position of token {token} and differ there; "
                f"put it into `identity`, or read it per term: terms[{name!r}]"
            )
        key = f"{self._kind}.{name}"
        if key not in self._fields:
            raise KeyError(f"{name!r}; {self._kind} has {list(self)}")
        return self._array(key)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        prefix = self._kind + "."
        yield from (field.removeprefix(prefix) for field in self._fields if field.startswith(prefix))
        yield from self._disagreements

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{self._kind}({', '.join(self)})"
