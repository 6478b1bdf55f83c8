# mypy: ignore-errors
"""dK and dV for Hopper: one program per item of `tiles.backward_items`, a key tile with all query heads of a K/V head,
or with one of them where that would take too long. Runs after dQ, which leaves delta.

    P^T = exp2(K Q^T - lse2)     dV = sum P^T dO     dP^T = V dO^T     dS^T = P^T * (dP^T - delta)
    dK = scale * sum dS^T Q

    step i       issue S^T = K Qi       issue dP^T = V dOi      wait S^T: P^T under dP^T's product
                 wait dP^T       pack both: P^T and dS^T are left factors from registers
                 issue dV += P^T dOi, dK += dS^T Qi, wait, release Qi and dOi

128 key rows (64 a consumer) with K and V resident, against 64 query rows: three buffers of Q, dO, lse and delta (by
TMA: by pointers lse and delta would be two dozen masked loads of 4 bytes a thread): 162 KB of shared memory at D = 128.

The queries of a key tile are one range, n0 .. max(subtree_end): masked while it may lie above the diagonal, unmasked up
to min(subtree_end), masked to the end. No list is read. A sliding window cuts the range into pieces: then the list of
the key tile is (`tiles.window_schedule`), masked tiles first. Both accumulators stay within a step (C7512, see dQ).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import (
    NO_ITEM,
    copy_out,
    copy_rows,
    depth_buffers,
    make_buffers,
    make_ring,
    pack,
    resident,
    tanh,
    unpack,
)
from .names import copy_to_shared


@gluon.jit
def _copy_queries(
    c, t, h, q_desc, dout_desc, lse_desc, delta_desc, depth_desc, q_ring, dout_ring, lse, delta, depths, N, ABOVE,
    BM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, Q_ROWS: gl.constexpr,
    DO_ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Fills use c of the rings with query tile t of head h."""
    s = c % q_ring.stages
    q_ring.acquire(c)  # the consumers release Q and dO, lse, delta and depths of one number together
    mbarrier.expect(q_ring.filled(c), BM * D * BYTES + BM * 4 * (1 + WINDOW))
    copy_rows(q_desc, q_ring.filled(c), q_ring.at(c), h, t * BM - ABOVE, N - ABOVE, D, Q_ROWS)
    copy_to_shared(lse_desc, [h, t * BM], q_ring.filled(c), lse.index(s))
    if WINDOW:
        copy_to_shared(depth_desc, [0, t * BM], q_ring.filled(c), depths.index(s))
    mbarrier.expect(dout_ring.filled(c), BM * DV * BYTES + BM * 4)
    copy_rows(dout_desc, dout_ring.filled(c), dout_ring.at(c), h, t * BM - ABOVE, N - ABOVE, DV, DO_ROWS)
    copy_to_shared(delta_desc, [h, t * BM], dout_ring.filled(c), delta.index(s))


@gluon.jit
def window_list(SCHEDULE, tile, N):
    """`(runs, their tiles in all, the partial tiles, their number)` of a key tile, in `tiles.window_schedule`: a
    pointer to its runs of full query tiles, and one to its partial ones."""
    tiles = (N + 127) // 128
    row = SCHEDULE + 4 * (tiles + tile)
    start = SCHEDULE + 8 * tiles + gl.load(row)
    return start, gl.load(row + 2), start + 2 * gl.load(row + 1), gl.load(row + 3)


@gluon.jit
def copy_all_queries(
    q_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, q_ring, dout_ring, lse, delta, depths, N, ABOVE,
    tile, first, stop, head, HEADS,
    BM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, Q_ROWS: gl.constexpr,
    DO_ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The query tiles of a key tile, for one head after another: first .. stop, or those of its window's list."""
    c = 0
    for g in range(HEADS):
        h = head + g
        if WINDOW:
            run, fulls, partial, partials = window_list(SCHEDULE, tile, N)
            for i in range(partials):
                _copy_queries(
                    c, gl.load(partial + i), h, q_desc, dout_desc, lse_desc, delta_desc, depth_desc, q_ring, dout_ring,
                    lse, delta, depths, N, ABOVE, BM, D, DV, BYTES, Q_ROWS, DO_ROWS, WINDOW
                )  # fmt: skip
                c += 1
            t = gl.load(run)
            for _ in range(fulls):
                _copy_queries(
                    c, t, h, q_desc, dout_desc, lse_desc, delta_desc, depth_desc, q_ring, dout_ring, lse, delta, depths,
                    N, ABOVE, BM, D, DV, BYTES, Q_ROWS, DO_ROWS, WINDOW
                )  # fmt: skip
                c += 1
                ended = t + 1 == gl.load(run + 1)  # the lists end with two spare numbers
                run = gl.where(ended, run + 2, run)
                t = gl.where(ended, gl.load(run), t + 1)
        else:
            for t in range(first, stop):
                _copy_queries(
                    c, t, h, q_desc, dout_desc, lse_desc, delta_desc, depth_desc, q_ring, dout_ring, lse, delta, depths,
                    N, ABOVE, BM, D, DV, BYTES, Q_ROWS, DO_ROWS, WINDOW
                )  # fmt: skip
                c += 1


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, kv_full, k_buffers, v_buffers,
    q_ring, dout_ring, lse, delta, depths, N, ABOVE, n0, first, stop, hk, head, HEADS,
    BM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, DO_ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(kv_full, 2 * 64 * (D + DV) * BYTES)
    for half in gl.static_range(2):
        copy_rows(k_desc, kv_full, k_buffers.index(half), hk, n0 + half * 64, N, D, K_ROWS)
        copy_rows(v_desc, kv_full, v_buffers.index(half), hk, n0 + half * 64, N, DV, V_ROWS)
    copy_all_queries(
        q_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, q_ring, dout_ring, lse, delta, depths, N, ABOVE,
        n0 // 128, first, stop, head, HEADS, BM, D, DV, BYTES, Q_ROWS, DO_ROWS, WINDOW
    )  # fmt: skip


@gluon.jit
def _step(
    c, t, dk, dv, k, vs, q_ring, dout_ring, lse_buffers, delta_buffers, depths, rows_n, end_n, too_deep, scale, cap,
    HALF: gl.constexpr, MASK: gl.constexpr, BM: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    LS: gl.constexpr, LO: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    """Query tile t, number c of this program; t is read with MASK only."""
    DTYPE: gl.constexpr = k.dtype
    zero = gl.zeros([64, BM], gl.float32, LS)
    q_ring.wait(c)
    s = warpgroup_mma(k, q_ring.at(c).permute([1, 0]), zero, use_acc=False, is_async=True)
    dout_ring.wait(c)
    v = resident(vs, HALF)
    dp = warpgroup_mma(v, dout_ring.at(c).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    factor = scale
    if SOFTCAP:
        s = tanh(s * scale)
        factor = cap
    p = gl.exp2(s * factor - lse_buffers.index(c % q_ring.stages).load(LS))
    if MASK:
        rows_m = gl.expand_dims(t * BM + gl.arange(0, BM, gl.SliceLayout(0, LS)), 0)
        seen = (gl.expand_dims(rows_n, 1) <= rows_m) & (rows_m < gl.expand_dims(end_n, 1))
        if WINDOW:
            seen = seen & (depths.index(c % q_ring.stages).load(LS) < gl.expand_dims(too_deep, 1))
        p = gl.where(seen, p, 0.0)
    if SOFTCAP:  # P for dV is packed first: from here on p holds it times the slope of tanh, as dS needs it
        packed = pack(p, DTYPE)
        p = p * (1.0 - s * s)
    else:
        delta = delta_buffers.index(c % q_ring.stages).load(LS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if SOFTCAP:
        delta = delta_buffers.index(c % q_ring.stages).load(LS)
    else:
        packed = pack(p, DTYPE)
    left = unpack(packed, DTYPE, gl.DotOperandLayout(0, LV, 2))
    ds = unpack(pack(p * (dp - delta), DTYPE), DTYPE, gl.DotOperandLayout(0, LO, 2))
    dv = warpgroup_mma(left, dout_ring.at(c), dv, is_async=True)
    dk = warpgroup_mma(ds, q_ring.at(c), dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    q_ring.release(c)
    return dk, dv


@gluon.jit
def store_part(PARTS, x, part, row, D: gl.constexpr, LAYOUT: gl.constexpr):
    """64 rows from `row` on of a float32 part, (128, D): `sum_kernel` adds those of a group."""
    rows = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    columns = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(PARTS + (part.to(gl.int64) * (128 * D) + rows * D + columns), x)


@gluon.jit
def _consume(
    dk_desc, dv_desc, DK_PARTS, DV_PARTS, END, DEPTH, SCHEDULE, kv_full, ks, vs, q_ring, dout_ring, lse, delta, depths,
    scale, cap, window, grad_scale, N, n0, first, full_stop, stop, hk, part, HEADS,
    HALF: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    rows_n = n0 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LS))
    end_n = gl.load(END + rows_n, mask=rows_n < N, other=0)
    too_deep = rows_n
    if WINDOW:  # the depth of the first token below that sees this one no more
        too_deep = gl.load(DEPTH + rows_n, mask=rows_n < N, other=0) + window
    k = ks.index(HALF)
    v = vs.index(HALF)
    dk = gl.zeros([64, D], gl.float32, LO)
    dv = gl.zeros([64, DV], gl.float32, LV)
    mbarrier.wait(kv_full, 0)
    c = 0
    full_start = gl.minimum(first + 128 // BM, stop)
    for _ in range(HEADS):
        if WINDOW:
            _, fulls, partial, partials = window_list(SCHEDULE, n0 // 128, N)
            for i in range(partials):
                dk, dv = _step(
                    c, gl.load(partial + i), dk, dv, k, vs, q_ring, dout_ring, lse, delta, depths, rows_n, end_n,
                    too_deep, scale, cap, HALF, True, BM, WINDOW, SOFTCAP, LS, LO, LV
                )  # fmt: skip
                c += 1
            for _ in range(fulls):
                dk, dv = _step(
                    c, 0, dk, dv, k, vs, q_ring, dout_ring, lse, delta, depths, rows_n, end_n, too_deep, scale, cap,
                    HALF, False, BM, WINDOW, SOFTCAP, LS, LO, LV
                )  # fmt: skip
                c += 1
        else:
            for t in range(first, full_start):
                dk, dv = _step(
                    c, t, dk, dv, k, vs, q_ring, dout_ring, lse, delta, depths, rows_n, end_n, too_deep, scale, cap,
                    HALF, True, BM, WINDOW, SOFTCAP, LS, LO, LV
                )  # fmt: skip
                c += 1
            for t in range(full_start, full_stop):
                dk, dv = _step(
                    c, t, dk, dv, k, vs, q_ring, dout_ring, lse, delta, depths, rows_n, end_n, too_deep, scale, cap,
                    HALF, False, BM, WINDOW, SOFTCAP, LS, LO, LV
                )  # fmt: skip
                c += 1
            for t in range(full_stop, stop):
                dk, dv = _step(
                    c, t, dk, dv, k, vs, q_ring, dout_ring, lse, delta, depths, rows_n, end_n, too_deep, scale, cap,
                    HALF, True, BM, WINDOW, SOFTCAP, LS, LO, LV
                )  # fmt: skip
                c += 1
    dk = dk * grad_scale
    if part >= 0:
        store_part(DK_PARTS, dk, part, HALF * 64, D, LO)
        store_part(DV_PARTS, dv, part, HALF * 64, DV, LV)
    else:
        k.store(dk.to(k.dtype))
        v.store(dv.to(v.dtype))
        fence_async_shared()
        copy_out(dk_desc, k, hk, n0 + HALF * 64, D)
        copy_out(dv_desc, v, hk, n0 + HALF * 64, DV)
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["N", "ABOVE", "H", "G", "window"],
    do_not_specialize_on_alignment=["DK_PARTS", "DV_PARTS", "END", "SCHEDULE", "ITEMS", "DEPTH"],
)
def dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, DK_PARTS, DV_PARTS, lse_desc, delta_desc, END, SCHEDULE, ITEMS,
    scale, grad_scale, N, ABOVE, H, G, depth_desc, DEPTH, window, cap,
    D: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, DO_ROWS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """ITEMS: `tiles.backward_items`. The parts are (split tiles, H, 128, D) float32. The queries are the rows from
    ABOVE on, a multiple of 128. `scale` and what is None are as in the forward kernel; with a window SCHEDULE is that
    of `tiles.window_schedule`."""
    DTYPE: gl.constexpr = q_desc.dtype
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    item = gl.load(ITEMS + 1 + gl.program_id(0))
    kv_heads = H // G
    part = gl.where(item < 0, -1 - item, -1)  # negative: no part
    slot = gl.maximum(part, 0) // H
    looped = gl.maximum(item, 0)
    if item != NO_ITEM:
        tile = gl.where(item < 0, gl.load(SCHEDULE + 4 * slot + 1), looped // kv_heads)
        head = gl.where(item < 0, part - slot * H, looped % kv_heads * G)
        heads = gl.where(item < 0, 1, G)
        hk = head // G
        n0 = tile * 128
        first = gl.maximum(n0, ABOVE) // BM
        stop = gl.maximum((gl.load(SCHEDULE + 4 * tile + 2) + BM - 1) // BM, first)
        full_start = gl.minimum(first + 128 // BM, stop)
        full_stop = gl.minimum(gl.maximum(gl.load(SCHEDULE + 4 * tile + 3) // BM, full_start), stop)
        kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(kv_full, count=1)
        k_buffers = make_buffers(k_desc, 2)
        v_buffers = make_buffers(v_desc, 2)
        q_ring = make_ring(q_desc, STAGES)
        dout_ring = make_ring(dout_desc, STAGES)
        lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse_desc.layout)
        delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], delta_desc.layout)
        depths = depth_buffers(depth_desc, lse, WINDOW, STAGES)
        gl.warp_specialize(
            [
                (_consume, (dk_desc, dv_desc, DK_PARTS, DV_PARTS, END, DEPTH, SCHEDULE, kv_full, k_buffers, v_buffers,
                            q_ring, dout_ring, lse, delta, depths, scale, cap, window, grad_scale, N, n0, first,
                            full_stop, stop, hk, part, heads, 0, BM, D, DV, WINDOW, SOFTCAP)),
                (_consume, (dk_desc, dv_desc, DK_PARTS, DV_PARTS, END, DEPTH, SCHEDULE, kv_full, k_buffers, v_buffers,
                            q_ring, dout_ring, lse, delta, depths, scale, cap, window, grad_scale, N, n0, first,
                            full_stop, stop, hk, part, heads, 1, BM, D, DV, WINDOW, SOFTCAP)),
                (_produce, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, kv_full,
                            k_buffers, v_buffers, q_ring, dout_ring, lse, delta, depths, N, ABOVE, n0, first, stop, hk,
                            head, heads, BM, D, DV, BYTES, Q_ROWS, K_ROWS, V_ROWS, DO_ROWS, WINDOW)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# The parts of the key tiles that are split: those of the query heads of a group, added in order.


@triton.jit(
    do_not_specialize=["N", "H", "BLOCKS"],
    do_not_specialize_on_alignment=["DK_PARTS", "DV_PARTS", "DK", "DV", "SCHEDULE", "ITEMS"],
)
def sum_kernel(
    DK_PARTS, DV_PARTS, DK, DV, SCHEDULE, ITEMS, N, H, BLOCKS,
    G: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows of one split tile and one K/V head, of the BLOCKS that a tile has; tiles from the number of
    split ones on (`tiles.backward_items`) do nothing."""
    slot = tl.program_id(0) // BLOCKS
    if slot < tl.load(ITEMS):
        block = tl.program_id(0) - slot * BLOCKS
        hk = block // (128 // ROWS)
        rows = (block - hk * (128 // ROWS)) * ROWS + tl.arange(0, ROWS)
        first = (slot * H + hk * G).to(tl.int64)
        n = tl.load(SCHEDULE + 4 * slot + 1) * 128 + rows
        target = n.to(tl.int64) * (H // G) + hk
        _add_parts(DK_PARTS, DK, first, rows, target, n < N, G, WIDTH, SIZE)
        _add_parts(DV_PARTS, DV, first, rows, target, n < N, G, V_WIDTH, V_SIZE)


@triton.jit
def _add_parts(PARTS, OUT, first, rows, target, inside, G: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Parts first .. first + G, (128, WIDTH) each, into rows of SIZE columns."""
    columns = tl.arange(0, WIDTH)[None, :]
    parts = first * (128 * WIDTH) + rows[:, None] * WIDTH + columns
    total = tl.load(PARTS + parts)
    for g in tl.static_range(1, G):
        total += tl.load(PARTS + parts + g * (128 * WIDTH))
    kept = inside[:, None] & (columns < SIZE)
    tl.store(OUT + target[:, None] * SIZE + columns, total.to(OUT.dtype.element_ty), mask=kept)
