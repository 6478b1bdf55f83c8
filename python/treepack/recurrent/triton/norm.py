# mypy: ignore-errors
"""Rows divided by their lengths, and the gradient. flash-linear-attention's own compiles and measures 25 forms anew for
every 65,536 rows more, so that each new size of a tree would wait for seconds; this one is compiled once.

    y = x r,  r = 1 / sqrt(sum of x^2 + eps)        dx = r (dy - y sum of dy y)
"""

import torch
import triton
import triton.language as tl

from .launch import COMPILE

EPS = 1e-6  # of the models with such layers, and of flash-linear-attention
ROWS = 8


@triton.jit(do_not_specialize=["rows"])
def norm_forward(X, Y, R, rows, eps, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    at = row[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(x * x, 1) + eps)
    tl.store(Y + at, (x * r[:, None]).to(Y.dtype.element_ty), mask=mask)
    tl.store(R + row, r, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(Y, R, DY, DX, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    at = row[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    y = tl.load(Y + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(R + row, mask=row < rows, other=0.0)
    dx = (dy - y * tl.sum(dy * y, 1)[:, None]) * r[:, None]
    tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)


def _shape(x):
    """Programs, rows and constants of a launch."""
    size = x.shape[-1]
    rows = x.numel() // size
    constants = {"D": size, "BD": triton.next_power_of_2(size), "BR": ROWS, "num_warps": 4}
    return (triton.cdiv(rows, ROWS),), rows, constants


def l2norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x with every row of its last axis divided by its length, 1 / length (...) float32); x contiguous."""
    y, r = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    grid, rows, constants = _shape(x)
    norm_forward[grid](x, y, r, rows, EPS, **constants, **COMPILE)
    return y, r


def l2norm_gradient(y: torch.Tensor, r: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of x, in y's dtype, from what `l2norm` returned and the gradient of y; all contiguous."""
    dx = torch.empty_like(y)
    grid, rows, constants = _shape(y)
    norm_backward[grid](y, r, dy, dx, rows, **constants, **COMPILE)
    return dx
