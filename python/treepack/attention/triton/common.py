# mypy: ignore-errors
"""What the Triton kernels share: loading and storing tiles, the mask, soft-capped scores, and the fixed table of
tile sizes.

Axes: m = query row, n = key row, d = head column. D = head size of q and k, D_V = that of v and the output; DP and
DP_V = these rounded up to a power of two (the width of a tile).

A tensor reaches a kernel in one of four layouts, chosen on the host by `tile_source`:

    COLUMNS  a 2-D host descriptor over [N, H * D]; head h starts at column h * D. What Hugging Face's transposed
    views of [1, N, H, D] are.
    APART    the same with other columns between the heads; head h starts at column h * (stride of the heads). What
    the values of multi-head latent attention are: one projection gives those of a head beside its keys.
    ROWS     a 2-D host descriptor over [H * N, D]; head h starts at row h * N. What a contiguous [1, H, N, D] is.
    POINTERS any other strides: a pointer and three strides, 64-bit offsets. Slower, never wrong.

Tiles wider than D: with POINTERS the columns past D are 0. With COLUMNS they are the next head's values, which do no
harm where the other factor of each product is 0 there (so resident tiles are then loaded by POINTERS) and where the
result's columns past D are dropped. Nobody knows what lies between heads that are APART: no tile is wider there.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

POINTERS, COLUMNS, ROWS, APART = 0, 1, 2, 3
LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)  # finite: exp2(-inf - -inf) would be NaN in rows whose first tile is wholly masked


class Tile(NamedTuple):
    """Tile sizes of one kernel: rows, key rows, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tile sizes of the three kernels at one pair of head sizes."""

    forward: Tile
    dkv: Tile
    dq: Tile


# Head size (rounded up to a power of two) -> tiles, for 16-bit inputs on GPUs with 227 KB of shared memory a block.
# Chosen by measurement at 128 and by registers and shared memory elsewhere (docs/kernel.md): a fixed table, because
# autotuning on N would compile for every length.
LARGE = {
    16: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    32: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Tiles(Tile(64, 128, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
}
# The same for data-centre Blackwell (sm_100): there dK/dV keeps more of its tiles in shared memory, and with two stages
# it would need 257 KB at 256.
BLACKWELL = {**LARGE, 256: LARGE[256]._replace(dkv=Tile(64, 64, 8, 1))}
# The same for 99 KB and up (sm_80, sm_86, sm_89, sm_120, and whatever else): smaller tiles.
SMALL = {
    16: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    32: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# float32 (for tests): three TF32 products for each exact one need so many registers that only small tiles compile to
# anything sensible.
_TINY = Tile(16, 16, 4, 1)
FLOAT32 = {
    16: Tiles(*[Tile(32, 32, 4, 1)] * 3),
    32: Tiles(*[Tile(32, 32, 4, 1)] * 3),
    64: Tiles(*[Tile(32, 32, 4, 1)] * 3),
    128: Tiles(Tile(16, 32, 4, 1), _TINY, _TINY),
    256: Tiles(_TINY, _TINY, _TINY),
}
LARGE_SHARED_MEMORY = 200 * 1024


def padded_size(head_size: int) -> int:
    """The tile width of a head size: the next power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_size))


def select_tiles(head_size: int, value_size: int, itemsize: int, shared_memory: int, major: int) -> Tiles:
    """The tiles for the head sizes of q and k and of v, bytes per element, bytes of shared memory a block may use and
    the first number of the compute capability. Two sizes get the tiles of the larger one."""
    large = BLACKWELL if major >= 10 else LARGE
    table = FLOAT32 if itemsize == 4 else large if shared_memory >= LARGE_SHARED_MEMORY else SMALL
    return table[padded_size(max(head_size, value_size))]


def delta_rows(value_size: int) -> int:
    """Query rows of a program of the delta kernel."""
    return 64 if value_size <= 128 else 32


def tile_source(x: Tensor, rows: int, *, resident: bool = False):
    """What a kernel reads a (N, H, D) tensor through.

    Args:
        x: (N, H, D), any strides.
        rows: rows of a tile.
        resident: the tile is loaded once and is the factor that must be 0 past D (see above).

    Returns:
        `(argument, (stride_n, stride_h, stride_d), layout)`; strides that a descriptor has itself are 0.
    """
    width = padded_size(x.shape[-1])
    view = matrix_view(x, whole=not resident, apart=True)
    if view is None:
        return x, x.stride(), POINTERS
    shape, stride, layout = view
    strides = (0, x.stride(1), 0) if layout == APART else (0, 0, 0)
    return TensorDescriptor(x, shape, [stride, 1], [rows, width]), strides, layout


def matrix_view(x: Tensor, *, whole: bool = True, apart: bool = False):
    """A (N, H, D) tensor as one matrix that a descriptor can read: `(shape, row stride, layout)`, or None.

    Args:
        x: (N, H, D), any strides.
        whole: tiles wider than D may carry the next head's columns.
        apart: the layout may be APART.
    """
    n, heads, size = x.shape
    stride_n, stride_h, stride_d = x.stride()
    if n == 1:  # the stride of an axis of one is anything: one token must not compile a layout of its own
        stride_n = heads * size
    aligned = x.data_ptr() % 16 == 0 and stride_n * x.element_size() % 16 == 0 and stride_n > 0
    if aligned and stride_d == 1:
        exact = padded_size(size) == size
        if (stride_h == size or heads == 1) and stride_n >= heads * size and (whole or exact):
            return [n, heads * size], stride_n, COLUMNS
        if stride_h == n * stride_n and stride_n >= size:
            return [heads * n, size], stride_n, ROWS
        width = (heads - 1) * stride_h + size
        if apart and exact and stride_h > size and stride_n >= width:
            return [n, width], stride_n, APART
    return None


def tile_target(x: Tensor, rows: int):
    """What a kernel writes a contiguous (N, H, D) tensor through: `(argument, layout)`."""
    n, heads, size = x.shape
    if padded_size(size) == size:
        return TensorDescriptor(x, [n, heads * size], [heads * size, 1], [rows, size]), COLUMNS
    return x, POINTERS


@triton.jit
def load_tile(
    x,
    head,
    row,
    n_rows,
    stride_n,
    stride_h,
    stride_d,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Rows row .. row + TILE of a head, (TILE, DP)."""
    if LAYOUT == 1:
        tile = x.load([row, head * D])
    elif LAYOUT == 2:
        tile = x.load([head * n_rows + row, 0])
    elif LAYOUT == 3:
        tile = x.load([row, head * stride_h])
    else:
        r = row + tl.arange(0, TILE)
        c = tl.arange(0, DP)
        offsets = r[:, None].to(tl.int64) * stride_n + c[None, :].to(tl.int64) * stride_d
        inside = (r[:, None] < n_rows) & (c[None, :] < D)
        tile = tl.load(x + head.to(tl.int64) * stride_h + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    x, tile, head, row, n_rows, heads, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LAYOUT: tl.constexpr
):
    """Writes (TILE, DP) to rows row .. row + TILE of a head of a contiguous (N, heads, D) tensor; nothing past N or
    D."""
    if LAYOUT == 1:
        x.store([row, head * D], tile.to(x.dtype))
    else:
        r = row + tl.arange(0, TILE)
        c = tl.arange(0, DP)
        offsets = (r[:, None].to(tl.int64) * heads + head) * D + c[None, :]
        tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=(r[:, None] < n_rows) & (c[None, :] < D))


@triton.jit
def query_item(n_tiles, SECTION):
    """`(query tile, query head)` of this program: SECTION heads side by side walk the tiles, the last one first."""
    pid = tl.program_id(0)
    section = pid // (n_tiles * SECTION)
    within = pid - section * (n_tiles * SECTION)
    return n_tiles - 1 - within // SECTION, section * SECTION + within % SECTION


@triton.jit
def tile_list(LIST_ROWS, LIST_ITEMS, first, LIST: tl.constexpr, SPLIT: tl.constexpr):
    """`(items, runs, steps in them, partial tiles)` of the tile at row `first`: a pointer to the first run, the number
    of runs, of steps in them (SPLIT to a tile of the list), and of the partial tiles that follow the runs."""
    row = LIST_ROWS + (first // LIST) * 4
    items = LIST_ITEMS + tl.load(row)
    return items, tl.load(row + 1), tl.load(row + 2) * SPLIT, tl.load(row + 3)


@triton.jit
def next_full(run, at, last, SPLIT: tl.constexpr):
    """`(run, at, last)` of the step after step `at` of a run that ends at `last`: in it, or at the start of the next.

    For one loop over all runs: with a loop for each run the accumulators cross two loop edges, and ptxas serialises
    every wgmma (C7515). The lists end with two spare numbers: the step past the last run reads no memory but its own.
    """
    at += 1
    ended = at == last
    run += tl.where(ended, 2, 0)
    at = tl.where(ended, tl.load(run) * SPLIT, at)
    last = tl.where(ended, tl.load(run + 1) * SPLIT, last)
    return run, at, last


@triton.jit
def tanh(x):
    """tanh by exp2: exact at both ends (exp2 gives 0 or inf), about 1e-7 absolute in between."""
    return 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
