# mypy: ignore-errors
"""The Triton kernel of the kept-set table: every cell is written once, ids and padding in the same pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 128  # columns a program writes at a time


@triton.jit(do_not_specialize=["width"])
def _fill_kernel(IDS, STARTS, COUNTS, TABLE, width, COLUMNS: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(STARTS + row)
    count = tl.load(COUNTS + row).to(tl.int32)
    for first in tl.range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        ids = tl.load(IDS + start + column, mask=column < count, other=-1)
        tl.store(TABLE + row * width + column, ids.to(TABLE.dtype.element_ty), mask=column < width)


def fill_table(ids: Tensor, counts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(R, width) from checked (T,) ids and (R,) counts."""
    rows = counts.shape[0]
    table = torch.empty((rows, width), dtype=dtype, device=ids.device)
    if rows and width:
        starts = counts.cumsum(0, dtype=torch.int64) - counts
        with torch.cuda.device(ids.device if ids.is_cuda else -1):
            _fill_kernel[(rows,)](
                ids.contiguous(), starts, counts.contiguous(), table, width, COLUMNS=_COLUMNS, enable_fp_fusion=True
            )
    return table
