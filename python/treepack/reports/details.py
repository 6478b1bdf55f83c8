"""What a page says beside its pictures: how the trees were made, with which versions, and of which groups."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import numpy as np

from .._version import __version__
from ..tree.packed import Packed
from ..tree.tree import HostTree
from .groups import Groups
from .samples import Given, given_of
from .totals import Trees

#: Title -> rows of name, value and note.
Details = Mapping[str, Sequence[tuple[str, str, str]]]


def made_with(packed: Trees) -> list[tuple[str, str, str]]:
    """The versions, and the options of the call where they are known, which a list of trees does not have."""
    rows = [
        ("treepack", __version__, ""),
        ("NumPy", np.__version__, ""),
        ("Python", platform.python_version(), platform.platform()),
    ]
    if isinstance(packed, Packed) and is_dataclass(packed.options):
        for name in (field.name for field in fields(packed.options)):
            value = getattr(packed.options, name)
            if value is not None:
                rows.append((name, f"{value:,}" if isinstance(value, int) else str(value), "option"))
    return rows


def groups_of(trees: Sequence[HostTree], given: Given | None) -> Groups:
    """The groups of all trees: by what is given of the samples, else by the `group_id` that was packed."""
    groups = Groups()
    for tree in trees:
        names = None
        if given is not None:
            names = [one.get("group_id") for one in given_of(tree, given)]
        if (names is None or all(name is None for name in names)) and "group_id" in tree.samples:
            names = np.asarray(tree.samples["group_id"]).tolist()
        groups.add(tree, names if names is not None else [None] * len(tree.sample_index))
    return groups
