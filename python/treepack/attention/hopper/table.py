# mypy: ignore-errors
"""Tile sizes of the Hopper kernels, and what each is compiled from: for the launches and the offline check."""

from __future__ import annotations

import functools
import itertools

import triton
from triton.experimental.gluon import language as gl

from ..versions import COMPILE
from .dkv import dkv_kernel
from .dkv_wide import wide_dkv_kernel
from .dq import dq_kernel
from .forward import forward_kernel

# 168 registers a thread at the start; the warp groups then trade: 3 x 168 = 2 x 232 + 40 = 2 x 240 + 24.
OPTIONS = {"num_warps": 4, "maxnreg": 168, **COMPILE}
KEYS = 128  # key rows of a tile: forward, dQ
FEWER_KEYS = 64  # ... where 128 would not fit
WIDE = 128  # larger heads: 64 key rows, one dK/dV accumulator a consumer
STAGES = 2
QUERIES = 64  # query rows of a tile: dK/dV
QUERY_STAGES = 3
WIDE_STAGES = 2  # of Q and dO: dK/dV of wide heads
SUM_ROWS = 16  # key rows of a program that adds parts of dK and dV
VECTOR = gl.NVMMASharedLayout(0, 32, 2)  # int32 or float32 rows of one tile


def forward_keys(size: int) -> int:
    """Key rows of a tile of the forward kernel."""
    return FEWER_KEYS if size > WIDE else KEYS


def dq_keys(size: int, options: bool) -> int:
    """Key rows of a tile of dQ: with a window or a cap (`options`) 128 would spill at D = 128 (256 and 456 bytes)."""
    return FEWER_KEYS if size > WIDE or (size > 64 and options) else KEYS


def query_stages(size: int) -> int:
    """Buffers of Q and dO of dK/dV."""
    return WIDE_STAGES if size > WIDE else QUERY_STAGES


@functools.cache
def matrix(size: int, dtype, axes: int = 2) -> gl.NVMMASharedLayout:
    """Layout in shared memory of rows of a head, read by wgmma as it lies; `dtype` of torch, or "bf16", "fp16"."""
    half = gl.float16 if str(dtype) in ("fp16", "torch.float16") else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1] * (axes - 2) + [64, size], half)


def by_heads(size: int, v_size: int) -> bool:
    """Whether q and k of one size and v of another are read and written by heads, (H, N, size), and not as one matrix:
    where a tile is wider than a head, its other columns would be those of the next one."""
    return v_size != size or width(size) != size


def width(size: int) -> int:
    """Columns of a tile."""
    return triton.next_power_of_2(size)


def variants(kernels, sizes, dtypes):
    """Every form of every kernel with tensors read as (N, H D), and the first form with (H N, D), in bfloat16; the
    first form in float16, which differs by one conversion. window: with sinks, as in gpt-oss; options: all of them.
    `sizes`: of q and k, and of v."""
    every = ("rows", "window", "options")
    forms = {"forward": ("plain", "sinks", *every), "dkv": ("plain", *every), "dq": ("plain", "dlse", *every)}
    for name, pair, dtype in itertools.product(kernels, sizes, dtypes):
        for variant in forms[name] if dtype == "bf16" else forms[name][:1]:
            if variant != "rows" or not by_heads(*pair):
                yield name, pair, dtype, variant


def describe(name: str, pair: tuple[int, int], dtype: str, variant: str):
    """(kernel, constants, descriptors {argument: (dtype or None, block, layout)}) of one variant."""
    size, v_size = map(width, pair)
    rows, window, softcap = variant == "rows", variant in ("window", "options"), variant == "options"
    block = {"forward": forward_keys(size), "dq": dq_keys(size, window or softcap), "dkv": QUERIES}[name]

    def tile(rows: int, columns: int):
        axes = 3 if by_heads(*pair) else 2
        return None, (*[1] * (axes - 2), rows, columns), matrix(columns, dtype, axes)

    half, v_half = tile(64, size), tile(64, v_size)
    keys, values = tile(block, size), tile(block, v_size)
    depths = {"depth_desc": ("i32", (1, block), VECTOR)} if window else {}
    options = {"WINDOW": window, "SOFTCAP": softcap}
    dkv = {"BM": QUERIES, "STAGES": query_stages(size)}
    constants = {
        "D": size,
        "DV": v_size,
        **(dkv if name == "dkv" else {"BN": block, "STAGES": STAGES}),
        "Q_ROWS": rows,
        "K_ROWS": rows,
        "V_ROWS": rows,
    }
    if name == "forward":
        constants |= {"HAS_SINKS": variant == "sinks" or window, **options}
        descriptors = {
            "q_desc": half, "k_desc": keys, "v_desc": values, "out_desc": v_half,
            "ends_desc": ("i32", (1, block), VECTOR),
        }  # fmt: skip
        return forward_kernel, constants, descriptors | depths
    constants["DO_ROWS"] = rows
    if name == "dq":
        constants |= {"HAS_DLSE": variant == "dlse" or softcap, **options}
        descriptors = {
            "q_desc": half, "k_desc": keys, "v_desc": values, "dout_desc": v_half, "out_desc": v_half, "dq_desc": half,
            "ends_desc": ("i32", (1, block), VECTOR),
        }  # fmt: skip
        return dq_kernel, constants, descriptors | depths
    constants |= options
    row = ("fp32", (1, QUERIES), VECTOR)
    descriptors = {
        "q_desc": tile(QUERIES, size), "k_desc": half, "v_desc": v_half, "dout_desc": tile(QUERIES, v_size),
        "lse_desc": row, "delta_desc": row, "dk_desc": half, "dv_desc": v_half,
    }  # fmt: skip
    return wide_dkv_kernel if size > WIDE else dkv_kernel, constants, descriptors | depths
