# mypy: ignore-errors
"""Tile sizes of the Hopper kernels, and what each is compiled from: for the launches and the offline check."""

from __future__ import annotations

import functools
import itertools

from triton.experimental.gluon import language as gl

from ..versions import COMPILE
from .dkv import dkv_kernel
from .dq import dq_kernel
from .forward import forward_kernel

# 168 registers a thread at the start; the warp groups then trade: 3 x 168 = 2 x 232 + 40 = 2 x 240 + 24.
OPTIONS = {"num_warps": 4, "maxnreg": 168, **COMPILE}
KEYS = 128  # key rows of a tile: forward, dQ
STAGES = 2
QUERIES = 64  # query rows of a tile: dK/dV
QUERY_STAGES = 3
SUM_ROWS = 16  # key rows of a program that adds parts of dK and dV
VECTOR = gl.NVMMASharedLayout(0, 32, 2)  # int32 or float32 rows of one tile


@functools.cache
def matrix(size: int, dtype) -> gl.NVMMASharedLayout:
    """Layout in shared memory of rows of a head, read by wgmma as it lies; `dtype` of torch, or "bf16", "fp16"."""
    half = gl.float16 if str(dtype) in ("fp16", "torch.float16") else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([64, size], half)


def variants(kernels, sizes, dtypes):
    """Every form of every kernel with tensors read as (N, H D), and the first form with (H N, D), in bfloat16; the
    first form in float16, which differs by one conversion."""
    forms = {"forward": ("plain", "sinks", "rows"), "dkv": ("plain", "rows"), "dq": ("plain", "dlse", "rows")}
    for name, size, dtype in itertools.product(kernels, sizes, dtypes):
        for variant in forms[name] if dtype == "bf16" else forms[name][:1]:
            yield name, size, dtype, variant


def describe(name: str, size: int, dtype: str, variant: str):
    """(kernel, constants, descriptors {argument: (dtype or None, block, layout)}) of one variant."""
    lay = matrix(size, dtype)
    half, keys = (None, (64, size), lay), (None, (KEYS, size), lay)
    rows = variant == "rows"
    constants = {"D": size, "BN": KEYS, "STAGES": STAGES, "Q_ROWS": rows, "K_ROWS": rows, "V_ROWS": rows}
    if name == "forward":
        constants["HAS_SINKS"] = variant == "sinks"
        descriptors = {
            "q_desc": half, "k_desc": keys, "v_desc": keys, "out_desc": half, "ends_desc": ("i32", (1, KEYS), VECTOR)
        }  # fmt: skip
        return forward_kernel, constants, descriptors
    constants["DO_ROWS"] = rows
    if name == "dq":
        constants["HAS_DLSE"] = variant == "dlse"
        descriptors = {
            "q_desc": half, "k_desc": keys, "v_desc": keys, "dout_desc": half, "out_desc": half, "dq_desc": half,
            "ends_desc": ("i32", (1, KEYS), VECTOR),
        }  # fmt: skip
        return dq_kernel, constants, descriptors
    constants |= {"BM": QUERIES, "STAGES": QUERY_STAGES}
    queries, row = (None, (QUERIES, size), lay), ("fp32", (1, QUERIES), VECTOR)
    descriptors = {
        "q_desc": queries, "k_desc": half, "v_desc": half, "dout_desc": queries, "lse_desc": row, "delta_desc": row,
        "dk_desc": half, "dv_desc": half,
    }  # fmt: skip
    return dkv_kernel, constants, descriptors
