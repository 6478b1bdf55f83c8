"""The gathered columns of a tree, as mappings from names to arrays; an array is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from ..errors import OF_TOKEN, PackError, listed

Array = TypeVar("Array")


class Arrays(Mapping[str, Array]):
    """Arrays by name, of which each is made when it is asked for.

    Args:
        names: in the order of the buffer. Those of tile lists are left out.
        make: an array by its name.
    """

    def __init__(self, names: Collection[str], make: Callable[[str], Array]):
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Array:
        if name not in self:
            raise KeyError(f"{name!r}; the tree has {list(self)}")
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names and not str(name).startswith("tiles")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if not name.startswith("tiles"))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"arrays({listed(self)})"


class Columns(Mapping[str, Array]):
    """The gathered columns of one kind ("terms", "samples", "positions") of a tree, by name.

    Args:
        kind: what the columns have a row for.
        arrays: all arrays of the tree by their full names: "terms.advantage".
        disagreements: (sample, sample, token) of each per-token column that has no value per position.
    """

    def __init__(self, kind: str, arrays: Mapping[str, Array], disagreements: Mapping[str, tuple[int, int, int]]):
        self._kind, self._arrays = kind, arrays
        self._disagreements = disagreements if kind == "positions" else {}

    def __getitem__(self, name: str) -> Array:
        if name in self._disagreements:
            a, b, token = self._disagreements[name]
            column = f"positions[{name!r}]"
            raise PackError(
                (column, f" is another than that of sample {b}, with which it shares the position"),
                sample=a,
                token=token,
                token_as=OF_TOKEN,
                remedy=f"put it into `identity`, or read it per term: terms[{name!r}]",
            )
        key = f"{self._kind}.{name}"
        if key not in self._arrays:
            raise KeyError(f"{name!r}; {self._kind} has {list(self)}")
        return self._arrays[key]

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        prefix = self._kind + "."
        yield from (field.removeprefix(prefix) for field in self._arrays if field.startswith(prefix))
        yield from self._disagreements

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{self._kind}({listed(self)})"
