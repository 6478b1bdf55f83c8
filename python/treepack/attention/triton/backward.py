# mypy: ignore-errors
"""The backward kernels, deterministic: delta, then dK/dV per key tile, then dQ per query tile. No atomics.

    P = exp2(S - lse2)     dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dK = scale * dS^T Q     dQ =
    scale * dS K
    delta = rowsum(out * dO) - log2(e) * dlse2             dS also times 1 - tanh^2 when capped

For a key tile the queries that see it are one contiguous range n0 .. max(subtree_end), masked at both ends and not in
the middle, so dK/dV reads no list; only a sliding window cuts that range into pieces, and then it reads the transposed
list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, load_tile, next_full, query_item, store_tile, tanh, tile_list


@triton.jit(do_not_specialize=["N", "H", "row_h"])
def delta_kernel(
    OUT, DOUT, DLSE, DELTA, do_n, do_h, do_d, row_h, N, H,
    BM: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(N, BM)
    h = tl.program_id(0) // n_tiles
    m0 = (tl.program_id(0) % n_tiles) * BM
    offs_m = m0 + tl.arange(0, BM)
    out = load_tile(OUT, h, m0, N, H * D_V, D_V, 1, BM, D_V, DP_V, 0).to(tl.float32)
    dout = load_tile(DOUT, h, m0, N, do_n, do_h, do_d, BM, D_V, DP_V, 0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= LOG2E * tl.load(DLSE + h.to(tl.int64) * N + offs_m, mask=offs_m < N, other=0.0)
    tl.store(DELTA + h.to(tl.int64) * row_h + offs_m, delta, mask=offs_m < N)


@triton.jit
def _dq_step(
    dq, q, dout, lse, delta, K, V, ENDS, DEPTH, head, n0, offs_m, depth_m, N,
    k_n, k_h, k_d, v_n, v_h, v_d, scale, cap, window,
    BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr,
    K_LAYOUT: tl.constexpr, V_LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    k = load_tile(K, head, n0, N, k_n, k_h, k_d, BN, D, DP, K_LAYOUT)
    v = load_tile(V, head, n0, N, v_n, v_h, v_d, BN, D_V, DP_V, V_LAYOUT)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    t = s
    if SOFTCAP:
        t = tanh(s)
        s = t * cap
    p = tl.math.exp2(s - lse[:, None])
    if MASK:
        offs_n = n0 + tl.arange(0, BN)
        end_n = ENDS.load([0, n0])
        seen = (offs_n[None, :] <= offs_m[:, None]) & (offs_m[:, None] < end_n)
        if WINDOW:
            depth_n = tl.load(DEPTH + offs_n, mask=offs_n < N, other=0)
            seen = seen & (depth_m[:, None] - depth_n[None, :] < window)
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds = ds * (1.0 - t * t)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N", "ABOVE", "H", "G", "SECTION", "window", "row_h"])
def dq_kernel(
    Q, K, V, DOUT, DQ, LSE, DELTA, ENDS, DEPTH, LIST_ROWS, LIST_ITEMS,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d, do_n, do_h, do_d,
    scale, cap, window, grad_scale, row_h, N, ABOVE, H, G, SECTION,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr,
    LIST: tl.constexpr,
    Q_LAYOUT: tl.constexpr, K_LAYOUT: tl.constexpr, V_LAYOUT: tl.constexpr, DO_LAYOUT: tl.constexpr,
    DQ_LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, query head); the same walk over the lists as the forward kernel."""
    tile_m, h = query_item(tl.cdiv(N - ABOVE, BM), SECTION)
    hk = h // G
    m0 = ABOVE + tile_m * BM
    offs_m = m0 + tl.arange(0, BM)

    q = load_tile(Q, h, m0 - ABOVE, N - ABOVE, q_n, q_h, q_d, BM, D, DP, Q_LAYOUT)
    dout = load_tile(DOUT, h, m0 - ABOVE, N - ABOVE, do_n, do_h, do_d, BM, D_V, DP_V, DO_LAYOUT)
    lse = tl.load(LSE + h.to(tl.int64) * row_h + offs_m, mask=offs_m < N, other=0.0)
    delta = tl.load(DELTA + h.to(tl.int64) * row_h + offs_m, mask=offs_m < N, other=0.0)
    depth_m = offs_m
    if WINDOW:
        depth_m = tl.load(DEPTH + offs_m, mask=offs_m < N, other=0)
    dq = tl.zeros([BM, DP], tl.float32)

    SPLIT: tl.constexpr = LIST // BN
    items, runs, fulls, partials = tile_list(LIST_ROWS, LIST_ITEMS, m0, LIST, SPLIT)
    run = items
    n = tl.load(run) * SPLIT
    last = tl.load(run + 1) * SPLIT
    for _ in tl.range(0, fulls):
        dq = _dq_step(
            dq, q, dout, lse, delta, K, V, ENDS, DEPTH, hk, n * BN, offs_m, depth_m, N, k_n, k_h, k_d, v_n, v_h,
            v_d, scale, cap, window,
            BN, D, DP, D_V, DP_V, K_LAYOUT, V_LAYOUT, WINDOW, SOFTCAP, PRECISION, False)  # fmt: skip
        run, n, last = next_full(run, n, last, SPLIT)
    items += 2 * runs
    for i in tl.range(0, partials * SPLIT):
        n0 = tl.load(items + i // SPLIT) * LIST + (i % SPLIT) * BN
        dq = _dq_step(
            dq, q, dout, lse, delta, K, V, ENDS, DEPTH, hk, n0, offs_m, depth_m, N, k_n, k_h, k_d, v_n, v_h, v_d,
            scale, cap, window,
            BN, D, DP, D_V, DP_V, K_LAYOUT, V_LAYOUT, WINDOW, SOFTCAP, PRECISION, True)  # fmt: skip
    store_tile(DQ, dq * grad_scale, h, m0 - ABOVE, N - ABOVE, H, BM, D, DP, DQ_LAYOUT)


@triton.jit
def _dkv_step(
    dk, dv, k, v, Q, DOUT, LSE, DELTA, DEPTH, end_n, depth_n, offs_n, head, m0, N, ABOVE,
    q_n, q_h, q_d, do_n, do_h, do_d, scale, cap, window,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr,
    Q_LAYOUT: tl.constexpr, DO_LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One query tile for a resident key tile; scores transposed (n, m), so that P and dS are left factors."""
    offs_m = m0 + tl.arange(0, BM)
    q = load_tile(Q, head, m0 - ABOVE, N - ABOVE, q_n, q_h, q_d, BM, D, DP, Q_LAYOUT)
    dout = load_tile(DOUT, head, m0 - ABOVE, N - ABOVE, do_n, do_h, do_d, BM, D_V, DP_V, DO_LAYOUT)
    # As (1, BM) tiles of (H, N): by pointers they would be two dozen masked copies of 4 bytes a thread and step.
    lse = LSE.load([head, m0])
    delta = DELTA.load([head, m0])
    s = tl.dot(k, q.T, input_precision=PRECISION) * scale
    t = s
    if SOFTCAP:
        t = tanh(s)
        s = t * cap
    p = tl.math.exp2(s - lse)
    if MASK:
        seen = (offs_n[:, None] <= offs_m[None, :]) & (offs_m[None, :] < end_n[:, None])
        if WINDOW:
            depth_m = tl.load(DEPTH + offs_m, mask=offs_m < N, other=0)
            seen = seen & (depth_m[None, :] - depth_n[:, None] < window)
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dp = tl.dot(v, dout.T, input_precision=PRECISION)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - t * t)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["N", "ABOVE", "H", "G", "HEADS", "SECTION", "window"])
def dkv_kernel(
    Q, K, V, DOUT, DK, DV, LSE, DELTA, END, DEPTH, LIST_ROWS, LIST_ITEMS,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d, do_n, do_h, do_d,
    scale, cap, window, grad_scale, N, ABOVE, H, G, HEADS, SECTION,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr,
    LIST: tl.constexpr,
    Q_LAYOUT: tl.constexpr, K_LAYOUT: tl.constexpr, V_LAYOUT: tl.constexpr, DO_LAYOUT: tl.constexpr,
    DK_LAYOUT: tl.constexpr, DV_LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (key tile, group of HEADS query heads of one K/V head): HEADS = G writes dK and dV, HEADS = 1
    writes float32 parts per query head. SECTION of these groups walk the key tiles side by side, the ones that most
    queries see first. The queries are the rows from ABOVE on, a multiple of 128."""
    n_tiles = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    section = pid // (n_tiles * SECTION)
    within = pid - section * (n_tiles * SECTION)
    tile_n = within // SECTION
    part = section * SECTION + within % SECTION
    hk = part * HEADS // G
    n0 = tile_n * BN
    offs_n = n0 + tl.arange(0, BN)
    end_n = tl.load(END + offs_n, mask=offs_n < N, other=0)
    depth_n = offs_n
    if WINDOW:
        depth_n = tl.load(DEPTH + offs_n, mask=offs_n < N, other=0)
    k = load_tile(K, hk, n0, N, k_n, k_h, k_d, BN, D, DP, K_LAYOUT)
    v = load_tile(V, hk, n0, N, v_n, v_h, v_d, BN, D_V, DP_V, V_LAYOUT)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP_V], tl.float32)

    if WINDOW:
        SPLIT: tl.constexpr = LIST // BM
        items, runs, fulls, partials = tile_list(LIST_ROWS, LIST_ITEMS, n0, LIST, SPLIT)
        for g in tl.range(0, HEADS):
            h = part * HEADS + g
            run = items
            m = tl.load(run) * SPLIT
            last = tl.load(run + 1) * SPLIT
            for _ in tl.range(0, fulls):
                dk, dv = _dkv_step(
                    dk, dv, k, v, Q, DOUT, LSE, DELTA, DEPTH, end_n, depth_n, offs_n, h, m * BM, N, ABOVE,
                    q_n, q_h, q_d, do_n, do_h, do_d, scale, cap, window,
                    BM, D, DP, D_V, DP_V, Q_LAYOUT, DO_LAYOUT, WINDOW, SOFTCAP, PRECISION, False)  # fmt: skip
                run, m, last = next_full(run, m, last, SPLIT)
            for i in tl.range(0, partials * SPLIT):
                m0 = tl.load(items + 2 * runs + i // SPLIT) * LIST + (i % SPLIT) * BM
                dk, dv = _dkv_step(
                    dk, dv, k, v, Q, DOUT, LSE, DELTA, DEPTH, end_n, depth_n, offs_n, h, m0, N, ABOVE,
                    q_n, q_h, q_d, do_n, do_h, do_d, scale, cap, window,
                    BM, D, DP, D_V, DP_V, Q_LAYOUT, DO_LAYOUT, WINDOW, SOFTCAP, PRECISION, True)  # fmt: skip
    else:
        # Query tiles of [start, full_from) and [full_to, stop) hold pairs that are not seen, those of [full_from,
        # full_to) none. One masked loop over both ends: a third copy of the step costs registers, and every loop fills
        # and drains the pipeline once.
        start = (tl.maximum(n0, ABOVE) // BM) * BM
        stop = tl.max(end_n, 0)
        full_from = tl.maximum(tl.cdiv(n0 + BN - 1, BM) * BM, start)
        full_to = tl.maximum((tl.min(tl.where(offs_n < N, end_n, N), 0) // BM) * BM, full_from)
        leading = tl.cdiv(tl.maximum(tl.minimum(full_from, stop) - start, 0), BM)
        trailing = tl.cdiv(tl.maximum(stop - full_to, 0), BM)
        for g in tl.range(0, HEADS):
            h = part * HEADS + g
            for i in tl.range(0, leading + trailing):
                m0 = tl.where(i < leading, start + i * BM, full_to + (i - leading) * BM)
                dk, dv = _dkv_step(
                    dk, dv, k, v, Q, DOUT, LSE, DELTA, DEPTH, end_n, depth_n, offs_n, h, m0, N, ABOVE,
                    q_n, q_h, q_d, do_n, do_h, do_d, scale, cap, window,
                    BM, D, DP, D_V, DP_V, Q_LAYOUT, DO_LAYOUT, WINDOW, SOFTCAP, PRECISION, True)  # fmt: skip
            for m0 in tl.range(full_from, tl.minimum(full_to, stop), BM):
                dk, dv = _dkv_step(
                    dk, dv, k, v, Q, DOUT, LSE, DELTA, DEPTH, end_n, depth_n, offs_n, h, m0, N, ABOVE,
                    q_n, q_h, q_d, do_n, do_h, do_d, scale, cap, window,
                    BM, D, DP, D_V, DP_V, Q_LAYOUT, DO_LAYOUT, WINDOW, SOFTCAP, PRECISION, False)  # fmt: skip
    parts = H // HEADS
    store_tile(DK, dk * grad_scale, part, n0, N, parts, BN, D, DP, DK_LAYOUT)
    store_tile(DV, dv, part, n0, N, parts, BN, D_V, DP_V, DV_LAYOUT)
