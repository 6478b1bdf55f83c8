# mypy: ignore-errors
"""The forward kernel: one program per (query tile, query head), over the key tiles that the tile lists name.

    S = scale * Q K^T                       softcap * tanh(S / softcap) when capped; base-2 logits inside
    out = softmax(S where k <= q < end[k]) V,    lse2 = log2 of the denominator (sinks included)

First the runs of full tiles, without a mask, then the partial tiles. Rows that see nothing (padding) store 0 and 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, MASKED, load_tile, next_full, query_item, store_tile, tanh, tile_list


@triton.jit
def _attend(
    acc, l_i, m_i, q, K, V, ENDS, DEPTH, head, n0, offs_m, depth_m, N,
    k_n, k_h, k_d, v_n, v_h, v_d, scale, cap, window,
    BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr,
    K_LAYOUT: tl.constexpr, V_LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the key tile that starts at n0."""
    k = load_tile(K, head, n0, N, k_n, k_h, k_d, BN, D, DP, K_LAYOUT)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if SOFTCAP:
        s = tanh(s) * cap
    if MASK:
        offs_n = n0 + tl.arange(0, BN)
        end_n = ENDS.load([0, n0])
        seen = (offs_n[None, :] <= offs_m[:, None]) & (offs_m[:, None] < end_n)
        if WINDOW:
            depth_n = tl.load(DEPTH + offs_n, mask=offs_n < N, other=0)
            seen = seen & (depth_m[:, None] - depth_n[None, :] < window)
        s = tl.where(seen, s, MASKED)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = load_tile(V, head, n0, N, v_n, v_h, v_d, BN, D_V, DP_V, V_LAYOUT)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_new


@triton.jit(do_not_specialize=["N", "ABOVE", "H", "G", "SECTION", "window", "row_h"])
def forward_kernel(
    Q, K, V, OUT, LSE, END, ENDS, DEPTH, SINKS, LIST_ROWS, LIST_ITEMS,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d,
    scale, cap, window, row_h, N, ABOVE, H, G, SECTION,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D_V: tl.constexpr, DP_V: tl.constexpr,
    LIST: tl.constexpr,
    Q_LAYOUT: tl.constexpr, K_LAYOUT: tl.constexpr, V_LAYOUT: tl.constexpr, OUT_LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LIST is the tile size of the lists (a multiple of BM and BN); SECTION heads walk the query tiles side by side,
    the longest first. ENDS is `subtree_end` as one row of tiles (1, BN), 0 past N. The queries are the rows from ABOVE
    on, a multiple of 128."""
    tile_m, h = query_item(tl.cdiv(N - ABOVE, BM), SECTION)
    hk = h // G
    m0 = ABOVE + tile_m * BM
    offs_m = m0 + tl.arange(0, BM)

    q = load_tile(Q, h, m0 - ABOVE, N - ABOVE, q_n, q_h, q_d, BM, D, DP, Q_LAYOUT)
    depth_m = offs_m
    if WINDOW:
        depth_m = tl.load(DEPTH + offs_m, mask=offs_m < N, other=0)
    m_i = tl.full([BM], MASKED, tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP_V], tl.float32)

    SPLIT: tl.constexpr = LIST // BN
    items, runs, fulls, partials = tile_list(LIST_ROWS, LIST_ITEMS, m0, LIST, SPLIT)
    run = items
    n = tl.load(run) * SPLIT
    last = tl.load(run + 1) * SPLIT
    for _ in tl.range(0, fulls):
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, K, V, ENDS, DEPTH, hk, n * BN, offs_m, depth_m, N, k_n, k_h, k_d, v_n, v_h, v_d,
            scale, cap, window,
            BN, D, DP, D_V, DP_V, K_LAYOUT, V_LAYOUT, WINDOW, SOFTCAP, PRECISION, False)  # fmt: skip
        run, n, last = next_full(run, n, last, SPLIT)
    items += 2 * runs
    for i in tl.range(0, partials * SPLIT):
        n0 = tl.load(items + i // SPLIT) * LIST + (i % SPLIT) * BN
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, K, V, ENDS, DEPTH, hk, n0, offs_m, depth_m, N, k_n, k_h, k_d, v_n, v_h, v_d, scale, cap,
            window,
            BN, D, DP, D_V, DP_V, K_LAYOUT, V_LAYOUT, WINDOW, SOFTCAP, PRECISION, True)  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(SINKS + h) * LOG2E
        m_new = tl.maximum(m_i, sink)
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.math.exp2(sink - m_new)
        acc = acc * alpha[:, None]
        m_i = m_new
    # Every real token sees itself, so a row sees nothing exactly where its subtree is empty (padding), or past N.
    real = offs_m < tl.load(END + offs_m, mask=offs_m < N, other=0)
    l_i = tl.where(real, l_i, 1.0)
    acc = tl.where(real[:, None], acc / l_i[:, None], 0.0)
    store_tile(OUT, acc, h, m0 - ABOVE, N - ABOVE, H, BM, D_V, DP_V, OUT_LAYOUT)
    tl.store(LSE + h.to(tl.int64) * row_h + offs_m, tl.where(real, m_i + tl.math.log2(l_i), 0.0), mask=offs_m < N)
