"""Which column of an input is what: read, carried or not read, and why. Plain data, for a terminal, JSON and repr.

account = ColumnAccount()
account.read("loss_mask", "completion_mask")
account.carry("policy_version", "policy_version", why="--column")
account.leave("question", "text")
print(account)   # read: completion_mask from loss_mask; carried: policy_version; not read: question (text)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import shown

Use = Literal["read", "carried", "not read"]
_USES: tuple[Use, ...] = ("read", "carried", "not read")


@dataclass(frozen=True)
class ColumnUse:
    """One use of one column of the input; a column of both sides of a pair has two."""

    column: str
    """Its name in the input; of a nested one the path, "trajectory[].tokens.prompt_ids"."""
    use: Use
    name: str | None = None
    """What it is read or carried as: its name in a sample. None where it is not read."""
    why: str = ""
    """Why it is not read, or "given" where the user named it; '' where the name says all."""

    def __str__(self) -> str:
        column = shown(self.column)
        text = column if self.name in (None, self.column) else f"{shown(self.name)} from {column}"
        return f"{text} ({self.why})" if self.why else text


@dataclass
class ColumnAccount(Sequence[ColumnUse]):
    """What becomes of every column of an input, in the order of the input."""

    uses: list[ColumnUse] = field(default_factory=list)
    trains: str = ""
    """What is trained, and what says so: "what loss_mask marks", "every token, as there is no mask"."""
    notes: list[str] = field(default_factory=list)
    """What else was given and is not used."""

    def read(self, column: str, name: str, why: str = "") -> None:
        """A column that means something to the packing: ids, masks, log-probs, groups."""
        self.uses.append(ColumnUse(column, "read", name, why))

    def carry(self, column: str, name: str, why: str = "") -> None:
        """A further column: gathered per term, per position or per sample, without a meaning of its own."""
        self.uses.append(ColumnUse(column, "carried", name, why))

    def leave(self, column: str, why: str = "") -> None:
        """A column that is not read."""
        self.uses.append(ColumnUse(column, "not read", None, why))

    def select_uses(self, use: Use) -> list[ColumnUse]:
        """The uses of one kind."""
        return [one for one in self.uses if one.use == use]

    @property
    def columns(self) -> dict[str, str]:
        """Name in a sample -> name in the input, of what is read or carried."""
        return {one.name: one.column for one in self.uses if one.name is not None}

    @property
    def unread(self) -> dict[str, str]:
        """Name in the input -> why it is not read."""
        return {one.column: one.why for one in self.select_uses("not read")}

    @property
    def plain(self) -> bool:
        """Whether there is nothing to say: every column is read or carried by its own name, and a mask says what is
        trained."""
        own = all(one.name == one.column for one in self.uses)
        return own and not self.notes and "completion_mask" in self.columns

    def to_json(self) -> dict[str, Any]:
        """Plain lists and texts, for a manifest or `--json`; `from_json` reads them."""
        return {"columns": [asdict(one) for one in self.uses], "trains": self.trains, "notes": self.notes}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> ColumnAccount:
        """What `to_json` gave. KeyError or TypeError for anything else."""
        return cls([ColumnUse(**one) for one in given["columns"]], given["trains"], list(given["notes"]))

    def with_prefix(self, prefix: str) -> Iterator[ColumnUse]:
        """The uses with another name in a sample: "chosen." and "rejected." of the sides of a pair."""
        for one in self.uses:
            yield ColumnUse(one.column, one.use, None if one.name is None else prefix + one.name, one.why)

    def lines(self) -> list[str]:
        """A line for each kind of use that there is, one for what is trained, and the notes."""
        out = [f"{use}: {', '.join(map(str, uses))}" for use in _USES if (uses := self.select_uses(use))]
        return [*out, *([f"trained: {self.trains}"] if self.trains else []), *self.notes]

    def __str__(self) -> str:
        return "; ".join(self.lines())

    def __len__(self) -> int:
        return len(self.uses)

    def __getitem__(self, index: Any) -> Any:
        return self.uses[index]


def joined(accounts: Iterable[tuple[str, ColumnAccount]]) -> ColumnAccount:
    """The account of an input that is read once for each side: uses under "PREFIX.NAME"; what no side reads, once."""
    sides = list(accounts)
    taken = {use.column for _, account in sides for use in account if use.name is not None}
    first = sides[0][1] if sides else ColumnAccount()
    out = ColumnAccount(trains=first.trains, notes=list(first.notes))
    for prefix, account in sides:
        out.uses += [use for use in account.with_prefix(prefix) if use.name is not None]
    for use in (use for _, account in sides for use in account):
        if use.column not in taken:
            taken.add(use.column)
            out.uses.append(use)
    return out
