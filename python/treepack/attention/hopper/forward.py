# mypy: ignore-errors
"""The forward kernel for Hopper: persistent programs that take one item, (query tile, query head), after another.

    producer     K0 | header, Q | K1 V0 | K2 V1 | ... | V(last)      | next item ...
    consumer     S = Q K0, softmax, pack P   | step 1 | step 2 | ... | release Q, O += P V(last), store | next item ...

    step i       issue S = Q Ki       issue O += P V(i-1)       wait S, release Ki
                 softmax of S while O's product runs
                 wait O, pack P, release V(i-1), rescale O

128 query rows (64 a consumer) against 128 key rows, two K and two V buffers: 193 KB of shared memory at D = 128. At D =
256 64 key rows (BN), and the output leaves through Q's buffer, which is freed when it has left: 193 KB again. The
tile of the diagonal comes first and is masked by both rules; the other partial tiles lie before it, so
`m < subtree_end[n]`, which comes with K, is all they need, and with a window the depths, which come the same way; runs
of full tiles come last, unmasked. q and k are D wide, v and the output DV: powers of two, of which the columns that a
head does not have are 0. At 192 / 128, D = 256 and DV = 128, the output has a buffer of its own: 193 KB.

The next item goes to the program that asks first (an atomic counter, QUEUE): a program's fixed cost is paid once, and
none waits for another. Which program computes an item has no influence on its bits. The header tells the consumers
which item it is; no tiles mean the end. It lives by Q's ring: written when both consumers have released the last Q,
which they do after reading the last header, and reported with Q.
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
    LOWEST,
    MASKED,
    copy_keys,
    copy_out,
    copy_rows,
    depth_buffers,
    make_buffers,
    make_ring,
    next_tile,
    opaque,
    pack,
    query_item,
    resident,
    tanh,
    tile_list,
    unpack,
)
from .names import copy_to_shared, thread_barrier


@gluon.jit
def _copy_values(
    v_desc, v_ring, use, head, n, N, BN: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr
):
    v_ring.acquire(use)
    mbarrier.expect(v_ring.filled(use), BN * DV * BYTES)
    copy_rows(v_desc, v_ring.filled(use), v_ring.at(use), head, n * BN, N, DV, ROWS)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, ends_desc, depth_desc, LIST_ROWS, LIST_ITEMS, SCHEDULE, QUEUE, header, q_ring, k_ring,
    v_ring, ends, depths, N, ABOVE, n_tiles, n_items, G, SECTION,
    BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BYTES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 128 // BN
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    place = gl.arange(0, 4, FOUR)
    item = gl.program_id(0)
    tile, h = query_item(gl.minimum(item, n_items - 1), SCHEDULE, n_tiles, SECTION)
    c = 0  # K and V tiles so far
    r = 0  # items so far
    while item < n_items:
        run, last, partials, total = tile_list(LIST_ROWS, LIST_ITEMS, tile)
        # Asked for now, needed at the end: the answers come while the tiles are copied.
        following = gl.atomic_add(QUEUE, 1, sem="relaxed") + gl.num_programs(0)
        tile_after, h_after = query_item(gl.minimum(following, n_items - 1), SCHEDULE, n_tiles, SECTION)
        hk = h // G
        n = tile
        k_ring.acquire(c)
        mbarrier.expect(k_ring.filled(c), BN * D * BYTES + BN * 4 * (1 + WINDOW))
        copy_rows(k_desc, k_ring.filled(c), k_ring.at(c), hk, n * 128, N, D, K_ROWS)
        copy_to_shared(ends_desc, [0, n * 128], k_ring.filled(c), ends.index(c % k_ring.stages))
        if WINDOW:
            copy_to_shared(depth_desc, [0, n * 128], k_ring.filled(c), depths.index(c % k_ring.stages))

        q_ring.acquire(r)
        words = gl.where(place == 0, tile, gl.where(place == 1, h, gl.where(place == 2, partials, total)))
        header.store(words)
        thread_barrier()  # all lanes have written before one of them reports it, with Q
        mbarrier.expect(q_ring.filled(r), 2 * 64 * D * BYTES)
        row = tile * 128 - ABOVE
        copy_rows(q_desc, q_ring.filled(r), q_ring.buffers.index(0), h, row, N - ABOVE, D, Q_ROWS)
        copy_rows(q_desc, q_ring.filled(r), q_ring.buffers.index(1), h, row + 64, N - ABOVE, D, Q_ROWS)

        key = n * PARTS
        for part in gl.static_range(1, PARTS):
            copy_keys(
                k_desc, ends_desc, depth_desc, k_ring, ends, depths, c + part, part, partials * PARTS, hk, key + 1, N,
                BN, D, BYTES, K_ROWS, WINDOW
            )  # fmt: skip
            _copy_values(v_desc, v_ring, c + part - 1, hk, key, N, BN, DV, BYTES, V_ROWS)
            key += 1
        for i in range(1, total):
            n, run = next_tile(i - 1, n, run, last, partials)
            for part in gl.static_range(PARTS):
                before = key
                key = n * PARTS + part
                j = i * PARTS + part
                copy_keys(
                    k_desc, ends_desc, depth_desc, k_ring, ends, depths, c + j, j, partials * PARTS, hk, key, N, BN, D,
                    BYTES, K_ROWS, WINDOW
                )  # fmt: skip
                _copy_values(v_desc, v_ring, c + j - 1, hk, before, N, BN, DV, BYTES, V_ROWS)
        c += total * PARTS
        _copy_values(v_desc, v_ring, c - 1, hk, key, N, BN, DV, BYTES, V_ROWS)
        item = following
        tile = tile_after
        h = h_after
        r += 1
    q_ring.acquire(r)
    header.store(gl.full([4], 0, gl.int32, FOUR))  # no tiles: the end
    thread_barrier()
    mbarrier.arrive(q_ring.filled(r), count=1)


@gluon.jit
def _softmax(s, m_i, scale):
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    return gl.exp2(s * scale - gl.expand_dims(m_new, 1)), m_new, gl.exp2(m_i - m_new)


@gluon.jit
def _step(
    i, o, packed, m_i, l_i, q_ring, k_ring, v_ring, ends, depths, rows_m, too_high, scale, cap,
    MASK: gl.constexpr, BN: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    HALF: gl.constexpr, LS: gl.constexpr, LO: gl.constexpr, rows_n=None,
):  # fmt: skip
    """Tile number i of this program: its scores, and the values of tile i - 1; `rows_n` where it is of the diagonal."""
    p = unpack(packed, DTYPE, gl.DotOperandLayout(0, LO, 2))
    i = opaque(i)  # with Triton 3.9 the addresses of both rings, carried along, cost 40 moves a step
    k_ring.wait(i)
    zero = gl.zeros([64, BN], gl.float32, LS)
    q = (
        q_ring.buffers.index(HALF) if BN == 128 else resident(q_ring.buffers, HALF)
    )  # the latter costs 2 to 4 % at BN = 128
    s = warpgroup_mma(q, k_ring.at(i).permute([1, 0]), zero, use_acc=False, is_async=True)
    v_ring.wait(i - 1)
    o = warpgroup_mma(p, v_ring.at(i - 1), o, is_async=True)
    LATE: gl.constexpr = MASK and WINDOW  # two vectors that wait for S beside it would spill (164 bytes at D = 128)
    if MASK and not LATE:
        end_n = ends.index(i % k_ring.stages).load(LS)
    s = warpgroup_mma_wait(1, deps=[s])
    if not LATE:
        k_ring.release(i)
    factor = scale
    if SOFTCAP:
        s = tanh(s * scale)
        factor = cap
    if MASK:
        if LATE:
            end_n = ends.index(i % k_ring.stages).load(LS)
        s = gl.where(gl.expand_dims(rows_m, 1) < end_n, s, MASKED)
    if rows_n is not None:
        s = gl.where(gl.expand_dims(rows_n, 0) <= gl.expand_dims(rows_m, 1), s, MASKED)
    if LATE:
        depth_n = depths.index(i % k_ring.stages).load(LS)
        s = gl.where(depth_n > gl.expand_dims(too_high, 1), s, MASKED)
        k_ring.release(i)
    p_new, m_i, alpha = _softmax(s, m_i, factor)
    l_i = l_i * alpha + gl.sum(p_new, 1)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    packed = pack(p_new, DTYPE)  # after the wait: until here P's registers belong to the product in flight
    v_ring.release(i - 1)
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, LO)), 1)
    return o, packed, m_i, l_i


@gluon.jit
def _word(words, place, j: gl.constexpr):
    return gl.sum(gl.where(place == j, words, 0), 0)


@gluon.jit
def _read(header):
    """The four words of the header, in every thread of a consumer."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    words = header.load(FOUR)
    place = gl.arange(0, 4, FOUR)
    return _word(words, place, 0), _word(words, place, 1), _word(words, place, 2), _word(words, place, 3)


@gluon.jit
def _consume(
    out_desc, LSE, END, SINKS, DEPTH, header, q_ring, k_ring, v_ring, ends, depths, out_buffers, scale, cap, window,
    row_h, N, ABOVE,
    HALF: gl.constexpr, BN: gl.constexpr, DV: gl.constexpr, DTYPE: gl.constexpr, HAS_SINKS: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, OUT_IN_Q: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 128 // BN
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    q = q_ring.buffers.index(HALF)
    out = out_buffers.index(HALF)
    c = 0
    r = 0
    q_ring.wait(0)
    tile, h, partials, total = _read(header)
    while total > 0:
        m0 = tile * 128
        rows_m = m0 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LS))
        real = rows_m < gl.load(END + rows_m, mask=rows_m < N, other=0)
        too_high = rows_m
        if WINDOW:  # the depth of the first token above that the window leaves out
            too_high = gl.load(DEPTH + rows_m, mask=rows_m < N, other=0) - window

        k_ring.wait(c)
        zero = gl.zeros([64, BN], gl.float32, LS)
        s = warpgroup_mma(q, k_ring.at(c).permute([1, 0]), zero, use_acc=False, is_async=True)
        end_n = ends.index(c % k_ring.stages).load(LS)
        if WINDOW:
            depth_n = depths.index(c % k_ring.stages).load(LS)
        s = warpgroup_mma_wait(0, deps=[s])
        k_ring.release(c)
        rows_n = m0 + gl.arange(0, BN, gl.SliceLayout(0, LS))
        seen = (gl.expand_dims(rows_n, 0) <= gl.expand_dims(rows_m, 1)) & (gl.expand_dims(rows_m, 1) < end_n)
        if WINDOW:
            seen = seen & (depth_n > gl.expand_dims(too_high, 1))
        factor = scale
        if SOFTCAP:
            s = tanh(s * scale)
            factor = cap
        p, m_i, alpha = _softmax(
            gl.where(seen, s, MASKED), gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, LS)), factor
        )
        l_i = gl.sum(p, 1)
        packed = pack(p, DTYPE)
        o = gl.zeros([64, DV], gl.float32, LO)
        for part in gl.static_range(1, PARTS):
            o, packed, m_i, l_i = _step(
                c + part, o, packed, m_i, l_i, q_ring, k_ring, v_ring, ends, depths, rows_m, too_high, scale, cap, True,
                BN, DTYPE, WINDOW, SOFTCAP, HALF, LS, LO, rows_n + part * BN
            )  # fmt: skip
        for i in range(c + PARTS, c + partials * PARTS):
            o, packed, m_i, l_i = _step(
                i, o, packed, m_i, l_i, q_ring, k_ring, v_ring, ends, depths, rows_m, too_high, scale, cap, True, BN,
                DTYPE, WINDOW, SOFTCAP, HALF, LS, LO
            )  # fmt: skip
        for i in range(c + partials * PARTS, c + total * PARTS):
            o, packed, m_i, l_i = _step(
                i, o, packed, m_i, l_i, q_ring, k_ring, v_ring, ends, depths, rows_m, too_high, scale, cap, False, BN,
                DTYPE, WINDOW, SOFTCAP, HALF, LS, LO
            )  # fmt: skip
        c += total * PARTS
        if not OUT_IN_Q:
            q_ring.release(r)

        v_ring.wait(c - 1)
        p = unpack(packed, DTYPE, gl.DotOperandLayout(0, LO, 2))
        o = warpgroup_mma(p, v_ring.at(c - 1), o, is_async=True)
        if HAS_SINKS:  # under the last product: o is in units of the old maximum, so alpha goes into its factor
            sink = gl.load(SINKS + h) * LOG2E
            m_new = gl.maximum(m_i, sink)
            alpha = gl.exp2(m_i - m_new)
            l_i = l_i * alpha + gl.exp2(sink - m_new)
            m_i = m_new
        l_i = gl.where(real, l_i, 1.0)
        lse = gl.where(real, m_i + gl.log2(l_i), 0.0)
        gl.store(LSE + h.to(gl.int64) * row_h + rows_m, lse, mask=rows_m < N)
        share = 1.0 / l_i
        if HAS_SINKS:
            share = share * alpha
        share = gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, LO)), 1)
        tma.store_wait(0)  # the last item's output has left its buffer
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        v_ring.release(c - 1)
        rows_o = m0 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LO))
        real_o = rows_o < gl.load(END + rows_o, mask=rows_o < N, other=0)
        out.store(gl.where(gl.expand_dims(real_o, 1), o * share, 0.0).to(DTYPE))
        fence_async_shared()
        copy_out(out_desc, out, h, m0 - ABOVE + HALF * 64, DV)
        if OUT_IN_Q:
            tma.store_wait(0)
            thread_barrier()  # the thread that reports it need not be the one that stored
            q_ring.release(r)

        r += 1
        q_ring.wait(r)
        # Loaded for every item: carried along and used as nothing but bounds of the loops above, they would keep their
        # first values (wrong results, a hang).
        tile, h, partials, total = _read(header)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["row_h", "N", "ABOVE", "n_tiles", "n_items", "G", "SECTION", "window"],
    do_not_specialize_on_alignment=["LSE", "END", "SINKS", "LIST_ROWS", "LIST_ITEMS", "SCHEDULE", "QUEUE", "DEPTH"],
)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, ends_desc, LSE, END, SINKS, LIST_ROWS, LIST_ITEMS, SCHEDULE, QUEUE,
    scale, row_h, N, ABOVE, n_tiles, n_items, G, SECTION, depth_desc, DEPTH, window, cap,
    D: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, Q_ROWS: gl.constexpr,
    K_ROWS: gl.constexpr, V_ROWS: gl.constexpr, HAS_SINKS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor. `scale` gives base-2 logits, with SOFTCAP the argument of tanh, which `cap` turns
    into base-2 logits; the queries are the rows from ABOVE on, a multiple of 128; SCHEDULE[4 i] is their tile with the
    i-th longest list; QUEUE is one int32, 0 at the start. `depth_desc`, DEPTH and `window` are None without a window,
    `cap` without a cap."""
    DTYPE: gl.constexpr = q_desc.dtype
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    header = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ring = make_ring(q_desc, 1, 2)
    k_ring = make_ring(k_desc, STAGES)
    v_ring = make_ring(v_desc, STAGES)
    ends = gl.allocate_shared_memory(gl.int32, [STAGES, 1, BN], ends_desc.layout)
    depths = depth_buffers(depth_desc, ends, WINDOW, STAGES)
    OUT_IN_Q: gl.constexpr = DV > 128
    out_buffers = q_ring.buffers
    if not OUT_IN_Q:
        out_buffers = make_buffers(out_desc, 2)
    gl.warp_specialize(
        [
            (_consume, (out_desc, LSE, END, SINKS, DEPTH, header, q_ring, k_ring, v_ring, ends, depths, out_buffers,
                        scale, cap, window, row_h, N, ABOVE, 0, BN, DV, DTYPE, HAS_SINKS, WINDOW, SOFTCAP,
                        OUT_IN_Q)),
            (_consume, (out_desc, LSE, END, SINKS, DEPTH, header, q_ring, k_ring, v_ring, ends, depths, out_buffers,
                        scale, cap, window, row_h, N, ABOVE, 1, BN, DV, DTYPE, HAS_SINKS, WINDOW, SOFTCAP,
                        OUT_IN_Q)),
            (_produce, (q_desc, k_desc, v_desc, ends_desc, depth_desc, LIST_ROWS, LIST_ITEMS, SCHEDULE, QUEUE, header,
                        q_ring, k_ring, v_ring, ends, depths, N, ABOVE, n_tiles, n_items, G, SECTION, BN, D, DV, BYTES,
                        Q_ROWS, K_ROWS, V_ROWS, WINDOW)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
