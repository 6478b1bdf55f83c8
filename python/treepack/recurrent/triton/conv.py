# mypy: ignore-errors
"""The convolution along paths and its gradients. Every kernel reads rows and writes rows once; no atomics.

    forward    y[t] = act(b + sum over j of w[W-1-j] x[anc_j(t)])
    backward   dz = dy act'(pre), pre made again from x;  dw, db: partial sums of a block of tokens, added later
    inputs     dx[t] = sum over j of w[W-1-j] dz[t + j] where anc_j(t + j) = t: the tokens of one run, or a first child
    forked     dx[t] again for the few tokens that have others W - 1 or fewer tokens below, by a list of these

ANC (W - 1, N): the first to (W - 1)-th ancestor of each token, -1 where there is none. Rows from `real` on are padding.
"""

import triton
import triton.language as tl


@triton.jit
def _tap(WEIGHT, oc, mc, j: tl.constexpr, WIDTH: tl.constexpr):
    """The weights of the j-th ancestor, float32 (channels,)."""
    return tl.load(WEIGHT + oc * WIDTH + (WIDTH - 1 - j), mask=mc, other=0.0).to(tl.float32)


@triton.jit
def _row(X, ANC, ot, mt, oc, mc, n, j: tl.constexpr, stride):
    """x at the j-th ancestor of each token, float32 (tokens, channels)."""
    if j == 0:
        at = ot
        there = mt
    else:
        at = tl.load(ANC + (j - 1) * n + ot, mask=mt, other=-1)
        there = at >= 0
    mask = there[:, None] & mc[None, :]
    return tl.load(X + at.to(tl.int64)[:, None] * stride + oc[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "real"])
def conv_forward(
    X, WEIGHT, BIAS, ANC, Y, n, real, stride, C,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    ot = tl.program_id(0) * BN + tl.arange(0, BN)
    oc = tl.program_id(1) * BC + tl.arange(0, BC)
    mt = ot < real
    mc = oc < C
    y = tl.zeros([BN, BC], tl.float32)
    if HAS_BIAS:
        y += tl.load(BIAS + oc, mask=mc, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        y += _row(X, ANC, ot, mt, oc, mc, n, j, stride) * _tap(WEIGHT, oc, mc, j, WIDTH)[None, :]
    if SILU:
        y = y * tl.sigmoid(y)
    y = tl.where(mt[:, None], y, 0.0)
    out = Y + ot.to(tl.int64)[:, None] * C + oc[None, :]
    tl.store(out, y.to(Y.dtype.element_ty), mask=(ot < n)[:, None] & mc[None, :])


@triton.jit(do_not_specialize=["n", "real"])
def conv_backward(
    X, WEIGHT, BIAS, ANC, DY, DZ, DW, DB, n, real, stride, C,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """DW (blocks, W, C), DB (blocks, C) float32: sums over the TILES * BN tokens of a program, of four taps: the third
    dimension of the grid has the rest. They are added up per token of a tile, and over its tokens once, at the end."""
    block = tl.program_id(0)
    oc = tl.program_id(1) * BC + tl.arange(0, BC)
    four = tl.program_id(2)
    mc = oc < C
    db = tl.zeros([BN, BC], tl.float32)
    dw0 = tl.zeros([BN, BC], tl.float32)
    dw1 = tl.zeros([BN, BC], tl.float32)
    dw2 = tl.zeros([BN, BC], tl.float32)
    dw3 = tl.zeros([BN, BC], tl.float32)
    for tile in range(TILES):
        ot = (block * TILES + tile) * BN + tl.arange(0, BN)
        mt = ot < real
        mask = mt[:, None] & mc[None, :]
        rows = ot.to(tl.int64)[:, None] * C + oc[None, :]
        dz = tl.load(DY + rows, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            y = tl.zeros([BN, BC], tl.float32)
            if HAS_BIAS:
                y += tl.load(BIAS + oc, mask=mc, other=0.0).to(tl.float32)[None, :]
            for j in tl.static_range(WIDTH):
                y += _row(X, ANC, ot, mt, oc, mc, n, j, stride) * _tap(WEIGHT, oc, mc, j, WIDTH)[None, :]
            s = tl.sigmoid(y)
            dz = dz * s * (1.0 + y * (1.0 - s))
        if WIDTH <= 4:
            dw0 += dz * _row(X, ANC, ot, mt, oc, mc, n, 0, stride)
            if WIDTH > 1:
                dw1 += dz * _row(X, ANC, ot, mt, oc, mc, n, 1, stride)
            if WIDTH > 2:
                dw2 += dz * _row(X, ANC, ot, mt, oc, mc, n, 2, stride)
            if WIDTH > 3:
                dw3 += dz * _row(X, ANC, ot, mt, oc, mc, n, 3, stride)
        else:
            for j in tl.static_range(WIDTH):
                if j // 4 == four:
                    add = dz * _row(X, ANC, ot, mt, oc, mc, n, j, stride)
                    if j % 4 == 0:
                        dw0 += add
                    elif j % 4 == 1:
                        dw1 += add
                    elif j % 4 == 2:
                        dw2 += add
                    else:
                        dw3 += add
        db += dz
        if SILU and four == 0:
            tl.store(DZ + rows, dz.to(DZ.dtype.element_ty), mask=mask)
    out = DW + (block * WIDTH + four * 4) * C + oc
    tap = tl.zeros([BC], tl.int32) + four * 4
    tl.store(out, tl.sum(dw0, 0), mask=mc)
    tl.store(out + C, tl.sum(dw1, 0), mask=mc & (tap + 1 < WIDTH))
    tl.store(out + 2 * C, tl.sum(dw2, 0), mask=mc & (tap + 2 < WIDTH))
    tl.store(out + 3 * C, tl.sum(dw3, 0), mask=mc & (tap + 3 < WIDTH))
    if four == 0:
        tl.store(DB + block * C + oc, tl.sum(db, 0), mask=mc)


@triton.jit(do_not_specialize=["n", "real"])
def conv_inputs(
    DZ, WEIGHT, ANC, DX, n, real, C, WIDTH: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    ot = tl.program_id(0) * BN + tl.arange(0, BN)
    oc = tl.program_id(1) * BC + tl.arange(0, BC)
    mc = oc < C
    dx = tl.zeros([BN, BC], tl.float32)
    for j in tl.static_range(WIDTH):
        at = ot + j
        there = at < real
        if j > 0:
            there = there & (tl.load(ANC + (j - 1) * n + at, mask=there, other=-1) == ot)
        mask = there[:, None] & mc[None, :]
        dz = tl.load(DZ + at.to(tl.int64)[:, None] * C + oc[None, :], mask=mask, other=0.0)
        dx += dz.to(tl.float32) * _tap(WEIGHT, oc, mc, j, WIDTH)[None, :]
    out = DX + ot.to(tl.int64)[:, None] * C + oc[None, :]
    tl.store(out, dx.to(DX.dtype.element_ty), mask=(ot < n)[:, None] & mc[None, :])


@triton.jit
def conv_forked(DZ, WEIGHT, TOKENS, OFFSETS, BELOW, DX, C, WIDTH: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr):
    """BELOW: (descendant, its distance) of each of TOKENS, from OFFSETS on."""
    i = tl.program_id(0)
    oc = tl.program_id(1) * BC + tl.arange(0, BC)
    mc = oc < C
    first = tl.load(OFFSETS + i)
    last = tl.load(OFFSETS + i + 1)
    dx = tl.zeros([BC], tl.float32)
    for start in range(first, last, BL):
        ol = start + tl.arange(0, BL)
        ml = ol < last
        below = tl.load(BELOW + ol * 2, mask=ml, other=0)
        j = tl.load(BELOW + ol * 2 + 1, mask=ml, other=0)
        mask = ml[:, None] & mc[None, :]
        dz = tl.load(DZ + below.to(tl.int64)[:, None] * C + oc[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(WEIGHT + oc[None, :] * WIDTH + (WIDTH - 1 - j)[:, None], mask=mask, other=0.0).to(tl.float32)
        dx += tl.sum(dz * w, 0)
    row = tl.load(TOKENS + i).to(tl.int64)
    tl.store(DX + row * C + oc, dx.to(DX.dtype.element_ty), mask=mc)
