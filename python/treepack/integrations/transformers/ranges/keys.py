"""Keys and values of rows that later ranges need, layer by layer, and the gradients that come back for them.

    first pass of range i     its keys and values at the rows that later ranges need are kept, as constants
    pass of a later range j   [those of its ancestors, its own] -> attention; backward: gradients of the ancestors are
                              added up where they are kept
    backward pass of range i  what has been added up enters the gradients of its own keys and values

All three happen in one identity around each layer's keys (and values), `_Join`. So there are no leaves to keep apart:
gradient checkpointing of either kind runs the layer again and finds the same constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Chain", "RangeKeys"]

_KEYS, _VALUES = 0, 1


class Chain:
    """The rows of a range that later ranges need: their keys and values by layer, and the gradients of these."""

    def __init__(self, rows: Tensor):
        self.rows = rows
        """(c,) int64, counted from the first row of the range; each is an ancestor of the next."""
        self.kept: dict[tuple[Any, int], Tensor] = {}
        self.gradients: dict[tuple[Any, int], Tensor] = {}
        self._needed = True

    def keep(self, at: tuple[Any, int], x: Tensor) -> None:
        """Keeps (1, H, c, D) of (1, H, n, D). Under recomputation it is there already, and the same."""
        if self._needed and at not in self.kept:
            self.kept[at] = x.index_select(2, self.rows)

    def drop_kept(self) -> None:
        """No later range needs them any more; the gradients stay."""
        self._needed = False
        self.kept.clear()

    def add(self, at: tuple[Any, int], g: Tensor) -> None:
        """Adds a gradient (1, H, m, D) of the first m rows. Many ranges add to one row, so half precision is added up
        in float32."""
        found = self.gradients.get(at)
        if found is None:
            kept = self.kept[at]
            found = torch.zeros_like(kept, dtype=torch.promote_types(kept.dtype, torch.float32))
            self.gradients[at] = found
        found[:, :, : g.shape[2]] += g

    def pour(self, at: tuple[Any, int], g: Tensor) -> Tensor:
        """The gradient (1, H, n, D) of the range's own keys and what was added up for them."""
        found = self.gradients.pop(at, None)
        if found is None:
            return g
        g = g.clone(memory_format=torch.contiguous_format)
        # Every row is there once, so no order matters.
        g[:, :, self.rows] = (g[:, :, self.rows].to(found.dtype) + found).to(g.dtype)
        return g


class RangeKeys:
    """The keys and values around one range: those above it, and those of its own that others need."""

    def __init__(self, above: list[tuple[Chain, int]], padding: int, own: Chain | None):
        """
        Args:
            above: the chains of earlier ranges in their order, and how many rows of each are ancestors of this range.
            padding: rows in front of them, for the kernels.
            own: what of this range later ones need.
        """
        self.above, self.padding, self.own = above, padding, own

    def before(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Keys and values (1, H, n, D) of a layer -> (1, H, padding + ancestors + n, D)."""
        if self.above or self.own is not None:
            key, value = _Join.apply(key, self, (module, _KEYS)), _Join.apply(value, self, (module, _VALUES))
        return query, key, value, sinks

    def after(self, out: Tensor) -> Tensor:
        return out


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: RangeKeys, at: tuple[Any, int]) -> Tensor:
        ctx.keys, ctx.at = keys, at
        if keys.own is not None:
            keys.own.keep(at, x)
        if not keys.above:
            return x.view_as(x)
        padding = x.new_zeros(1, x.shape[1], keys.padding, x.shape[3])
        return torch.cat([padding, *(chain.kept[at][:, :, :count] for chain, count in keys.above), x], 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        keys, at = ctx.keys, ctx.at
        row = keys.padding
        for chain, count in keys.above:
            chain.add(at, g[:, :, row : row + count])
            row += count
        g = g[:, :, row:]
        return (g if keys.own is None else keys.own.pour(at, g)), None, None
