# mypy: ignore-errors
"""What the Hopper kernels share: rings between the producer warp and the consumers, the walk over the tile lists, P as
packed pairs.

Written in Gluon, Triton's lower level, which is experimental: `versions.TESTED` names the versions that these
run with, `names` what moved between them.
This file and the kernels import nothing but Triton, so that they compile for sm_90 on any machine
(benches/gluon_compile.py).

    one program, 384 threads, 1 per multiprocessor

      producer (1 warp, 24-40 registers)        two consumers (4 warps each, 232-240 registers, 64 rows of the tile)
      ----------------------------------        -----------------------------------------------------------------
      ring.acquire(i)   <---- empty barrier ----  ring.release(i)      after the last product that reads the buffer
      TMA copy into ring.at(i)
                        ----- full barrier ---->  ring.wait(i)         then wgmma straight from shared memory

Axes as in triton/common.py: m = query row, n = key row, d = head column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from .names import copy_to_global, copy_to_shared

# Put in before the scale, which therefore must not round to 0 (GLUON_SCALE). A row may see nothing of a tile, even of
# its first where the tile of the diagonal comes in halves, so the maximum of a row starts at a number: exp2(-inf -
# LOWEST) is 0. A finite mask would not do: scale * mask and the maximum, which was rounded, differ by up to 1e21.
MASKED = gl.constexpr(float("-inf"))
LOWEST = gl.constexpr(-1.0e38)
LOG2E = gl.constexpr(1.4426950408889634)
NO_ITEM = gl.constexpr(-(1 << 31))  # tiles.NO_ITEM


@aggregate
class Ring:
    """`stages` buffers that the producer fills and both consumers empty, in turn: use i is of buffer i % stages."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, stages):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def at(self, i):
        return self.buffers.index(i % self.stages)

    @gluon.jit
    def filled(self, i):
        """The barrier that the copies of use i report to."""
        return self.full.index(i % self.stages)

    @gluon.jit
    def acquire(self, i):
        """The producer waits until use i - stages is over; the first uses wait for nothing."""
        mbarrier.wait(self.empty.index(i % self.stages), ((i // self.stages) & 1) ^ 1)

    @gluon.jit
    def wait(self, i):
        mbarrier.wait(self.full.index(i % self.stages), (i // self.stages) & 1)

    @gluon.jit
    def release(self, i):
        mbarrier.arrive(self.empty.index(i % self.stages), count=1)


@gluon.jit
def make_buffers(desc, count: gl.constexpr):
    """`count` buffers of the descriptor's block, as matrices."""
    axes: gl.constexpr = len(desc.block_shape)
    rows: gl.constexpr = desc.block_shape[axes - 2]
    columns: gl.constexpr = desc.block_shape[axes - 1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [count, rows, columns], layout)


@gluon.jit
def make_ring(desc, stages: gl.constexpr, parts: gl.constexpr = 1):
    """`stages * parts` buffers of the descriptor's block, read by two consumers; with parts, `buffers` by part."""
    buffers = make_buffers(desc, stages * parts)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    return Ring(buffers, full, empty, stages)


@gluon.jit
def resident(buffers, i: gl.constexpr):
    """Buffer i, which stays for the whole loop, with an address that the compiler does not know to be the same in every
    step. Else it forms the 64-bit descriptors of all its products before the loop, has no registers for them, and
    spills them (160 to 180 bytes with Triton 3.9)."""
    return buffers.index(opaque(i))


@gluon.jit
def opaque(i):
    """i, of which the compiler does not know that it is i: what is formed from it is formed here, and neither before a
    loop nor carried along it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_rows(desc, barrier, buffer, head, row, N, D: gl.constexpr, ROWS: gl.constexpr):
    """Starts the copy of rows row .. of a head: from (N, H * D), or with ROWS from (H * N, D). Past N: zeros, or
    with ROWS the next head's rows, whose scores the mask then drops (after the last head: zeros). From a descriptor of
    (H, N, size) the columns past the size are zeros, too."""
    if len(desc.block_shape) == 3:
        copy_to_shared(desc, [head, row, 0], barrier, buffer.reshape([1, buffer.shape[0], D]))
    elif ROWS:
        copy_to_shared(desc, [head * N + row, 0], barrier, buffer)
    else:
        copy_to_shared(desc, [row, head * D], barrier, buffer)


@gluon.jit
def copy_out(desc, buffer, head, row, D: gl.constexpr):
    """Starts the copy of a buffer to rows row .. of a head of (N, H * D), or of (H, N, size): as many columns as there
    are."""
    if len(desc.block_shape) == 3:
        copy_to_global(desc, [head, row, 0], buffer.reshape([1, buffer.shape[0], D]))
    else:
        copy_to_global(desc, [row, head * D], buffer)


@gluon.jit
def copy_keys(
    k_desc, ends_desc, depth_desc, k_ring, ends, depths, use, i, partials, head, n, N,
    BN: gl.constexpr, D: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Fills a use of K's ring with key tile n, number i of its list; one of the `partials` first, which will be masked,
    comes with its subtree ends, and with a window its depths."""
    k_ring.acquire(use)
    full = k_ring.filled(use)
    masked = i < partials
    mbarrier.expect(full, BN * D * BYTES, pred=i >= partials)
    mbarrier.expect(full, BN * D * BYTES + BN * 4 * (1 + WINDOW), pred=masked)
    copy_rows(k_desc, full, k_ring.at(use), head, n * BN, N, D, ROWS)
    copy_to_shared(ends_desc, [0, n * BN], full, ends.index(use % k_ring.stages), masked)
    if WINDOW:
        copy_to_shared(depth_desc, [0, n * BN], full, depths.index(use % k_ring.stages), masked)


@gluon.jit
def query_item(item, SCHEDULE, n_tiles, SECTION):
    """`(query tile, query head)` of an item: SECTION heads side by side walk the tiles, the longest list first."""
    section = item // (n_tiles * SECTION)
    within = item - section * (n_tiles * SECTION)
    rank = within // SECTION
    return gl.load(SCHEDULE + 4 * rank), section * SECTION + within - rank * SECTION


@gluon.jit
def tile_list(LIST_ROWS, LIST_ITEMS, tile):
    """`(runs, last, partials, total)` of a query tile: pointers to its runs of full tiles and to the last of its
    partial tiles, their number, and the number of all its tiles.

    The tile of the diagonal, always partial, is the last of them wherever any row sees anything. Where it is not there
    (padding), the walk is that one tile, which masks every row.
    """
    row = LIST_ROWS + tile * 4
    start = gl.load(row)
    partials = gl.load(row + 3)
    last = LIST_ITEMS + gl.maximum(start + 2 * gl.load(row + 1) + partials - 1, 0)
    seen = (partials > 0) & (gl.load(last) == tile)
    total = gl.where(seen, partials + gl.load(row + 2), 1)
    return LIST_ITEMS + start, last, gl.where(seen, partials, 1), total


@gluon.jit
def next_tile(i, n, run, last, partials):
    """`(n, run)` of tile number i + 1 after number i: the partial tiles from the last to the first, then the runs.

    One walk without branches: a loop for each run would carry the copies over two loop edges.
    """
    listed = gl.load(last - gl.minimum(i + 1, partials - 1))
    inside = i + 1 > partials  # a run: number i + 1 == partials is the first tile of the first
    ended = n + 1 == gl.load(run + 1)  # the lists end with two spare numbers
    run = gl.where(inside & ended, run + 2, run)
    fresh = gl.load(run)
    after = gl.where(inside, gl.where(ended, fresh, n + 1), fresh)
    return gl.where(i + 1 < partials, listed, after), run


@gluon.jit
def depth_buffers(depth_desc, ends, WINDOW: gl.constexpr, STAGES: gl.constexpr):
    """Buffers for depths beside those of subtree ends (or beside lse), which stand there without a window."""
    buffers = ends
    if WINDOW:
        buffers = gl.allocate_shared_memory(gl.int32, [STAGES, 1, depth_desc.block_shape[1]], depth_desc.layout)
    return buffers


@gluon.jit
def tanh(x):
    """tanh by exp2: exact at both ends (exp2 gives 0 or inf), about 1e-7 absolute in between."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * LOG2E)))


@gluon.jit
def pack(x, DTYPE: gl.constexpr):
    """float32 (R, C) -> int32 (R, C / 2) of 16-bit pairs.

    What is carried over a loop edge: as 16-bit values it costs 64 byte permutes a step, as float32 it spills, and
    packed before the wait for the product that still reads the old P it makes ptxas serialise wgmma (C7513).
    """
    a, b = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    if gl.bfloat16 == DTYPE:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=False, pack=1
        )
    return pairs


@gluon.jit
def unpack(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 (R, C / 2) -> (R, C) of DTYPE in LAYOUT."""
    low = x.to(gl.int16).to(DTYPE, bitcast=True)
    high = (x >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([x.shape[0], x.shape[1] * 2]), LAYOUT)
