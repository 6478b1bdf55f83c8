"""When a kernel counts as right: both rules of docs/kernel.md, against the reference in float64.

    largest error <= 2 x that of eager attention in the same dtype (gradients 3 x)              FlashAttention's rule
    mean error    <= 1.1 x that of eager attention in the same dtype                            FlexAttention's rule

Both rules get a floor at float32 rounding, for cases where eager happens to be exact, and room for few values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FORWARD = ("out", "lse")


def complaints(labels: tuple[str, ...], ours: list[Tensor], want: list[Tensor], eager: list[Tensor]) -> list[str]:
    """What is wrong, one text for each broken rule; waits for the device once.

    Args:
        labels: "out", "lse" or the name of a gradient.
        ours, want, eager: a tensor for each label: of the kernel, of the reference in float64, and of eager attention
            in the kernel's dtype; outputs and gradients with heads and head size, or (H, N), or (H,).
    """
    dtype = eager[0].dtype
    triples = zip(labels, ours, want, eager, strict=False)
    figures = [_figures(label, a, b, c, dtype) for label, a, b, c in triples]
    found = []
    for label, row in zip(labels, torch.stack(figures).tolist(), strict=False):
        finite, largest, most, mean, most_mean = row
        if not finite:
            found.append(f"{label}: not finite")
        if not largest <= most:
            found.append(f"{label}: largest error {largest:.3e} > {most:.3e}")
        if not mean <= most_mean:
            found.append(f"{label}: mean error {mean:.3e} > {most_mean:.3e}")
    return found


def _figures(label: str, ours: Tensor, want: Tensor, eager: Tensor, dtype: torch.dtype) -> Tensor:
    """(5,) float64: finite, largest error, allowed, mean error, allowed."""
    error, eager_error = (ours.double() - want).abs(), (eager.double() - want).abs()
    largest = want.abs().max()
    room = _room(want)
    floor = (3e-5 if dtype == torch.float32 else 3e-6) * largest.clamp(min=1.0)
    # One unit in the last place of the largest value, where there are too few values to compare two noises.
    floor = floor + min(room, 1.0) * torch.finfo(dtype).eps * largest
    factor = 2.0 if label in FORWARD else 3.0
    return torch.stack(
        [
            ours.isfinite().all().double(),
            error.max(),
            (factor + room) * eager_error.max() + floor,
            error.mean(),
            (1.1 + room) * eager_error.mean() + floor / 3,
        ]
    )


def _room(want: Tensor) -> float:
    """What few values add to the factors of both rules. Both errors are rounding noise; over many values they compare
    well, over few by chance, good to about 1 / sqrt(n). The values of one row of one head go up and down together (one
    wrong delta moves them all), so rows are counted."""
    rows = want.numel() // want.shape[-1] if want.dim() >= 3 else want.numel()
    return 4.0 / math.sqrt(max(rows, 1))
