"""Nested Arrow values -> what the JSON of the same rows would give.

`to_pylist` leaves JSON columns as text, makes maps lists of pairs, and fills every object of a column up with the keys
of all others. Where null may be a value, in `default` and `const` of a JSON schema, what was filled is distinguished
from what was written: another row has a value there, and the schema allows no null. All other nulls `messages` takes
out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

Convert = Callable[[Any], Any]


def plain_values(array: pyarrow.Array) -> list[Any]:
    """One Python value per row."""
    values: list[Any] = array.to_pylist()
    convert = _converter(array.type)
    return values if convert is None else [convert(value) for value in values]


def _converter(kind: Any) -> Convert | None:
    """What is to be done to values of a type; None where nothing is."""
    import pyarrow.types as kinds

    if getattr(kind, "extension_name", None) == "arrow.json":
        return _or_none(json.loads)
    if kinds.is_map(kind):
        value = _converter(kind.item_type) or _same
        return _or_none(lambda pairs: {key: value(item) for key, item in pairs})
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        inner = _converter(kind.value_type)
        return None if inner is None else _or_none(lambda items: [inner(item) for item in items])
    return _object_converter(kind) if kinds.is_struct(kind) else None


def _object_converter(kind: Any) -> Convert | None:
    import pyarrow.types as kinds

    fields = [kind.field(at) for at in range(kind.num_fields)]
    inner = {field.name: converter for field in fields if (converter := _converter(field.type)) is not None}
    filled = [field.name for field in fields if field.name in ("default", "const") and not kinds.is_null(field.type)]
    if not inner and not filled:
        return None

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        out = {name: inner[name](item) if name in inner else item for name, item in value.items()}
        for name in filled:
            if out[name] is None and not _allows_null(out):
                del out[name]
        return out

    return _or_none(convert)


def _allows_null(schema: dict[str, Any]) -> bool:
    """Whether null is among the values that a JSON schema allows; one that names no type allows all."""
    kind = schema.get("type")
    if schema.get("nullable") or kind == "null" or (isinstance(kind, list) and "null" in kind):
        return True
    choices = [choice for name in ("anyOf", "oneOf") for choice in schema.get(name) or []]
    if any(isinstance(choice, dict) and choice.get("type") == "null" for choice in choices):
        return True
    return kind is None and not choices


def _same(value: Any) -> Any:
    return value


def _or_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)
