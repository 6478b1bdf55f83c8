"""Where two tiny samples differ between packed and alone: at which module, by how much, against how much rounding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import Rows
from .sketches import Key, Run

__all__ = ["Culprit", "Differences"]

_TIMES = 4  # the rounding that was measured
#: (least, most) that values may be off, by the bytes of a number: models make norms in float32 whatever their dtype. Of
#: two bytes with room: on an H200 a layer of a random model in bfloat16 was 0.031 off, and a leak is of the order of 1.
_ALLOWED = {8: (1e-5, 1e-3), 4: (5e-4, 3e-2), 2: (0.07, 0.3)}


class Culprit(NamedTuple):
    """The first module whose values differ although what it was given agrees."""

    path: str
    off: float
    """The largest difference of a token's values, as a share of their norm."""
    allowed: float
    sample: int
    """0 or 1: the sample with that token."""
    token: int
    later: bool
    """Tokens differ that come before the second branch."""


class Differences(NamedTuple):
    keys: list[Key]
    off: Tensor
    """(keys, 2, tokens): of both samples, packed against alone, each as a share of the norm of the token's values."""
    rounding: Tensor
    """(keys, tokens): of the first sample, alone, against itself with embeddings that are rounded otherwise."""
    prefix: int

    @classmethod
    def of(cls, rows: Rows, packed: Run, first: Run, second: Run, rounded: Run) -> Differences:
        runs = (packed, first, second, rounded)
        places = [{key: place for place, key in enumerate(run.keys)} for run in runs]
        keys = [key for key in packed.keys if all(key in place for place in places)]
        row, a, b, c = (
            run.sketches[[place[key] for key in keys]].double() for run, place in zip(runs, places, strict=True)
        )
        tokens = rows.prefix + rows.branch
        a, b, c = a[:, :tokens], b[:, :tokens], c[:, :tokens]
        samples = [_off(row[:, at], alone) for at, alone in zip(rows.of_samples(), (a, b), strict=True)]
        return cls(keys, torch.stack(samples, 1), _off(c, a), rows.prefix)

    def again(self, other: Differences) -> Differences:
        """What two pairs of samples agree in: the smaller difference of every token, the larger rounding."""
        places = {key: place for place, key in enumerate(other.keys)}
        both = [(mine, places[key]) for mine, key in enumerate(self.keys) if key in places]
        ours, theirs = [mine for mine, _ in both], [place for _, place in both]
        return Differences(
            [self.keys[mine] for mine in ours],
            torch.minimum(self.off[ours], other.off[theirs]),
            torch.maximum(self.rounding[ours], other.rounding[theirs]),
            self.prefix,
        )

    def culprit(self, itemsize: int) -> Culprit | None:
        """The first module, in the order in which they were done, whose output differs although its inputs agree; and
        whose parent's output differs too: a table that is made along the row, and read by depth, is no leak.

        Args:
            itemsize: bytes of the narrowest number that the model computes in.
        """
        allowed = self._allowed(*_ALLOWED[itemsize])
        differs = (self.off.amax((1, 2)) > allowed).tolist()
        given = {key[:2] for key, off in zip(self.keys, differs, strict=True) if off and key.side == "in"}
        made = {key.path for key, off in zip(self.keys, differs, strict=True) if off and key.side == "out"}
        seen = {key.path for key in self.keys if key.side == "out"}
        for at, key in enumerate(self.keys):
            if key.side == "out" and differs[at] and key[:2] not in given:
                parent = _parent(key.path, seen)
                if parent is None or parent in made:
                    return self._describe(at, float(allowed[at]))
        return None

    def _allowed(self, least: float, most: float) -> Tensor:
        """(keys,): how far apart values may be. What is measured is what becomes of rounding that was put in; of that,
        a module's output may have the share that its inputs have, and a rounding of its own."""
        off, rounding = self.off.amax((1, 2)), self.rounding.amax(-1)
        share = (off / rounding.clamp(min=1e-30)).clamp(max=1.0).tolist()
        inputs: dict[tuple[str, int], float] = {}
        for key, there in zip(self.keys, share, strict=True):
            if key.side == "in":
                inputs[key.path, key.call] = max(there, inputs.get((key.path, key.call), 0.0))
        shares = [inputs.get((key.path, key.call), 1.0) if key.side == "out" else 1.0 for key in self.keys]
        allowed: Tensor = least + _TIMES * rounding * rounding.new_tensor(shares)
        return allowed.clamp(max=most)

    def _describe(self, at: int, allowed: float) -> Culprit:
        off = self.off[at]
        sample, token = divmod(int(off.argmax()), off.shape[1])
        before = torch.cat([off[0], off[1, : self.prefix]])
        return Culprit(self.keys[at].path, float(off.max()), allowed, sample, token, bool((before > allowed).any()))


def _off(ours: Tensor, alone: Tensor) -> Tensor:
    """(keys, tokens), of sketches (keys, tokens, groups). A token whose values are small beside those of others (a gate
    that is closed) is measured by theirs. What is not finite tells nothing."""
    norm = alone.norm(dim=-1)
    scale = torch.maximum(norm, norm.median(-1, keepdim=True).values)
    off: Tensor = (ours - alone).norm(dim=-1) / scale.clamp(min=1e-30)
    return off.nan_to_num(0.0, posinf=0.0)


def _parent(path: str, seen: set[str]) -> str | None:
    """The nearest module around one of which there are values."""
    while path:
        path = path.rpartition(".")[0]
        if path in seen:
            return path
    return None
