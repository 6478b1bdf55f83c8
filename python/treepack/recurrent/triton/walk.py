# mypy: ignore-errors
"""The only steps of the chunk form that cross chunks, walked over a tree: the state, and going back its gradient.

A program takes one path (plan.py), one value head and one block of the value dimension. It carries the state (K, BV)
in registers along the path; at a fork it stores the state for the paths that begin there, which wait for it.

    forward   h before a chunk is stored;  v' = U - W h;   h = decay h + K^T (v' * what is left of it at the end)
    backward  dh after a chunk is stored;  dV' = dV + K dh (the same);  dh = decay dh + scale Q^T dO - W^T dV'

Without W it is linear attention: v' = U. Gates are cumulated within a chunk, base 2: G per head, GK per channel (then
K and Q come gated). Products take the dtype of the inputs, the state is float32.

Paths are taken by a ticket, so that a program only waits for one that runs or has ended. The gradients of the paths of
one fork are added in the order of their tickets: bits are equal from run to run.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter runs one program after the other and knows no assembly.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _all_threads(x):
    """x, once all threads are here. `tl.debug_barrier` in a loop keeps Triton from pipelining it."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def _path(PATHS, FLAGS, HV: tl.constexpr, NV: tl.constexpr, REVERSED: tl.constexpr, paths):
    """(path, head, block of the value dimension) of this program."""
    ticket = tl.atomic_add(FLAGS, 1, sem="relaxed")
    path = ticket // (HV * NV)
    rest = ticket % (HV * NV)
    if REVERSED:
        path = paths - 1 - path
    return PATHS + path * 4, rest // NV, rest % NV


@triton.jit
def _wait(flag, value):
    """Until a flag is `value`; what was written before it was set is seen after."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while seen != value:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    _all_threads(seen)


@triton.jit
def _signal(flag, value):
    value = _all_threads(value)  # their stores come before
    tl.atomic_xchg(flag, value, sem="release", scope="gpu")


@triton.jit
def _columns(m, ok, K: tl.constexpr, BK: tl.constexpr):
    """The mask of (rows, K), where K is no power of two."""
    mask = m[:, None]
    if K != BK:
        mask = mask & (ok < K)[None, :]
    return mask


@triton.jit(do_not_specialize=["paths"])
def walk_forward(
    K_, U, W, VN, G, GK, HS, HT, CHUNKS, PATHS, FLAGS, paths,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, USE_W: tl.constexpr, USE_GK: tl.constexpr,
):  # fmt: skip
    """HS (chunks, HV, K, V): the state before each chunk; HT (forks, HV, K, V) float32: at each fork."""
    NV: tl.constexpr = V // BV
    at, ih, iv = _path(PATHS, FLAGS, HV, NV, False, paths)
    first = tl.load(at)
    last = tl.load(at + 1)
    fork = tl.load(at + 2)
    ok = tl.arange(0, BK)
    ov = iv * BV + tl.arange(0, BV)
    kv = ok[:, None] * V + ov[None, :]
    mk = (ok < K)[:, None]
    h = tl.zeros([BK, BV], tl.float32)
    if fork >= 0:
        _wait(FLAGS + 1 + (fork * HV + ih) * NV + iv, tl.cast(1, tl.int32))
        h = tl.load(HT + (fork.to(tl.int64) * HV + ih) * K * V + kv, mask=mk, other=0.0)
    for c in range(first, last):
        a = tl.load(CHUNKS + c * 4).to(tl.int64)
        n = tl.load(CHUNKS + c * 4 + 1)
        fork = tl.load(CHUNKS + c * 4 + 2)
        ot = tl.arange(0, BT)
        m = ot < n
        row = (a + ot) * HV + ih
        tl.store(HS + (tl.cast(c, tl.int64) * HV + ih) * K * V + kv, h.to(HS.dtype.element_ty), mask=mk)
        v = tl.load(U + row[:, None] * V + ov[None, :], mask=m[:, None], other=0.0)
        if USE_W:
            w = tl.load(W + row[:, None] * K + ok[None, :], mask=_columns(m, ok, K, BK), other=0.0)
            v = v - tl.dot(w, h.to(w.dtype))
            tl.store(VN + row[:, None] * V + ov[None, :], v.to(VN.dtype.element_ty), mask=m[:, None])
        if USE_GK:
            end = tl.load(GK + ((a + n - 1) * HV + ih) * K + ok, mask=ok < K, other=0.0).to(tl.float32)
            h = h * tl.exp2(end)[:, None]
        else:
            end = tl.load(G + (a + n - 1) * HV + ih).to(tl.float32)
            g = tl.load(G + row, mask=m, other=0.0).to(tl.float32)
            v = v * tl.where(m, tl.exp2(end - g), 0.0)[:, None]
            h = h * tl.exp2(end)
        rowk = (a + ot) * H + ih // (HV // H)
        k = tl.load(K_ + rowk[:, None] * K + ok[None, :], mask=_columns(m, ok, K, BK), other=0.0)
        h = tl.dot(tl.trans(k), v.to(k.dtype), h)
        if fork >= 0:
            tl.store(HT + (fork.to(tl.int64) * HV + ih) * K * V + kv, h, mask=mk)
            _signal(FLAGS + 1 + (fork * HV + ih) * NV + iv, tl.cast(1, tl.int32))


@triton.jit(do_not_specialize=["paths"])
def walk_backward(
    Q, K_, W, DO, DV, DV2, G, GK, DHS, DHT, CHUNKS, PATHS, FLAGS, scale, paths,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, USE_W: tl.constexpr, USE_GK: tl.constexpr,
):  # fmt: skip
    """DHS (chunks, HV, K, V): the gradient of the state after each chunk; DHT (forks, HV, K, V) float32: the sum of
    what the paths of each fork add."""
    NV: tl.constexpr = V // BV
    at, ih, iv = _path(PATHS, FLAGS, HV, NV, True, paths)
    first = tl.load(at)
    last = tl.load(at + 1)
    begins = tl.load(at + 2)
    turn = tl.load(at + 3)
    ok = tl.arange(0, BK)
    ov = iv * BV + tl.arange(0, BV)
    kv = ok[:, None] * V + ov[None, :]
    mk = (ok < K)[:, None]
    d = tl.zeros([BK, BV], tl.float32)
    for back in range(last - first):
        c = last - 1 - back
        a = tl.load(CHUNKS + c * 4).to(tl.int64)
        n = tl.load(CHUNKS + c * 4 + 1)
        fork = tl.load(CHUNKS + c * 4 + 2)
        if fork >= 0:
            _wait(FLAGS + 1 + (fork * HV + ih) * NV + iv, tl.load(CHUNKS + c * 4 + 3))
            d += tl.load(DHT + (fork.to(tl.int64) * HV + ih) * K * V + kv, mask=mk, other=0.0)
        ot = tl.arange(0, BT)
        m = ot < n
        row = (a + ot) * HV + ih
        rowk = (a + ot) * H + ih // (HV // H)
        tl.store(DHS + (tl.cast(c, tl.int64) * HV + ih) * K * V + kv, d.to(DHS.dtype.element_ty), mask=mk)
        k = tl.load(K_ + rowk[:, None] * K + ok[None, :], mask=_columns(m, ok, K, BK), other=0.0)
        dv = tl.dot(k, d.to(k.dtype))
        q = tl.load(Q + rowk[:, None] * K + ok[None, :], mask=_columns(m, ok, K, BK), other=0.0)
        if USE_GK:
            end = tl.load(GK + ((a + n - 1) * HV + ih) * K + ok, mask=ok < K, other=0.0).to(tl.float32)
            d = d * tl.exp2(end)[:, None]
        else:
            end = tl.load(G + (a + n - 1) * HV + ih).to(tl.float32)
            g = tl.load(G + row, mask=m, other=0.0).to(tl.float32)
            dv = dv * tl.where(m, tl.exp2(end - g), 0.0)[:, None]
            d = d * tl.exp2(end)
            q = (q * tl.exp2(g)[:, None]).to(k.dtype)
        dv += tl.load(DV + row[:, None] * V + ov[None, :], mask=m[:, None], other=0.0)
        tl.store(DV2 + row[:, None] * V + ov[None, :], dv.to(DV2.dtype.element_ty), mask=m[:, None])
        do = tl.load(DO + row[:, None] * V + ov[None, :], mask=m[:, None], other=0.0)
        d += tl.dot(tl.trans(q), do.to(k.dtype)) * scale
        if USE_W:
            w = tl.load(W + row[:, None] * K + ok[None, :], mask=_columns(m, ok, K, BK), other=0.0)
            d -= tl.dot(tl.trans(w), dv.to(w.dtype))
    if begins >= 0:
        flag = FLAGS + 1 + (begins * HV + ih) * NV + iv
        into = DHT + (begins.to(tl.int64) * HV + ih) * K * V + kv
        _wait(flag, turn)
        if turn > 0:
            d += tl.load(into, mask=mk, other=0.0)
        tl.store(into, d, mask=mk)
        _signal(flag, turn + 1)
