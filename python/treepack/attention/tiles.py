"""Which tiles of the attention matrix hold a visible pair: from `subtree_end`, in plain torch, on any device.

Per key tile n and query tile m (rows past N left out):

    visible   n0 < m1  and  max(subtree_end in n) > m0              (padding left out: then some query sees some key)
    full      n1 - 1 <= m0  and  min(subtree_end in n) >= m1        (then every query sees every key: no mask)
    partial   visible and not full
    sliding window w:  visible also needs  min(depth in m) - max(depth in n) < w,   full  max(depth in m) - min(depth
        in n) < w

The lists of one tile size, as the kernels read them:

    rows   (tiles, 4) int32   start, runs, full tiles in them, partials of each query tile
    items  (T,) int32         from start: first, last (exclusive) of each run of full tiles, then the partial tiles
    one by one, all ascending; two spare numbers at the end, which the walk over the last runs may read

A run shorter than `MIN_RUN` is kept as partial tiles: always right, and cheaper than draining the kernel's pipeline
for it. A long run is two numbers however
long it is. The host packer writes the same content without gaps (rust/tiles.rs); made here, row m starts at m (m +
1) / 2, the most that rows before it
can need, so that nothing waits for the device and the call can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

MIN_RUN = 2
LIST_SIZES = (128, 64)  # tile sizes for which lists are made: the forward kernel reads the first, dQ the second
_CHUNK = 1 << 24  # cells of the tile matrix worked on at a time
NO_ITEM = -(1 << 31)


def _per_tile(values: Tensor, block: int, fill: int, largest: bool) -> Tensor:
    """The largest or smallest value in each tile of `block`; places past the end count as `fill`."""
    n = values.shape[0]
    tiles = -(-n // block)
    padded = torch.cat([values.to(torch.int32), values.new_full((tiles * block - n,), fill, dtype=torch.int32)]).view(
        tiles, block
    )
    return padded.amax(1) if largest else padded.amin(1)


def _relation(
    subtree_end: Tensor,
    depth: Tensor | None,
    window: int | None,
    block_q: int,
    block_k: int,
    q_tiles: slice,
    k_tiles: slice,
) -> tuple[Tensor, Tensor]:
    """`(visible, full)`, bool, for a rectangle of the tile matrix."""
    n = subtree_end.shape[0]
    device = subtree_end.device
    m0 = torch.arange(q_tiles.start, q_tiles.stop, device=device, dtype=torch.int32)[:, None] * block_q
    m1 = (m0 + block_q).clamp(max=n)
    n0 = torch.arange(k_tiles.start, k_tiles.stop, device=device, dtype=torch.int32)[None, :] * block_k
    seen_until = torch.where(subtree_end > torch.arange(n, device=device), subtree_end, 0)  # padding is seen by nothing
    visible = (n0 < m1) & (_per_tile(seen_until, block_k, 0, True)[None, k_tiles] > m0)
    full = (n0 + block_k - 1 <= m0) & (_per_tile(subtree_end, block_k, n, False)[None, k_tiles] >= m1)
    if window is not None and depth is not None:
        largest = torch.iinfo(torch.int32).max // 2
        above = (
            _per_tile(depth, block_q, largest, False)[q_tiles, None] - _per_tile(depth, block_k, 0, True)[None, k_tiles]
        )
        below = (
            _per_tile(depth, block_q, 0, True)[q_tiles, None] - _per_tile(depth, block_k, largest, False)[None, k_tiles]
        )
        visible &= above < window
        full &= below < window
    return visible, full


def tile_relation(
    subtree_end: Tensor, block_q: int, block_k: int, *, depth: Tensor | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """`(partial, full)`, each (query tiles, key tiles) bool: the dense form, for kernels that want it."""
    n = subtree_end.shape[0]
    visible, full = _relation(
        subtree_end, depth, window, block_q, block_k, slice(0, -(-n // block_q)), slice(0, -(-n // block_k))
    )
    return visible & ~full, full


def items_capacity(tiles: int) -> int:
    """Length of `items` made here: a triangle, one place for what is not kept, and two spare ones."""
    return tiles * (tiles + 1) // 2 + 3


def tile_lists(
    subtree_end: Tensor,
    block: int,
    *,
    depth: Tensor | None = None,
    window: int | None = None,
    transpose: bool = False,
    above: int = 0,
) -> tuple[Tensor, Tensor]:
    """`(rows, items)` for tiles of `block` x `block`, on the device of `subtree_end`, without waiting for it.

    Args:
        subtree_end: (N,) int32.
        block: tile size.
        depth, window: (N,) depth of each token and the sliding window; both or neither.
        transpose: list the query tiles of each key tile instead of the key tiles of each query tile.
        above: the queries are the rows from here on, a multiple of `block`.
    """
    tiles = -(-subtree_end.shape[0] // block)
    device = subtree_end.device
    index = torch.arange(tiles, device=device, dtype=torch.int64)
    # A run takes two numbers and at least MIN_RUN >= 2 tiles, so a row needs no more numbers than it has tiles at or
    # below the diagonal.
    needs = tiles - index if transpose else index + 1
    starts = needs.cumsum(0) - needs
    capacity = items_capacity(tiles)
    items = torch.zeros(capacity, dtype=torch.int32, device=device)
    counts = []
    step = max(1, _CHUNK // max(tiles, 1))
    for first in range(0, tiles, step):
        some, every = slice(first, min(first + step, tiles)), slice(0, tiles)
        visible, full = _relation(
            subtree_end, depth, window, block, block, *((every, some) if transpose else (some, every))
        )
        if above:
            queries = index[every if transpose else some, None] >= above // block
            visible, full = visible & queries, full & queries
        if transpose:
            visible, full = visible.T, full.T
        counts.append(_write_rows(visible, full, starts[some], index, items, capacity))
    return torch.cat([starts[:, None], torch.cat(counts)], dim=1).to(torch.int32), items


def tile_schedule(subtree_end: Tensor, rows: Tensor, above: int = 0) -> Tensor:
    """(tiles, 4) int32 from the lists of 128: the order in which the Hopper kernels take tiles, and key tiles' ranges.

        [i, 0]  the query tile with the i-th longest list; the queries are the rows from `above` on, tiles before them
                come last
        [i, 1]  the key tile with the i-th longest range of queries
        [n, 2]  largest subtree end in key tile n, padding left out
        [n, 3]  smallest subtree end in key tile n, padding included

    On the device of `subtree_end`, without waiting for it.
    """
    n, block = subtree_end.shape[0], LIST_SIZES[0]
    index = torch.arange(n, device=subtree_end.device, dtype=torch.int32)
    largest = _per_tile(torch.where(subtree_end > index, subtree_end, 0), block, 0, True)
    smallest = _per_tile(subtree_end, block, n, False)
    first = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32) * block
    lengths = torch.where(first < above, -1, rows[:, 2] + rows[:, 3])
    queries = torch.argsort(lengths, descending=True, stable=True)
    keys = torch.argsort(largest - first.clamp(min=above), descending=True, stable=True)
    return torch.stack([queries.to(torch.int32), keys.to(torch.int32), largest, smallest], dim=1)


def schedule_capacity(tiles: int, queries: int) -> int:
    """Length of `window_schedule` for key tiles of 128 and query tiles of 64."""
    return 8 * tiles + tiles * queries - tiles * (tiles - 1) + 3


def window_schedule(subtree_end: Tensor, depth: Tensor, window: int, rows: Tensor, above: int = 0) -> Tensor:
    """`tile_schedule` for a sliding window, (8 tiles + T,) int32: a window cuts the queries of a key tile into pieces,
    so the Hopper dK/dV reads lists.

        [4 i + c]             column c of the schedule: 0 from the window's lists of 128; 1 by the number of query
                              tiles; 2 the end of the range, were they side by side, for `backward_items`
        [4 (tiles + n) + c]   start, runs, full tiles in them, partials of key tile n, as `rows` of the lists
        [8 tiles + start ..]  its `items`: query tiles of 64

    Args:
        subtree_end, depth: (N,) int32.
        window: in tokens.
        rows: (tiles, 4), of the window's lists of 128.
        above: the queries are the rows from here on, a multiple of 128.

    On the device of `subtree_end`, without waiting for it.
    """
    block_k, block_q = LIST_SIZES
    tiles, queries = rows.shape[0], -(-subtree_end.shape[0] // block_q)
    index = torch.arange(queries, device=subtree_end.device, dtype=torch.int64)
    keys = index[:tiles]
    needs = queries - 2 * keys  # the query tiles at or below the diagonal
    starts = needs.cumsum(0) - needs
    capacity = schedule_capacity(tiles, queries) - 8 * tiles
    items = torch.zeros(capacity, dtype=torch.int32, device=subtree_end.device)
    counts = []
    step = max(1, _CHUNK // max(queries, 1))
    for first in range(0, tiles, step):
        some = slice(first, min(first + step, tiles))
        visible, full = _relation(subtree_end, depth, window, block_q, block_k, slice(0, queries), some)
        there = index[:, None] >= above // block_q
        counts.append(_write_rows((visible & there).T, (full & there).T, starts[some], index, items, capacity))
    lists = torch.cat([starts[:, None], torch.cat(counts)], dim=1)
    seen = lists[:, 2] + lists[:, 3]
    schedule = tile_schedule(subtree_end, rows, above).clone()
    schedule[:, 1] = torch.argsort(seen, descending=True, stable=True)
    schedule[:, 2] = (block_k * keys).clamp(min=above) + block_q * seen
    return torch.cat([schedule.flatten(), lists.flatten().to(torch.int32), items])


def most_split(tiles: int, heads: int, kv_heads: int, processors: int, split: bool | None = None) -> int:
    """The most key tiles that `backward_items` can split: every one that it finds long takes over 1.1 / processors of
    all work, kv_heads times."""
    if heads == kv_heads or split is False:
        return 0
    # sym_min: a compiler must not guard on which of the two is less.
    return tiles if split else cast(int, torch.sym_min(tiles, 10 * processors // (11 * kv_heads)))


def backward_items(
    schedule: Tensor, heads: int, kv_heads: int, processors: int, split: bool | None = None, above: int = 0
) -> Tensor:
    """What each program of the Hopper dK/dV computes, (1 + items,) int32: the longest item first, so that no processor
    is left with one at the end.

        [0]      S, the number of split key tiles: those whose item, were it not split, would take over 1.1 times what
                 one of the processors gets of the whole. They are the first S of the schedule's key tiles.
        [1 + i]  v >= 0             key tile v // kv_heads, all query heads of K/V head v % kv_heads
                 v = -1 - (s H + h) key tile number s of the schedule, query head h alone
                 NO_ITEM            nothing: S is known on the device only, so there is room for the most items

    Args:
        schedule: of `tile_schedule`.
        heads, kv_heads: of the layer.
        processors: multiprocessors of the device.
        split: True: split every tile; False: none; None: by the rule above.
        above: the queries are the rows from here on.
    """
    tiles, group = schedule.shape[0], heads // kv_heads
    if group == 1:
        split = False
    index = torch.arange(tiles, device=schedule.device)
    by_length = schedule[:, 1].long()
    # Query tiles of 64 that see a key tile, in the order of the schedule: longest first.
    first = (LIST_SIZES[0] * by_length).clamp(min=above)
    steps = (schedule[:, 2][by_length] - first + 63).clamp(min=63) // 64
    if split is None:
        long = steps * (10 * processors) > 11 * kv_heads * steps.sum()
    else:
        long = torch.full_like(index, split, dtype=torch.bool)
    order = torch.argsort(torch.where(long, steps, steps * group), descending=True, stable=True)
    # An item is `first + sign * (its number within the tile)`.
    first = torch.where(long, -1 - heads * index, kv_heads * by_length)
    counts, first, sign = torch.stack([torch.where(long, heads, kv_heads), first, torch.where(long, -1, 1)])[:, order]
    ends = counts.cumsum(0)
    most = most_split(tiles, heads, kv_heads, processors, split)
    item = torch.arange(tiles * kv_heads + most * (heads - kv_heads), device=schedule.device)
    rank = torch.searchsorted(ends, item, right=True).clamp(max=tiles - 1)
    values = (first - sign * (ends - counts))[rank] + sign[rank] * item
    values = torch.where(item < ends[-1], values, NO_ITEM)
    return torch.cat([long.sum()[None], values]).to(torch.int32)


def _write_rows(visible: Tensor, full: Tensor, starts: Tensor, index: Tensor, items: Tensor, capacity: int) -> Tensor:
    """Writes the rows of one chunk into `items`; returns their (runs, full tiles, partials), (rows, 3)
    int64."""
    full = _long_runs(full)
    partial = visible & ~full
    edge = torch.zeros_like(full[:, :1])
    opens = full & ~torch.cat([edge, full[:, :-1]], dim=1)
    closes = full & ~torch.cat([full[:, 1:], edge], dim=1)
    run = opens.cumsum(1) - 1
    runs = opens.sum(1)
    base = starts[:, None]
    places = (
        (opens, base + 2 * run, index),
        (closes, base + 2 * run + 1, index + 1),
        (partial, base + 2 * runs[:, None] + partial.cumsum(1) - 1, index),
    )
    for chosen, place, value in places:  # what is not chosen lands in the last place, which nobody reads
        place = torch.where(chosen, place, capacity - 3)
        items.scatter_(0, place.flatten(), value[None, :].expand_as(place).flatten().to(torch.int32))
    return torch.stack([runs, full.sum(1), partial.sum(1)], dim=1)


def _long_runs(full: Tensor) -> Tensor:
    """`full` without the runs shorter than MIN_RUN: opened by a window of MIN_RUN along each row."""
    if MIN_RUN == 1:
        return full
    width = full.shape[1]
    padded = torch.nn.functional.pad(full, (MIN_RUN - 1, MIN_RUN - 1))
    whole = torch.ones_like(
        padded[:, : width + MIN_RUN - 1]
    )  # whole[j]: the MIN_RUN tiles that end at j - MIN_RUN + 1 ... are full
    for shift in range(MIN_RUN):
        whole &= padded[:, shift : shift + width + MIN_RUN - 1]
    kept = torch.zeros_like(full)
    for shift in range(MIN_RUN):
        kept |= whole[:, shift : shift + width]
    return kept
