# mypy: ignore-errors
"""One pass over a block of logits each way: the softmax sums of its rows, and the gradient of its logits.

    logits (r, v) float32  ->  running maximum, sum of exp and (for the entropy) sum of z exp of each row
    the same logits, lse, gradients of rows and terms  ->  gradient of the logits, in the dtype of the products

What `dense.py` does in eight passes of torch; memory traffic is what the head costs beside its matrix products.
z = softcap(scale * logit) / temperature is formed on the fly. Formulas: `head.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.triton.common import tanh
from ..attention.versions import COMPILE

_COLUMNS = 2048


@triton.jit
def _sums_kernel(
    Z,
    TOP,
    TOTAL,
    WEIGHTED,
    columns,
    scale,
    softcap,
    inverse,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; updates the running numbers of the blocks before."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(TOP + row)
    total = tl.load(TOTAL + row)
    weighted = tl.load(WEIGHTED + row)
    for start in tl.range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(Z + row * columns + column, mask=inside, other=0.0) * scale
        if CAP:
            z = softcap * tanh(z / softcap)
        z *= inverse
        higher = tl.maximum(top, tl.max(tl.where(inside, z, float("-inf"))))
        shrink = tl.exp(top - higher)
        e = tl.where(inside, tl.exp(z - higher), 0.0)
        total = total * shrink + tl.sum(e)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(e * z)
        top = higher
    tl.store(TOP + row, top)
    tl.store(TOTAL + row, total)
    tl.store(WEIGHTED + row, weighted)


@triton.jit(do_not_specialize=["first"])
def _gradient_kernel(
    Z, OUT, LSE, G_LSE, ENTROPY_OF, G_ENTROPY, CU, TARGET, G, columns, first, scale, softcap, inverse,
    CAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns. The terms of a row are those from CU[row] to CU[row + 1]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(Z + row * columns + column, mask=inside, other=0.0) * scale
    slope = scale * inverse
    if CAP:
        t = tanh(z / softcap)
        z = softcap * t
        factor = slope * (1 - t * t)
    else:
        factor = tl.zeros([BLOCK], tl.float32) + slope
    z *= inverse
    lse = tl.load(LSE + row)
    weight = tl.load(G_LSE + row)
    p = tl.exp(z - lse)
    if ENTROPY:
        p *= weight - tl.load(G_ENTROPY + row) * (z - lse + tl.load(ENTROPY_OF + row))
    else:
        p *= weight
    for m in tl.range(tl.load(CU + row), tl.load(CU + row + 1)):
        p += tl.where(column + first == tl.load(TARGET + m), tl.load(G + m), 0.0)
    tl.store(OUT + row * columns + column, (p * factor).to(OUT.dtype.element_ty), mask=inside)


def add_sums(
    logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor, scale: float, softcap: float, temperature: float,
    entropy: bool,
) -> None:  # fmt: skip
    """Brings (r,) `top`, `total` and (if `entropy`) `weighted` of a softmax up to date with one more block of logits.

    Args:
        logits: (r, v) float32, contiguous, before scale and the rest. softcap: 0 = none.
    """
    rows, columns = logits.shape
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        _sums_kernel[(rows,)](
            logits, top, total, weighted, columns, scale, softcap or 1.0, 1.0 / temperature, CAP=softcap > 0,
            ENTROPY=entropy, BLOCK=_COLUMNS, num_warps=8, **COMPILE)  # fmt: skip


def logit_gradient(
    logits: Tensor, dtype: torch.dtype, lse: Tensor, g_lse: Tensor, entropy: Tensor | None, g_entropy: Tensor | None,
    cu: Tensor, target: Tensor, g: Tensor, first: int, scale: float, softcap: float, temperature: float,
) -> Tensor:  # fmt: skip
    """(r, v) gradient of a block of logits in `dtype`, rounded once.

    Args:
        logits: (r, v) float32, contiguous; column 0 is token `first`.
        lse, g_lse: (r,) float32; entropy, g_entropy: the same or None.
        cu: (r + 1,) int64 bounds of the terms of each row in target (M,) int64 and g (M,) float32.
    """
    rows, columns = logits.shape
    out = torch.empty((rows, columns), dtype=dtype, device=logits.device)
    wanted = entropy is not None and g_entropy is not None
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        _gradient_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
            logits, out, lse, g_lse, entropy if wanted else lse, g_entropy if wanted else lse, cu, target, g, columns,
            first, scale, softcap or 1.0, 1.0 / temperature, CAP=softcap > 0, ENTROPY=wanted, BLOCK=_COLUMNS,
            num_warps=8, **COMPILE)  # fmt: skip
    return out
