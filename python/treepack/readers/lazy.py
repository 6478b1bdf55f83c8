"""A nested Arrow column that becomes Python values when somebody looks at it, and paths into it NumPy views without.

What is not read costs nothing, and token ids within lists of objects are never Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from ..inputs.tables import arrow_values
from .plain import plain_values

if TYPE_CHECKING:
    import pyarrow

Steps = tuple[tuple[str, int], ...]


class Column(Sequence[Any]):
    """The values of a nested column, one for each row."""

    def __init__(self, column: Any):
        """column: a ChunkedArray, or an Array."""
        self._column = column
        self._values: list[Any] | None = None

    def at(self, steps: Steps) -> list[Any] | None:
        """What lies at the end of a path in each row, lists of it for lists on the way; None where the path leads
        through something that Arrow has no names for, such as JSON text. `steps`: of `paths.Path`."""
        pieces = self._column.chunks if hasattr(self._column, "chunks") else [self._column]
        out: list[Any] = []
        for piece in pieces:
            values = _walk(piece, steps[0][1], steps[1:])
            if values is None:
                return None
            out += values
        return out

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: Any) -> Any:
        return self._all()[at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def _all(self) -> list[Any]:
        if self._values is None:
            self._values = arrow_values(self._column, other=plain_values)
        return self._values


def is_nested(kind: Any) -> bool:
    """Whether a type is of objects, or of lists of anything but numbers."""
    import pyarrow.types as kinds

    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return bool(kinds.is_nested(kind.value_type))
    return bool(kinds.is_struct(kind))


def _walk(array: pyarrow.Array, lists: int, rest: Steps) -> list[Any] | None:
    """Through `lists` lists, then along `rest`."""
    import pyarrow.types as kinds

    kind = array.type
    if kinds.is_null(kind):
        return [None] * len(array)
    if lists:
        return _lists(array, lists, rest)
    if not rest:
        return arrow_values(array, other=plain_values)
    if not kinds.is_struct(kind):
        return None
    name, lists = rest[0]
    at = kind.get_field_index(name)
    if at < 0:
        return [None] * len(array)
    from pyarrow import compute

    return _walk(compute.struct_field(array, [at]), lists, rest[1:])


def _lists(array: pyarrow.Array, lists: int, rest: Steps) -> list[Any] | None:
    import pyarrow.types as kinds

    if not (kinds.is_list(array.type) or kinds.is_large_list(array.type)) or _are_nodes(array.type.value_type):
        return None
    offsets = array.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    inner = _walk(array.values.slice(first, last - first), lists - 1, rest)
    if inner is None:
        return None
    ends = (offsets - first).tolist()
    valid = [True] * len(array) if array.null_count == 0 else array.is_valid().to_pylist()
    return [inner[ends[n] : ends[n + 1]] if there else None for n, there in enumerate(valid)]


def _are_nodes(kind: Any) -> bool:
    """Whether objects may be messages that form a tree (`branches`), which lists of their values do not tell."""
    import pyarrow.types as kinds

    return bool(kinds.is_struct(kind) and min(kind.get_field_index("parent"), kind.get_field_index("token_ids")) >= 0)
