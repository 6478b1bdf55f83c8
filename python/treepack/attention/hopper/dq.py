# mypy: ignore-errors
"""dQ for Hopper, and on the way delta: one program per (query tile, query head).

    delta = rowsum(out * dO) - log2(e) * dlse2         kept for dK/dV, which runs after this kernel
    P = exp2(S - lse2)     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K

    step i       issue S = Q Ki       issue dP = dO Vi      wait S: P under dP's product
                 wait dP, release Vi    dS packed            dQ += dS Ki, wait, release Ki

128 query rows (64 a consumer) against 128 key rows, or 64 (BN) where registers are short; Q, dO and out resident, two K
and two V buffers: 225 KB of shared memory at D = 128. The walk over the tiles, of 128 whatever BN is, and the masks are
those of the forward kernel. An accumulator in flight over the loop's edge would make ptxas serialise every product
(C7512), so each step waits for its own. At DV = 256 there is one V buffer, and none for out: it comes through those
of K, as their first uses (SHIFT): 225 KB, as at D = 256 and DV = 128 with all of them.
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

from .common import (
    LOG2E,
    copy_keys,
    copy_out,
    copy_rows,
    depth_buffers,
    make_buffers,
    make_ring,
    next_tile,
    pack,
    query_item,
    resident,
    tanh,
    tile_list,
    unpack,
)
from .names import thread_barrier


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, dout_desc, out_desc, ends_desc, depth_desc, LIST_ROWS, LIST_ITEMS, q_ring, dout, out,
    k_ring, v_ring, ends, depths, N, ABOVE, tile, h, G,
    BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, DO_ROWS: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    full = q_ring.filled(0)
    mbarrier.expect(full, 2 * 64 * (D + (DV if SHIFT else 2 * DV)) * BYTES)
    for half in gl.static_range(2):
        row = tile * 128 - ABOVE + half * 64
        copy_rows(dout_desc, full, dout.index(half), h, row, N - ABOVE, DV, DO_ROWS)
        if SHIFT:
            mbarrier.expect(k_ring.filled(half), 64 * DV * BYTES)
            copy_rows(out_desc, k_ring.filled(half), out.index(half), h, row, N - ABOVE, DV, False)
        else:
            copy_rows(out_desc, full, out.index(half), h, row, N - ABOVE, DV, False)
        copy_rows(q_desc, full, q_ring.buffers.index(half), h, row, N - ABOVE, D, Q_ROWS)
    run, last, partials, total = tile_list(LIST_ROWS, LIST_ITEMS, tile)
    hk = h // G
    n = tile
    PARTS: gl.constexpr = 128 // BN
    for i in range(total):
        for part in gl.static_range(PARTS):
            j = i * PARTS + part
            key = n * PARTS + part
            copy_keys(
                k_desc, ends_desc, depth_desc, k_ring, ends, depths, j + SHIFT, j, partials * PARTS, hk, key, N, BN, D,
                BYTES, K_ROWS, WINDOW
            )  # fmt: skip
            v_ring.acquire(j)
            mbarrier.expect(v_ring.filled(j), BN * DV * BYTES)
            copy_rows(v_desc, v_ring.filled(j), v_ring.at(j), hk, key * BN, N, DV, V_ROWS)
        n, run = next_tile(i, n, run, last, partials)


@gluon.jit
def _step(
    i, dq, qs, douts, lse, delta, k_ring, v_ring, ends, depths, rows_m, too_high, first_n, scale, cap,
    HALF: gl.constexpr, MASK: gl.constexpr, DIAGONAL: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, SHIFT: gl.constexpr, WIDE: gl.constexpr, LS: gl.constexpr, LO: gl.constexpr,
):  # fmt: skip
    """Step i: use i of V's ring, i + SHIFT of K's."""
    DTYPE: gl.constexpr = qs.dtype
    zero = gl.zeros([64, BN], gl.float32, LS)
    k_ring.wait(i + SHIFT)
    q = resident(qs, HALF) if WIDE else qs.index(HALF)
    s = warpgroup_mma(q, k_ring.at(i + SHIFT).permute([1, 0]), zero, use_acc=False, is_async=True)
    v_ring.wait(i)
    dout = resident(douts, HALF)
    dp = warpgroup_mma(dout, v_ring.at(i).permute([1, 0]), zero, use_acc=False, is_async=True)
    LATE: gl.constexpr = MASK and WINDOW  # beside S and dP there is no room for two vectors that wait
    if MASK and not LATE:
        end_n = ends.index((i + SHIFT) % k_ring.stages).load(LS)
    s = warpgroup_mma_wait(1, deps=[s])
    factor = scale
    if SOFTCAP:
        s = tanh(s * scale)
        factor = cap
    p = gl.exp2(s * factor - gl.expand_dims(lse, 1))
    if SOFTCAP:  # dQ reads P nowhere but in dS: the slope of tanh goes into it here, and S is needed no more
        p = p * (1.0 - s * s)
    if MASK:
        if LATE:
            end_n = ends.index((i + SHIFT) % k_ring.stages).load(LS)
        seen = gl.expand_dims(rows_m, 1) < end_n
        if DIAGONAL:
            rows_n = first_n + gl.arange(0, BN, gl.SliceLayout(0, LS))
            seen = seen & (gl.expand_dims(rows_n, 0) <= gl.expand_dims(rows_m, 1))
        p = gl.where(seen, p, 0.0)
        if LATE:
            p = gl.where(depths.index((i + SHIFT) % k_ring.stages).load(LS) > gl.expand_dims(too_high, 1), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    v_ring.release(i)
    ds = unpack(pack(p * (dp - gl.expand_dims(delta, 1)), DTYPE), DTYPE, gl.DotOperandLayout(0, LO, 2))
    dq = warpgroup_mma(ds, k_ring.at(i + SHIFT), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    k_ring.release(i + SHIFT)
    return dq


@gluon.jit
def _consume(
    dq_desc, LSE, DELTA, DLSE, DEPTH, LIST_ROWS, LIST_ITEMS, q_ring, douts, outs, k_ring, v_ring, ends, depths, scale,
    cap, window, grad_scale, row_h, N, ABOVE, tile, h,
    HALF: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HAS_DLSE: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WIDE: gl.constexpr = D > 128
    m0 = tile * 128
    rows_m = m0 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LS))
    row = h.to(gl.int64) * row_h
    lse = gl.load(LSE + row + rows_m, mask=rows_m < N, other=0.0)
    too_high = rows_m
    if WINDOW:  # the depth of the first token above that the window leaves out
        too_high = gl.load(DEPTH + rows_m, mask=rows_m < N, other=0) - window
    _, _, partials, total = tile_list(LIST_ROWS, LIST_ITEMS, tile)
    q = q_ring.buffers.index(HALF)
    q_ring.wait(0)
    if SHIFT:
        k_ring.wait(HALF)
    product = outs.index(HALF).load(LV).to(gl.float32) * douts.index(HALF).load(LV).to(gl.float32)
    delta = gl.convert_layout(gl.sum(product, 1), gl.SliceLayout(1, LS))
    if HAS_DLSE:
        delta -= LOG2E * gl.load(DLSE + h.to(gl.int64) * N + rows_m, mask=rows_m < N, other=0.0)
    gl.store(DELTA + row + rows_m, delta, mask=rows_m < N)
    if SHIFT:
        thread_barrier()  # every thread has read its part of out
        k_ring.release(0)
        k_ring.release(1)
    dq = gl.zeros([64, D], gl.float32, LO)
    qs = q_ring.buffers
    PARTS: gl.constexpr = 128 // BN
    for part in gl.static_range(PARTS):
        dq = _step(
            part, dq, qs, douts, lse, delta, k_ring, v_ring, ends, depths, rows_m, too_high, m0 + part * BN, scale, cap,
            HALF, True, True, BN, WINDOW, SOFTCAP, SHIFT, WIDE, LS, LO
        )  # fmt: skip
    for i in range(PARTS, partials * PARTS):
        dq = _step(
            i, dq, qs, douts, lse, delta, k_ring, v_ring, ends, depths, rows_m, too_high, m0, scale, cap, HALF, True,
            False, BN, WINDOW, SOFTCAP, SHIFT, WIDE, LS, LO
        )  # fmt: skip
    for i in range(partials * PARTS, total * PARTS):
        dq = _step(
            i, dq, qs, douts, lse, delta, k_ring, v_ring, ends, depths, rows_m, too_high, m0, scale, cap, HALF, False,
            False, BN, WINDOW, SOFTCAP, SHIFT, WIDE, LS, LO
        )  # fmt: skip
    q.store((dq * grad_scale).to(q.dtype))
    fence_async_shared()
    copy_out(dq_desc, q, h, m0 - ABOVE + HALF * 64, D)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["row_h", "N", "ABOVE", "n_tiles", "G", "SECTION", "window"],
    do_not_specialize_on_alignment=["LSE", "DELTA", "DLSE", "LIST_ROWS", "LIST_ITEMS", "SCHEDULE", "DEPTH"],
)
def dq_kernel(
    q_desc, k_desc, v_desc, dout_desc, out_desc, dq_desc, ends_desc, LSE, DELTA, DLSE, LIST_ROWS, LIST_ITEMS, SCHEDULE,
    scale, grad_scale, row_h, N, ABOVE, n_tiles, G, SECTION, depth_desc, DEPTH, window, cap,
    D: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, DO_ROWS: gl.constexpr, HAS_DLSE: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """SECTION heads side by side walk the tiles of the queries, which are the rows from ABOVE on (a multiple of 128):
    the one with the longest list first. `scale` and what is None are as in the forward kernel."""
    DTYPE: gl.constexpr = q_desc.dtype
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    tile, h = query_item(gl.program_id(0), SCHEDULE, n_tiles, SECTION)
    q_ring = make_ring(q_desc, 1, 2)
    dout = make_buffers(dout_desc, 2)
    SHIFT: gl.constexpr = 2 if DV > 128 else 0
    if SHIFT == 0:
        out = make_buffers(out_desc, 2)
    k_ring = make_ring(k_desc, STAGES)
    v_ring = make_ring(v_desc, 1 if SHIFT else STAGES)
    if SHIFT:
        out = k_ring.buffers
    ends = gl.allocate_shared_memory(gl.int32, [STAGES, 1, BN], ends_desc.layout)
    depths = depth_buffers(depth_desc, ends, WINDOW, STAGES)
    gl.warp_specialize(
        [
            (_consume, (dq_desc, LSE, DELTA, DLSE, DEPTH, LIST_ROWS, LIST_ITEMS, q_ring, dout, out, k_ring, v_ring,
                        ends, depths, scale, cap, window, grad_scale, row_h, N, ABOVE, tile, h, 0, BN, D, DV, HAS_DLSE,
                        WINDOW, SOFTCAP, SHIFT)),
            (_consume, (dq_desc, LSE, DELTA, DLSE, DEPTH, LIST_ROWS, LIST_ITEMS, q_ring, dout, out, k_ring, v_ring,
                        ends, depths, scale, cap, window, grad_scale, row_h, N, ABOVE, tile, h, 1, BN, D, DV, HAS_DLSE,
                        WINDOW, SOFTCAP, SHIFT)),
            (_produce, (q_desc, k_desc, v_desc, dout_desc, out_desc, ends_desc, depth_desc, LIST_ROWS, LIST_ITEMS,
                        q_ring, dout, out, k_ring, v_ring, ends, depths, N, ABOVE, tile, h, G, BN, D, DV, BYTES, Q_ROWS,
                        K_ROWS, V_ROWS, DO_ROWS, WINDOW, SHIFT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
