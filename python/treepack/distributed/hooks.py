"""What the attention of one rank exchanges with the others, before and after it: the two forms of a tree over ranks.

    RowsHook     keys and values of the ancestors of its first row come from ranks before it; one exchange a layer
    HeadsHook    rows of some heads for some rows of all heads, and back; two exchanges a layer

Both keep the order of the rows, so attention is the same function of a tree in both; shapes are those of Hugging Face,
(1, H, n, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .exchange import Wire, exchanged
from .split import check_heads

__all__ = ["HeadsHook", "RowsHook"]

_Attended = tuple[Tensor, Tensor, Tensor, Tensor | None]


class RowsHook:
    """Each rank attends from its own rows, behind the keys of its ancestors."""

    def __init__(self, wire: Wire, send: Sequence[Tensor], receive: Sequence[int], padding: int):
        """
        Args:
            send: for each rank its ancestors among the rows of this one, int64, ascending.
            receive: how many ancestors come from each rank.
            padding: rows in front of them, for the kernels.
        """
        self.wire, self.receive, self.padding = wire, list(receive), padding
        self.rows = list(send)
        self.send = [len(rows) for rows in self.rows]
        self.sent = torch.cat(self.rows)

    def before(self, module: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> _Attended:
        """Keys and values (1, H, n, D) -> (1, H, padding + ancestors + n, D)."""
        key, value = _BehindAncestors.apply(key, value, self)
        return query, key, value, sinks

    def after(self, out: Tensor) -> Tensor:
        return out


class _BehindAncestors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, hook: RowsHook) -> tuple[Tensor, Tensor]:
        ctx.hook, both = hook, (key, value)
        found = _across(hook, [x.index_select(2, hook.sent) for x in both], hook.send, hook.receive)
        if not sum(hook.receive):
            return key.view_as(key), value.view_as(value)
        padding = [x.new_zeros(*x.shape[:2], hook.padding, x.shape[3]) for x in both]
        key, value = (torch.cat(parts, 2) for parts in zip(padding, found, both, strict=True))
        return key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hook, count = ctx.hook, sum(ctx.hook.receive)
        first = hook.padding + count if count else 0
        back = _across(hook, [g[:, :, first - count : first] for g in gradients], hook.receive, hook.send)
        both = zip(gradients, back, strict=True)
        return *(_with(g[0, :, first:], hook.rows, torch.split(x[0], hook.send, 1))[None] for g, x in both), None


def _across(hook: RowsHook, both: Sequence[Tensor], send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
    """Rows of keys and of values (1, H, s, D) to where they are needed -> those that come, in one exchange."""
    packed = torch.cat([x[0].transpose(0, 1).flatten(1) for x in both], 1)
    found = torch.split(hook.wire.exchange(packed, send, receive), [x.shape[1] * x.shape[3] for x in both], 1)
    return [x.reshape(len(x), y.shape[1], y.shape[3]).transpose(0, 1)[None] for x, y in zip(found, both, strict=True)]


def _with(g: Tensor, rows: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """The gradient (H, n, D) of a rank's own rows and what others found for some of them, (H, s, D) each: added up rank
    by rank, half precision in float32."""
    if not any(len(x) for x in rows):
        return g
    total = g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
    for at, part in zip(rows, parts, strict=True):
        total[:, at] += part  # a row is there once at most
    return total.to(g.dtype)


class HeadsHook:
    """Each rank attends from all rows, with its part of the heads."""

    def __init__(self, wire: Wire, sizes: Sequence[int]):
        """
        Args:
            sizes: how many rows each rank has.
        """
        self.wire, self.sizes = wire, list(sizes)
        self.own = [self.sizes[wire.rank]] * wire.size

    def before(self, module: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> _Attended:
        """(1, H, n, D) and (1, H_kv, n, D) of own rows -> (1, H / ranks, N, D) and (1, H_kv / ranks or 1, N, D)."""
        ranks, heads, kv_heads = self.wire.size, query.shape[1], key.shape[1]
        check_heads(type(module).__name__, heads, kv_heads, ranks)
        # Rank by rank the heads that it needs, of queries, keys and values: one exchange for all three.
        parts = [self._by_rank(x) for x in (query, key, value)]
        packed = torch.cat([x.flatten(2) for x in parts], 2).flatten(0, 1)
        found = exchanged(packed, self.wire, self.own, self.sizes)
        split = torch.split(found, [prod(x.shape[2:]) for x in parts], 1)
        query, key, value = (
            x.reshape(len(x), *y.shape[2:]).transpose(0, 1)[None] for x, y in zip(split, parts, strict=True)
        )
        if sinks is not None:
            sinks = sinks.reshape(ranks, -1)[self.wire.rank]
        return query, key, value, sinks

    def after(self, out: Tensor) -> Tensor:
        """(1, H / ranks, N, D) -> (1, H, n, D) of own rows."""
        rows = exchanged(out[0].transpose(0, 1), self.wire, self.sizes, self.own)
        rows = rows.view(self.wire.size, self.own[0], *rows.shape[1:]).transpose(1, 2).flatten(0, 1)[None]
        # A rank without rows runs one of padding.
        return rows if rows.shape[2] else torch.cat([rows, rows.new_zeros(*rows.shape[:2], 1, rows.shape[3])], 2)

    def _by_rank(self, x: Tensor) -> Tensor:
        """(1, H, n, D) -> (ranks, own rows, heads of a rank, D). A head that several ranks need is there several
        times; its gradients are added up in their order."""
        ranks, x = self.wire.size, x[0, :, : self.own[0]]
        if len(x) < ranks:
            x = x[:, None].expand(-1, ranks // len(x), -1, -1).flatten(0, 1)
        return x.reshape(ranks, len(x) // ranks, *x.shape[1:]).transpose(1, 2)
