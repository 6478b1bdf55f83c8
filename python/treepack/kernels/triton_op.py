# mypy: ignore-errors
"""Tree attention by the Triton kernels as two operators of torch: `treepack::tree_attention` and its backward.

Operators, so that `torch.compile`, both kinds of activation checkpointing and CUDA graphs see one opaque call whose
metadata are plain int32 tensors.
Nothing here waits for the device, and nothing is keyed on N: a kernel compiles once per head size, dtype, layout and
set of features.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .triton_backward import delta_kernel, dkv_kernel, dq_kernel
from .triton_common import POINTERS, Tile, Tiles, padded_size, select_tiles, tile_source, tile_target
from .triton_forward import forward_kernel

LN2 = 0.6931471805599453
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Set by benches to try tile sizes, and by tests to force both forms of dK/dV: None = the fixed table, the rule in
# `_split_heads`.
tiles_override: Tiles | None = None
split_heads_override: bool | None = None
# Heads that walk the tiles side by side; None = one group (forward, dQ), all (dK/dV: the key tiles of a shared prompt
# are by far the longest programs, and none of them must start late).
section_override: int | None = None
dkv_section_override: int | None = None


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when they were imported), which the CPU
    can."""
    return not isinstance(forward_kernel, triton.runtime.JITFunction)


@functools.cache
def _device(index: int) -> tuple[int, int]:
    """(bytes of shared memory a block may use, multiprocessors) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


def _choose(q: Tensor) -> tuple[Tiles, int]:
    """(tile sizes, multiprocessors) for q; the CPU stands for the interpreter."""
    shared, processors = _device(q.device.index) if q.is_cuda else (1 << 30, 1)
    return tiles_override or select_tiles(q.shape[-1], q.element_size(), shared), processors


def _split_heads(n: int, block: int, heads: int, kv_heads: int, processors: int) -> bool:
    """Whether dK/dV runs one program per query head (float32 parts, then a sum over the group) instead of looping
    over the group.

    The programs of the looped form are `key tiles x kv_heads`, and the one of the shared prompt, which every query
    sees, is far longer than the mean: it decides
    the time when there are few rounds of programs on the chip. The number of rounds below which splitting pays grows
    with the number of tiles.
    """
    if heads == kv_heads:
        return False
    if split_heads_override is not None:
        return split_heads_override
    tiles = -(-n // block)
    return tiles * kv_heads < 2 * processors * (1.5 + tiles / 64)


def _scales(scale: float, softcap: float) -> tuple[float, float]:
    """(factor on q.k, factor on its tanh) that give base-2 logits; the second is unused without a cap."""
    return (scale / softcap, softcap / LN2) if softcap > 0 else (scale / LN2, 1.0)


def _row_width(n: int) -> int:
    """Floats from one head's row of `lse` or `delta` to the next: whole 16 bytes, as descriptors want."""
    return max(4, -(-n // 4) * 4)


def _padded_rows(x: Tensor) -> Tensor:
    """A float32 (H, N) tensor with rows `_row_width` apart; a copy only where autograd or a compiler made another."""
    heads, n = x.shape
    width = _row_width(n)
    if x.stride(1) == 1 and x.stride(0) == width and x.data_ptr() % 16 == 0:
        return x
    padded = x.new_zeros(heads, width)
    padded[:, :n] = x
    return padded[:, :n]


def _row_tiles(x: Tensor, block: int) -> TensorDescriptor:
    """What dK/dV reads the rows of `lse` and `delta` through: tiles of (1, block), 0 past N."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [1, block])


def _end_tiles(subtree_end: Tensor, block: int) -> TensorDescriptor:
    """`subtree_end` as one row, for the masks: tiles of (1, block), 0 past N."""
    n = subtree_end.shape[0]
    if subtree_end.data_ptr() % 16:
        subtree_end = subtree_end.clone()
    return TensorDescriptor(subtree_end, [1, n], [_row_width(n), 1], [1, block])


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that a kernel fills. Every buffer comes from here, so that a test can put guards around it."""
    return like.new_empty(shape, dtype=dtype or like.dtype)


def _shared_arguments(q: Tensor) -> dict[str, Any]:
    size = q.shape[-1]
    return {"D": size, "DP": padded_size(size), "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32"}


def _list(tile_rows: int, rows128, items128, rows64, items64) -> tuple[Tensor, Tensor, int]:
    """The lists that a kernel with query tiles of `tile_rows` reads: the finest that is no finer than the tile."""
    return (rows128, items128, 128) if tile_rows > 64 else (rows64, items64, 64)


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, subtree_end: Tensor, depth: Tensor | None,
    rows128: Tensor, items128: Tensor, rows64: Tensor, items64: Tensor, rows_window: Tensor | None,
    items_window: Tensor | None,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (N, H, D), lse2 (H, N) float32) for q (N, H, D), k and v (N, H_kv, D) of any strides.

    `window` and `softcap` are 0 where unset. `*_window` are the transposed 64-lists, read by the backward pass when
    a window is set.
    """
    n, heads, size = q.shape
    tile = _choose(q)[0].forward
    out = _empty(q, n, heads, size)
    lse = _empty(q, heads, _row_width(n), dtype=torch.float32)[:, :n]
    if n == 0:
        return out, lse
    # The forward kernel reads the 128-lists whatever its tile: the 64-lists are made only where a backward pass will
    # follow.
    factor, cap = _scales(scale, softcap)
    group = heads // k.shape[1]
    (q_arg, q_strides, q_layout), (k_arg, k_strides, k_layout), (v_arg, v_strides, v_layout) = (
        tile_source(q, tile.block_m, resident=True), tile_source(k, tile.block_n), tile_source(v,
        tile.block_n))  # fmt: skip
    out_arg, out_layout = tile_target(out, tile.block_m)
    with _on(q):
        forward_kernel[(triton.cdiv(n, tile.block_m) * heads,)](
            q_arg, k_arg, v_arg, out_arg, lse, subtree_end, _end_tiles(subtree_end, tile.block_n),
            depth if window else subtree_end,
            subtree_end if sinks is None else sinks.float().contiguous(), rows128, items128,
            *q_strides, *k_strides, *v_strides, factor, cap, window, lse.stride(0), n, heads, group,
            section_override or group,
            BM=tile.block_m, BN=tile.block_n, LIST=128, Q_LAYOUT=q_layout, K_LAYOUT=k_layout, V_LAYOUT=v_layout,
            OUT_LAYOUT=out_layout,
            WINDOW=window > 0, SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None,
            num_warps=tile.warps, num_stages=tile.stages, **_shared_arguments(q),
        )  # fmt: skip
    return out, lse


tree_attention_forward = torch.library.custom_op("treepack::tree_attention", forward_pass, mutates_args=())


@tree_attention_forward.register_fake
def _(
    q,
    k,
    v,
    sinks,
    subtree_end,
    depth,
    rows128,
    items128,
    rows64,
    items64,
    rows_window,
    items_window,
    scale,
    window,
    softcap,
):
    n, heads, size = q.shape
    return q.new_empty(n, heads, size), q.new_empty(heads, (n + 3) // 4 * 4, dtype=torch.float32)[:, :n]


def backward_pass(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, subtree_end: Tensor,
    depth: Tensor | None,
    rows128: Tensor, items128: Tensor, rows64: Tensor, items64: Tensor, rows_window: Tensor | None,
    items_window: Tensor | None,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, delta): contiguous (N, H, D), (N, H_kv, D) twice, and the float32 (H, N) row sums that a gradient
    of sinks needs."""
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    tiles, processors = _choose(q)
    dq, dk, dv = (_empty(x, *x.shape) for x in (q, k, v))
    delta = _empty(lse, heads, _row_width(n))[:, :n]
    if n == 0:
        return dq, dk, dv, delta
    shared = _shared_arguments(q)
    factor, cap = _scales(scale, softcap)
    features = {"WINDOW": window > 0, "SOFTCAP": softcap > 0}
    depth = depth if window else subtree_end
    if window:  # the transposed lists are made for one tile size
        tiles = tiles._replace(
            dkv=tiles.dkv._replace(block_m=min(tiles.dkv.block_m, 64), block_n=min(tiles.dkv.block_n, 64))
        )
    if tile_source(dout, 16)[2] == POINTERS and not dout.is_contiguous():
        dout = dout.contiguous()  # upstream gradients may be expanded scalars; q, k and v are never copied
    dlse = None if dlse is None else dlse.contiguous()
    lse = _padded_rows(lse)

    with _on(q):
        block = 64 if size <= 128 else 32
        delta_kernel[(triton.cdiv(n, block) * heads,)](
            out, dout, dlse if dlse is not None else lse, delta, *dout.stride(), delta.stride(0), n, heads,
            BM=block, D=size, DP=shared["DP"], HAS_DLSE=dlse is not None, num_warps=4)  # fmt: skip
        _launch_dkv(
            tiles.dkv, _split_heads(n, tiles.dkv.block_n, heads, kv_heads, processors), q, k, v, dout, dk, dv, lse,
            delta, subtree_end, depth,
            rows_window if window else rows64, items_window if window else items64, factor, cap, window, scale,
            features | shared)  # fmt: skip
        tile = tiles.dq
        rows, items, size_of_list = _list(tile.block_m, rows128, items128, rows64, items64)
        sources = [
            tile_source(q, tile.block_m, resident=True), tile_source(k, tile.block_n), tile_source(v, tile.block_n),
            tile_source(dout, tile.block_m, resident=True)]  # fmt: skip
        target, layout = tile_target(dq, tile.block_m)
        group = heads // kv_heads
        dq_kernel[(triton.cdiv(n, tile.block_m) * heads,)](
            *(source[0] for source in sources), target, lse, delta, _end_tiles(subtree_end, tile.block_n), depth,
            rows, items, *(stride for source in sources for stride in source[1]), factor, cap, window, scale,
            lse.stride(0), n, heads, group, section_override or group,
            BM=tile.block_m, BN=tile.block_n, LIST=size_of_list, Q_LAYOUT=sources[0][2], K_LAYOUT=sources[1][2],
            V_LAYOUT=sources[2][2],
            DO_LAYOUT=sources[3][2], DQ_LAYOUT=layout, num_warps=tile.warps, num_stages=tile.stages, **features,
            **shared,
        )  # fmt: skip
    return dq, dk, dv, delta


def _launch_dkv(
    tile: Tile,
    split: bool,
    q,
    k,
    v,
    dout,
    dk,
    dv,
    lse,
    delta,
    subtree_end,
    depth,
    rows,
    items,
    factor,
    cap,
    window,
    scale,
    flags: dict,
) -> None:
    """Fills dk and dv; with `split` through float32 parts of one query head each, summed in a fixed order."""
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    parts = [_empty(q, n, heads, size, dtype=torch.float32) for _ in range(2)] if split else [dk, dv]
    sources = [
        tile_source(q, tile.block_m), tile_source(k, tile.block_n, resident=True), tile_source(v, tile.block_n,
        resident=True),
        tile_source(dout, tile.block_m)]  # fmt: skip
    (dk_arg, layout), (dv_arg, _) = (tile_target(x, tile.block_n) for x in parts)
    dkv_kernel[(triton.cdiv(n, tile.block_n) * (heads if split else kv_heads),)](
        *(source[0] for source in sources), dk_arg, dv_arg, _row_tiles(lse, tile.block_m),
        _row_tiles(delta, tile.block_m), subtree_end, depth, rows, items,
        *(stride for source in sources for stride in source[1]), factor, cap, window, scale, n, heads, group,
        1 if split else group, dkv_section_override or (heads if split else kv_heads),
        BM=tile.block_m, BN=tile.block_n, LIST=64, Q_LAYOUT=sources[0][2], K_LAYOUT=sources[1][2],
        V_LAYOUT=sources[2][2],
        DO_LAYOUT=sources[3][2], DKV_LAYOUT=layout, num_warps=tile.warps, num_stages=tile.stages, **flags,
    )  # fmt: skip
    if split:
        for part, total in zip(parts, (dk, dv), strict=True):
            total.copy_(part.view(n, kv_heads, group, size).sum(2))


tree_attention_backward = torch.library.custom_op("treepack::tree_attention_backward", backward_pass, mutates_args=())


@tree_attention_backward.register_fake
def _(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    subtree_end,
    depth,
    rows128,
    items128,
    rows64,
    items64,
    rows_window,
    items_window,
    scale,
    window,
    softcap,
):
    heads, n = lse.shape
    delta = lse.new_empty(heads, (n + 3) // 4 * 4)[:, :n]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), delta


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, sinks, *metadata, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 15
    dout = torch.zeros_like(out) if dout is None else dout
    run = backward_pass if _is_plain(q) else tree_attention_backward
    dq, dk, dv, delta = run(
        dout, dlse, q, k, v, out, lse, *metadata, ctx.scale, ctx.window, ctx.softcap)  # fmt: skip
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        # A sink is a key of value 0: dS = P_sink * (0 - delta), at the rows that see anything.
        subtree_end = metadata[0]
        real = torch.arange(subtree_end.shape[0], device=subtree_end.device) < subtree_end
        p = torch.exp2(sinks.float()[:, None] / LN2 - lse)
        dsinks = -torch.where(real, p * delta, 0.0).sum(1).to(sinks.dtype)
    return (dq, dk, dv, dsinks) + (None,) * 11


tree_attention_forward.register_autograd(_backward, setup_context=_save)


class _Direct(torch.autograd.Function):
    """The operator without the dispatcher, which costs as much as a short kernel."""

    forward = staticmethod(lambda *inputs: forward_pass(*inputs))
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)


def _is_plain(x: Tensor) -> bool:
    """Whether nothing looks at operators: no compiler, no dispatch mode, no tensor subclass."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return plain and torch._C._len_torch_dispatch_stack() == 0


def attend(q: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """`tree_attention_forward`, by the shortest way."""
    return _Direct.apply(q, *inputs) if _is_plain(q) else tree_attention_forward(q, *inputs)


def _on(x: Tensor):
    """Makes the device of x the current one for a launch (Triton launches on the current device)."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _nowhere
    return torch.cuda.device(x.device)


class _Nowhere:
    def __enter__(self): ...

    def __exit__(self, *error): ...


_nowhere = _Nowhere()


@torch.library.custom_op("treepack::tile_lists", mutates_args=())
def tile_lists(
    subtree_end: Tensor, depth: Tensor | None, block: int, window: int, transpose: bool
) -> tuple[Tensor, Tensor]:
    """`tiles.tile_lists` as one operator; window 0 = none."""
    from . import tiles

    return tiles.tile_lists(subtree_end, block, depth=depth, window=window or None, transpose=transpose)


@tile_lists.register_fake
def _(subtree_end, depth, block, window, transpose):
    count = (subtree_end.shape[0] + block - 1) // block
    return subtree_end.new_empty(count, 4, dtype=torch.int32), subtree_end.new_empty(
        count * (count + 1) // 2 + 3, dtype=torch.int32
    )
