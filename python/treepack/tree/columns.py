"""The gathered columns of a tree, as mappings from names to arrays; an array is made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .._core import PackError

if TYPE_CHECKING:
    from .tree import PackedTree


class Columns(Mapping[str, Any]):
    """The gathered columns of a tree, by name."""

    def __init__(self, tree: PackedTree, kind: str):
        self._tree, self._kind = tree, kind

    def __getitem__(self, name: str) -> Any:
        if self._kind == "positions" and name in self._tree._disagreements:
            a, b, token = self._tree._disagreements[name]
            raise PackError(
                f"positions[{name!r}]: samples {a} and {b} share the position of token {token} and differ there; "
                f"put it into `identity`, or read it per term: terms[{name!r}]"
            )
        key = f"{self._kind}.{name}"
        if key not in self._tree._fields:
            raise KeyError(f"{name!r}; {self._kind} has {list(self)}")
        return self._tree._array(key)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        prefix = self._kind + "."
        names = [field.removeprefix(prefix) for field in self._tree._fields if field.startswith(prefix)]
        if self._kind == "positions":
            names += self._tree._disagreements
        return iter(names)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{self._kind}({', '.join(self)})"
