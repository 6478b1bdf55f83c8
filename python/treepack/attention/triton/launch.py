# mypy: ignore-errors
"""Launches of the portable Triton kernels: tile sizes, layouts, grids. They fill buffers that `triton_op` gives them.

Nothing is keyed on N: a kernel compiles once per pair of head sizes, dtype, layout and set of features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..versions import COMPILE
from .backward import delta_kernel, dkv_kernel, dq_kernel
from .common import Tile, Tiles, delta_rows, matrix_view, padded_size, select_tiles, tile_source, tile_target
from .forward import forward_kernel

# Set by benches to try tile sizes: None = the fixed table.
tiles_override: Tiles | None = None
# Heads that walk the tiles side by side; None = one group (forward, dQ), all (dK/dV: the key tiles of a shared prompt
# are by far the longest programs, and none of them must start late).
section_override: int | None = None
dkv_section_override: int | None = None


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when they were imported), which the CPU
    can."""
    return not isinstance(forward_kernel, triton.runtime.JITFunction)


@functools.cache
def device_limits(index: int) -> tuple[int, int]:
    """(bytes of shared memory a block may use, multiprocessors) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


@functools.cache
def _device_tiles(index: int, head_size: int, value_size: int, itemsize: int) -> Tiles:
    major, _ = torch.cuda.get_device_capability(index)
    return select_tiles(head_size, value_size, itemsize, device_limits(index)[0], major)


def choose_tiles(q: Tensor, v: Tensor) -> Tiles:
    """Tile sizes for q and v; the CPU stands for the interpreter, and gets those of Hopper."""
    if tiles_override:
        return tiles_override
    sizes = q.shape[-1], v.shape[-1], q.element_size()
    return _device_tiles(q.device.index, *sizes) if q.is_cuda else select_tiles(*sizes, 1 << 30, 9)


def _row_tiles(x: Tensor, block: int) -> TensorDescriptor:
    """What dK/dV reads the rows of `lse` and `delta` through: tiles of (1, block), 0 past N."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [1, block])


def _end_tiles(subtree_end: Tensor, block: int) -> TensorDescriptor:
    """`subtree_end` as one row, for the masks: tiles of (1, block), 0 past N."""
    n = subtree_end.shape[0]
    if subtree_end.data_ptr() % 16:
        subtree_end = subtree_end.clone()
    return TensorDescriptor(subtree_end, [1, n], [max(4, -(-n // 4) * 4), 1], [1, block])


def _shared_arguments(q: Tensor, v: Tensor) -> dict[str, Any]:
    size, value_size = q.shape[-1], v.shape[-1]
    sizes = {"D": size, "DP": padded_size(size), "D_V": value_size, "DP_V": padded_size(value_size)}
    return {**sizes, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32", **COMPILE}


def forward(
    q, k, v, out, lse, sinks, subtree_end, depth, list_rows, list_items, factor: float, cap: float, window: int,
    softcap: bool,
) -> None:  # fmt: skip
    """Fills out, (rows of q, H, D_V), and lse (H, N), in base 2; the rows of q are the last of N. `list_*` are the
    128-lists, which this kernel reads whatever its tile; `factor` and `cap` give base-2 logits."""
    rows, heads, _ = q.shape
    n, kv_heads, _ = k.shape
    tile = choose_tiles(q, v).forward
    group = heads // kv_heads
    (q_arg, q_strides, q_layout), (k_arg, k_strides, k_layout), (v_arg, v_strides, v_layout) = (
        tile_source(q, tile.block_m, resident=True),
        tile_source(k, tile.block_n),
        tile_source(v, tile.block_n),
    )
    out_arg, out_layout = tile_target(out, tile.block_m)
    forward_kernel[(triton.cdiv(rows, tile.block_m) * heads,)](
        q_arg, k_arg, v_arg, out_arg, lse, subtree_end, _end_tiles(subtree_end, tile.block_n),
        depth if window else subtree_end,
        subtree_end if sinks is None else sinks.float().contiguous(), list_rows, list_items,
        *q_strides, *k_strides, *v_strides, factor, cap, window, lse.stride(0), n, n - rows, heads, group,
        section_override or group,
        BM=tile.block_m, BN=tile.block_n, LIST=128, Q_LAYOUT=q_layout, K_LAYOUT=k_layout, V_LAYOUT=v_layout,
        OUT_LAYOUT=out_layout,
        WINDOW=window > 0, SOFTCAP=softcap, HAS_SINKS=sinks is not None,
        num_warps=tile.warps, num_stages=tile.stages, **_shared_arguments(q, v),
    )  # fmt: skip


def delta(out, dout, dlse, delta) -> None:
    """Fills delta (H, N)."""
    n, heads, size = out.shape
    block = delta_rows(size)
    delta_kernel[(triton.cdiv(n, block) * heads,)](
        out, dout, delta if dlse is None else dlse, delta, *dout.stride(), delta.stride(0), n, heads,
        BM=block, D_V=size, DP_V=padded_size(size), HAS_DLSE=dlse is not None, num_warps=4, **COMPILE)  # fmt: skip


def dq(
    q, k, v, dout, dq, lse, delta, subtree_end, depth, lists, factor: float, cap: float, window: int, softcap: bool,
    grad_scale: float,
) -> None:  # fmt: skip
    """Fills dq, as q. `lists` are rows and items of 128, then of 64: the finest no finer than the tile is read."""
    queries, heads, _ = q.shape
    n, kv_heads, _ = k.shape
    tile = choose_tiles(q, v).dq
    rows, items, size_of_list = (*lists[:2], 128) if tile.block_m > 64 else (*lists[2:], 64)
    sources = [
        tile_source(q, tile.block_m, resident=True), tile_source(k, tile.block_n), tile_source(v, tile.block_n),
        tile_source(dout, tile.block_m, resident=True)]  # fmt: skip
    target, layout = tile_target(dq, tile.block_m)
    group = heads // kv_heads
    dq_kernel[(triton.cdiv(queries, tile.block_m) * heads,)](
        *(source[0] for source in sources), target, lse, delta, _end_tiles(subtree_end, tile.block_n),
        depth if window else subtree_end,
        rows, items, *(stride for source in sources for stride in source[1]), factor, cap, window, grad_scale,
        lse.stride(0), n, n - queries, heads, group, section_override or group,
        BM=tile.block_m, BN=tile.block_n, LIST=size_of_list, Q_LAYOUT=sources[0][2], K_LAYOUT=sources[1][2],
        V_LAYOUT=sources[2][2],
        DO_LAYOUT=sources[3][2], DQ_LAYOUT=layout, num_warps=tile.warps, num_stages=tile.stages,
        WINDOW=window > 0, SOFTCAP=softcap, **_shared_arguments(q, v),
    )  # fmt: skip


def dkv_tile(q: Tensor, v: Tensor, window: int) -> Tile:
    """The tile of dK/dV; the transposed lists of a window are made for 64."""
    tile = choose_tiles(q, v).dkv
    return tile._replace(block_m=min(tile.block_m, 64), block_n=min(tile.block_n, 64)) if window else tile


def dkv(
    q, k, v, dout, dk, dv, lse, delta, subtree_end, depth, list_rows, list_items, factor: float, cap: float,
    window: int, softcap: bool, grad_scale: float, split: bool,
) -> None:  # fmt: skip
    """Fills dk and dv: of their dtype and the shapes of k and v, or with `split` float32 parts of single query heads,
    H instead of H_kv."""
    queries, heads, _ = q.shape
    n, kv_heads, _ = k.shape
    tile = dkv_tile(q, v, window)
    group = heads // kv_heads
    sources = [
        tile_source(q, tile.block_m),
        tile_source(k, tile.block_n, resident=True),
        tile_source(v, tile.block_n, resident=True),
        tile_source(dout, tile.block_m),
    ]
    (dk_arg, dk_layout), (dv_arg, dv_layout) = (tile_target(x, tile.block_n) for x in (dk, dv))
    parts = heads if split else kv_heads
    dkv_kernel[(triton.cdiv(n, tile.block_n) * parts,)](
        *(source[0] for source in sources), dk_arg, dv_arg, _row_tiles(lse, tile.block_m),
        _row_tiles(delta, tile.block_m), subtree_end, depth if window else subtree_end, list_rows, list_items,
        *(stride for source in sources for stride in source[1]), factor, cap, window, grad_scale, n,
        n - queries, heads, group, 1 if split else group, dkv_section_override or parts,
        BM=tile.block_m, BN=tile.block_n, LIST=64, Q_LAYOUT=sources[0][2], K_LAYOUT=sources[1][2],
        V_LAYOUT=sources[2][2],
        DO_LAYOUT=sources[3][2], DK_LAYOUT=dk_layout, DV_LAYOUT=dv_layout, num_warps=tile.warps, num_stages=tile.stages,
        WINDOW=window > 0, SOFTCAP=softcap, **_shared_arguments(q, v),
    )  # fmt: skip


def is_scattered(x: Tensor) -> bool:
    """Whether a copy of x, which is read often, pays: its heads lie neither side by side nor below each other."""
    return matrix_view(x) is None
