"""Trees to what their groups share, within and across, and how long and how trained the samples of a group are.

O(pairs of a group and a segment that its samples pass through), NumPy; a few numbers for each group are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tree.segments import sample_lengths
from .samples import plain, terms_and_turns
from .segments import Numbers

if TYPE_CHECKING:
    from ..tree.tree import HostTree


@dataclass
class Group:
    """Sums over the samples of one group, over all trees."""

    name: Any
    samples: int = 0
    raw_tokens: int = 0
    packed_tokens: int = 0
    """Positions that its samples pass through: what the group alone would take, tree by tree."""
    trained_tokens: int = 0
    shortest: int = 0
    longest: int = 0
    """Trained tokens of a sample, the fewest and the most."""
    turns: int = 0

    @property
    def saved(self) -> int:
        return self.raw_tokens - self.packed_tokens


class Groups:
    """Takes trees with `add`; numbers for a terminal and JSON with `finish`, rows for a page in `largest`."""

    def __init__(self) -> None:
        self._groups: dict[Any, Group] = {}
        self._packed = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, tree: HostTree, names: Sequence[Any]) -> None:
        """Take a tree and the group of each of its samples. Samples without one (None) are one group."""
        if not len(names):
            return
        keys = list(map(plain, names))
        known = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        number_of = np.array([known[key] for key in keys])
        terms, turns = terms_and_turns(tree)
        order = np.argsort(number_of, kind="stable")
        starts = np.searchsorted(number_of[order], np.arange(len(known)))
        sums = {
            "samples": np.bincount(number_of),
            "raw_tokens": np.add.reduceat(sample_lengths(tree)[order], starts),
            "packed_tokens": positions_of_groups(tree, number_of, len(known)),
            "trained_tokens": np.add.reduceat(terms[order], starts),
            "turns": np.add.reduceat(turns[order], starts),
        }
        shortest, longest = np.minimum.reduceat(terms[order], starts), np.maximum.reduceat(terms[order], starts)
        self._packed += int(tree.cu_segments[-1])
        for key, number in known.items():
            group = self._groups.get(key) or Group(key, shortest=int(shortest[number]))
            self._groups[key] = group
            group.shortest = min(group.shortest, int(shortest[number]))
            group.longest = max(group.longest, int(longest[number]))
            for field, values in sums.items():
                setattr(group, field, getattr(group, field) + int(values[number]))

    def largest(self, most: int) -> list[Group]:
        """The groups that save most."""
        return sorted(self._groups.values(), key=lambda group: -group.saved)[:most]

    def finish(self) -> dict[str, Any] | None:
        """The numbers over all groups, ready for JSON; None where no sample has one."""
        groups = list(self._groups.values())
        if not any(group.name is not None for group in groups):
            return None

        def total(field: str) -> int:
            return sum(getattr(group, field) for group in groups)

        samples, raw, within = total("samples"), total("raw_tokens"), total("packed_tokens")
        return {
            "groups": len(groups),
            "fewest_samples": min(group.samples for group in groups),
            "most_samples": max(group.samples for group in groups),
            "shared_within": raw - within,
            "shared_across": within - self._packed,
            "raw_tokens": raw,
            "trained_tokens": total("trained_tokens"),
            "shortest_completion": min(group.shortest for group in groups),
            "mean_completion": total("trained_tokens") / samples,
            "longest_completion": max(group.longest for group in groups),
            "mean_turns": total("turns") / samples,
        }


def positions_of_groups(tree: HostTree, group_of: Numbers, groups: int) -> Numbers:
    """(groups,) int64: the positions that the samples of each group pass through, each once."""
    segments = len(tree.segment_parent)
    parents, tokens = tree.segment_parent.astype(np.int64), np.diff(tree.cu_segments.astype(np.int64))
    passed = [np.unique(group_of.astype(np.int64) * segments + tree.sample_last_segment)]
    while len(passed[-1]):  # one segment up, for all groups at once
        group, segment = np.divmod(passed[-1], segments)
        above = parents[segment]
        passed.append(np.unique((group * segments + above)[above >= 0]))
    group, segment = np.divmod(np.unique(np.concatenate(passed)), segments)
    out = np.zeros(groups, np.int64)
    np.add.at(out, group, tokens[segment])
    return out


def lines_of(numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and note of each number, for a table in a terminal or on a page."""
    raw = numbers["raw_tokens"]
    sizes = f"{numbers['fewest_samples']:,} to {numbers['most_samples']:,} samples each"
    lengths = f"{numbers['shortest_completion']:,} to {numbers['longest_completion']:,}"
    share = f"{100 * numbers['trained_tokens'] / raw:.1f} %"
    return [
        ("groups", f"{numbers['groups']:,}", sizes),
        ("shared within groups", f"{numbers['shared_within']:,}", f"{_percent(numbers['shared_within'], raw)} of raw"),
        ("shared across groups", f"{numbers['shared_across']:,}", f"{_percent(numbers['shared_across'], raw)} of raw"),
        ("trained tokens", f"{numbers['trained_tokens']:,}", f"{share} of raw"),
        ("trained a sample", f"{numbers['mean_completion']:,.0f}", lengths),
        ("turns a sample", f"{numbers['mean_turns']:,.1f}", "unbroken runs of trained tokens"),
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"
