# mypy: ignore-errors
"""dK and dV for Hopper at head sizes whose two accumulators do not fit beside each other (256): a program takes half of
the key tile of an item of `tiles.backward_items`, 64 keys, and its consumers divide the work by product, not by rows.

    values       S^T = K Qi^T    P^T = exp2(S^T - lse2)  -> handed over    dV += P^T dOi       release Qi and dOi
    keys         dP^T = V dOi^T     P^T <- handed over    dS^T = P^T * (dP^T - delta)    dK += dS^T Qi    release

Two products each, and each keeps one accumulator of 64 x 256 in registers. P is handed over in float32, in two buffers
that take turns, with the slope of tanh where there is a cap. K, V and two buffers of Q and dO, 64 queries each: 226 KB
of shared memory. dV leaves through K's buffer and dK through V's, which nobody else reads; where v is narrower each has
one of its own (192 / 128: 225 KB).

Queries, masks and lists are those of `dkv`, and so are the parts that `sum_kernel` adds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import NO_ITEM, Ring, copy_out, copy_rows, depth_buffers, make_buffers, make_ring, pack, tanh, unpack
from .dkv import copy_all_queries, store_part, window_list
from .names import thread_barrier


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, kv_full, k, v, q_ring, dout_ring,
    lse, delta, depths, N, ABOVE, tile, n0, first, stop, hk, head, HEADS,
    BM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, DO_ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(kv_full, 64 * (D + DV) * BYTES)
    copy_rows(k_desc, kv_full, k, hk, n0, N, D, K_ROWS)
    copy_rows(v_desc, kv_full, v, hk, n0, N, DV, V_ROWS)
    copy_all_queries(
        q_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, q_ring, dout_ring, lse, delta, depths, N, ABOVE,
        tile, first, stop, head, HEADS, BM, D, DV, BYTES, Q_ROWS, DO_ROWS, WINDOW
    )  # fmt: skip


@gluon.jit
def _values_step(
    c, t, dv, k, q_ring, dout_ring, p_ring, lse, depths, rows_n, end_n, too_deep, scale, cap,
    MASK: gl.constexpr, BM: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, LS: gl.constexpr,
    LO: gl.constexpr,
):  # fmt: skip
    """Query tile t, number c of this program; t is read with MASK only."""
    DTYPE: gl.constexpr = k.dtype
    zero = gl.zeros([64, BM], gl.float32, LS)
    q_ring.wait(c)
    s = warpgroup_mma(k, q_ring.at(c).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    factor = scale
    if SOFTCAP:
        s = tanh(s * scale)
        factor = cap
    p = gl.exp2(s * factor - lse.index(c % q_ring.stages).load(LS))
    if MASK:
        rows_m = gl.expand_dims(t * BM + gl.arange(0, BM, gl.SliceLayout(0, LS)), 0)
        seen = (gl.expand_dims(rows_n, 1) <= rows_m) & (rows_m < gl.expand_dims(end_n, 1))
        if WINDOW:
            seen = seen & (depths.index(c % q_ring.stages).load(LS) < gl.expand_dims(too_deep, 1))
        p = gl.where(seen, p, 0.0)
    p_ring.acquire(c)
    if SOFTCAP:
        p_ring.at(c).store(p * (1.0 - s * s))
    else:
        p_ring.at(c).store(p)
    thread_barrier()  # all have written before one reports it
    mbarrier.arrive(p_ring.filled(c), count=1)
    dout_ring.wait(c)
    left = unpack(pack(p, DTYPE), DTYPE, gl.DotOperandLayout(0, LO, 2))
    dv = warpgroup_mma(left, dout_ring.at(c), dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=[dv])
    q_ring.release(c)
    return dv


@gluon.jit
def _values(
    dv_desc, DV_PARTS, END, DEPTH, SCHEDULE, kv_full, k, leaves, q_ring, dout_ring, p_ring, lse, depths, scale, cap,
    window, N, tile, n0, first, full_stop, stop, hk, part, HEADS,
    BM: gl.constexpr, DV: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    rows_n = n0 + gl.arange(0, 64, gl.SliceLayout(1, LS))
    end_n = gl.load(END + rows_n, mask=rows_n < N, other=0)
    too_deep = rows_n
    if WINDOW:  # the depth of the first token below that sees this one no more
        too_deep = gl.load(DEPTH + rows_n, mask=rows_n < N, other=0) + window
    dv = gl.zeros([64, DV], gl.float32, LO)
    mbarrier.wait(kv_full, 0)
    c = 0
    full_start = gl.minimum(first + 1, stop)
    for _ in range(HEADS):
        if WINDOW:
            _, fulls, partial, partials = window_list(SCHEDULE, tile, N)
            for i in range(partials):
                dv = _values_step(
                    c, gl.load(partial + i), dv, k, q_ring, dout_ring, p_ring, lse, depths, rows_n, end_n, too_deep,
                    scale, cap, True, BM, WINDOW, SOFTCAP, LS, LO
                )  # fmt: skip
                c += 1
            for _ in range(fulls):
                dv = _values_step(
                    c, 0, dv, k, q_ring, dout_ring, p_ring, lse, depths, rows_n, end_n, too_deep, scale, cap, False, BM,
                    WINDOW, SOFTCAP, LS, LO
                )  # fmt: skip
                c += 1
        else:
            for t in range(first, full_start):
                dv = _values_step(
                    c, t, dv, k, q_ring, dout_ring, p_ring, lse, depths, rows_n, end_n, too_deep, scale, cap, True, BM,
                    WINDOW, SOFTCAP, LS, LO
                )  # fmt: skip
                c += 1
            for t in range(full_start, full_stop):
                dv = _values_step(
                    c, t, dv, k, q_ring, dout_ring, p_ring, lse, depths, rows_n, end_n, too_deep, scale, cap, False, BM,
                    WINDOW, SOFTCAP, LS, LO
                )  # fmt: skip
                c += 1
            for t in range(full_stop, stop):
                dv = _values_step(
                    c, t, dv, k, q_ring, dout_ring, p_ring, lse, depths, rows_n, end_n, too_deep, scale, cap, True, BM,
                    WINDOW, SOFTCAP, LS, LO
                )  # fmt: skip
                c += 1
    _store(dv_desc, DV_PARTS, dv, leaves, n0, n0 - tile * 128, hk, part, DV, LO)


@gluon.jit
def _store(desc, PARTS, x, buffer, n0, row, hk, part, D: gl.constexpr, LO: gl.constexpr):
    """64 rows from n0 on through a buffer, or as rows `row` .. of a float32 part, (128, D), for `sum_kernel`."""
    if part >= 0:
        store_part(PARTS, x, part, row, D, LO)
    else:
        buffer.store(x.to(buffer.dtype))
        fence_async_shared()
        copy_out(desc, buffer, hk, n0, D)
        tma.store_wait(0)


@gluon.jit
def _keys(
    dk_desc, DK_PARTS, SCHEDULE, kv_full, v, leaves, q_ring, dout_ring, p_ring, delta, grad_scale, N, tile, n0, first,
    stop, hk, part, HEADS,
    BM: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = v.dtype
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([64, D], gl.float32, LO)
    mbarrier.wait(kv_full, 0)
    steps = stop - first
    if WINDOW:
        _, fulls, _, partials = window_list(SCHEDULE, tile, N)
        steps = fulls + partials
    for c in range(HEADS * steps):
        zero = gl.zeros([64, BM], gl.float32, LS)
        dout_ring.wait(c)
        dp = warpgroup_mma(v, dout_ring.at(c).permute([1, 0]), zero, use_acc=False, is_async=True)
        row = delta.index(c % q_ring.stages).load(LS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        p_ring.wait(c)
        p = p_ring.at(c).load(LS)
        thread_barrier()  # all have read before one reports it
        p_ring.release(c)
        ds = unpack(pack(p * (dp - row), DTYPE), DTYPE, gl.DotOperandLayout(0, LO, 2))
        q_ring.wait(c)
        dk = warpgroup_mma(ds, q_ring.at(c), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk])
        q_ring.release(c)
    _store(dk_desc, DK_PARTS, dk * grad_scale, leaves, n0, n0 - tile * 128, hk, part, D, LO)


@gluon.jit
def _exchange(BM: gl.constexpr, STAGES: gl.constexpr):
    """The ring of P: filled by one consumer, emptied by the other. Rows of 8 values each lie in other banks."""
    buffers = gl.allocate_shared_memory(gl.float32, [STAGES, 64, BM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    return Ring(buffers, full, empty, STAGES)


@gluon.jit(
    do_not_specialize=["N", "ABOVE", "H", "G", "window"],
    do_not_specialize_on_alignment=["DK_PARTS", "DV_PARTS", "END", "SCHEDULE", "ITEMS", "DEPTH"],
)
def wide_dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, DK_PARTS, DV_PARTS, lse_desc, delta_desc, END, SCHEDULE, ITEMS,
    scale, grad_scale, N, ABOVE, H, G, depth_desc, DEPTH, window, cap,
    D: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, DO_ROWS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Two programs an item, which take its halves; the arguments are those of `dkv_kernel`."""
    DTYPE: gl.constexpr = q_desc.dtype
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    item = gl.load(ITEMS + 1 + gl.program_id(0) // 2)
    kv_heads = H // G
    part = gl.where(item < 0, -1 - item, -1)  # negative: no part
    slot = gl.maximum(part, 0) // H
    looped = gl.maximum(item, 0)
    if item != NO_ITEM:
        tile = gl.where(item < 0, gl.load(SCHEDULE + 4 * slot + 1), looped // kv_heads)
        head = gl.where(item < 0, part - slot * H, looped % kv_heads * G)
        heads = gl.where(item < 0, 1, G)
        hk = head // G
        n0 = tile * 128 + gl.program_id(0) % 2 * 64
        first = gl.maximum(n0, ABOVE) // BM
        stop = gl.maximum((gl.load(SCHEDULE + 4 * tile + 2) + BM - 1) // BM, first)
        full_start = gl.minimum(first + 1, stop)
        full_stop = gl.minimum(gl.maximum(gl.load(SCHEDULE + 4 * tile + 3) // BM, full_start), stop)
        kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(kv_full, count=1)
        k = make_buffers(k_desc, 1).index(0)
        v = make_buffers(v_desc, 1).index(0)
        dv = k  # through which dV leaves
        dk = v
        if D != DV:
            dv = make_buffers(dv_desc, 1).index(0)
            dk = make_buffers(dk_desc, 1).index(0)
        q_ring = make_ring(q_desc, STAGES)
        dout_ring = make_ring(dout_desc, STAGES)
        p_ring = _exchange(BM, STAGES)
        lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse_desc.layout)
        delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], delta_desc.layout)
        depths = depth_buffers(depth_desc, lse, WINDOW, STAGES)
        gl.warp_specialize(
            [
                (_values, (dv_desc, DV_PARTS, END, DEPTH, SCHEDULE, kv_full, k, dv, q_ring, dout_ring, p_ring, lse,
                           depths, scale, cap, window, N, tile, n0, first, full_stop, stop, hk, part, heads, BM, DV,
                           WINDOW, SOFTCAP)),
                (_keys, (dk_desc, DK_PARTS, SCHEDULE, kv_full, v, dk, q_ring, dout_ring, p_ring, delta, grad_scale, N,
                         tile, n0, first, stop, hk, part, heads, BM, D, WINDOW)),
                (_produce, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, depth_desc, SCHEDULE, kv_full, k,
                            v, q_ring, dout_ring, lse, delta, depths, N, ABOVE, tile, n0, first, stop, hk, head, heads,
                            BM, D, DV, BYTES, Q_ROWS, K_ROWS, V_ROWS, DO_ROWS, WINDOW)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
