# mypy: ignore-errors
"""dK and dV of the key tiles that the Hopper dK/dV splits: the parts of the query heads of a group, added in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["N", "H", "BLOCKS"],
    do_not_specialize_on_alignment=["DK_PARTS", "DV_PARTS", "DK", "DV", "SCHEDULE", "ITEMS"],
)
def sum_kernel(
    DK_PARTS, DV_PARTS, DK, DV, SCHEDULE, ITEMS, N, H, BLOCKS,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows of one split tile and one K/V head, of the BLOCKS that a tile has; tiles from the number of
    split ones on (`tiles.backward_items`) do nothing."""
    slot = tl.program_id(0) // BLOCKS
    if slot < tl.load(ITEMS):
        block = tl.program_id(0) - slot * BLOCKS
        hk = block // (128 // ROWS)
        rows = (block - hk * (128 // ROWS)) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, D)[None, :]
        parts = (slot * H + hk * G).to(tl.int64) * (128 * D) + rows[:, None] * D + columns
        dk = tl.load(DK_PARTS + parts)
        dv = tl.load(DV_PARTS + parts)
        for g in tl.static_range(1, G):
            dk += tl.load(DK_PARTS + parts + g * (128 * D))
            dv += tl.load(DV_PARTS + parts + g * (128 * D))
        n = tl.load(SCHEDULE + 4 * slot + 1) * 128 + rows
        target = (n[:, None].to(tl.int64) * (H // G) + hk) * D + columns
        inside = n[:, None] < N
        tl.store(DK + target, dk.to(DK.dtype.element_ty), mask=inside)
        tl.store(DV + target, dv.to(DV.dtype.element_ty), mask=inside)
