"""What the files of the LM head share: the rows and terms of a call, products and sums of a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HeadTerms", "accumulator", "add", "product"]


@dataclass(frozen=True)
class HeadTerms:
    """Rows and terms of one tree and what is asked for; tensors on the device of the hidden states."""

    row_position: Tensor  # (R,)
    term_row: Tensor  # (M,)
    term_target: Tensor  # (M,)
    sampling_mask: Tensor  # (T,)
    sampling_mask_counts: Tensor  # (R,)
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    full: bool = False

    def shaped(self, logits: Tensor) -> Tensor:
        """z of raw logits, in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits

    def unshaped(self, dz: Tensor, z: Tensor) -> Tensor:
        """The gradient of the raw logits from that of z, in place. tanh' = 1 - tanh^2."""
        if self.softcap:
            dz.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        factor = self.scale / self.temperature
        return dz if factor == 1.0 else dz.mul_(factor)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in the accumulator's dtype, not rounded to the inputs' first."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """out[index] += values along the first axis, in place, in the same order at every run.

    CUDA's `index_add_` adds with atomics in any order; its accumulating `index_put_` sorts first. On the CPU it is the
    other way round: `index_add_` is one loop.
    """
    if out.is_cuda:
        return out.index_put_((index,), values.to(out.dtype), accumulate=True)
    return out.index_add_(0, index, values.to(out.dtype))
