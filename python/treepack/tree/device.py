"""The way of a tree's buffer to a device. torch is loaded by the first function that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import ALIGN
from .._optional import require

__all__ = ["copied", "load_torch", "spread", "to_stay", "torch_dtype"]


def load_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        require("torch", "a tree on a device, or with torch values,", "torch")
        raise
    return torch


def to_stay() -> AbstractContextManager[Any]:
    """A block that makes tensors which outlive the call. What is made or viewed under `torch.inference_mode()`, where
    log-probs of an old policy or a reference are taken, could not be trained on afterwards."""
    torch = load_torch()
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else nullcontext()


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    torch = load_torch()
    found = getattr(torch, "bool" if dtype == np.bool_ else dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"a column has dtype {dtype}, which torch does not have; convert it before packing")
    return found


def copied(parts: Sequence[npt.NDArray[np.uint8]], device: Any, pin_memory: bool, non_blocking: bool) -> Any:
    """The parts end to end in one tensor on a device, each from a multiple of `ALIGN` bytes: one copy to the device."""
    torch = load_torch()
    with to_stay():
        staged = torch.empty(
            sum(len(part) + -len(part) % ALIGN for part in parts), dtype=torch.uint8, pin_memory=pin_memory
        )
    target, at = staged.numpy(), 0
    for part in parts:
        stop = at + len(part)
        target[at:stop] = part
        at = stop + -stop % ALIGN
        target[stop:at] = 0
    with to_stay():
        return staged.to(device, non_blocking=non_blocking)


def spread(part: Any, at: npt.NDArray[Any], length: int, fill: float) -> Any:
    """(length, ...): the rows of `part` at the places `at`, and `fill` elsewhere. Differentiable for torch."""
    shape = (length, *part.shape[1:])
    if isinstance(part, np.ndarray):
        out = np.full(shape, fill, part.dtype)
        out[at] = part
        return out
    torch = load_torch()
    return part.new_full(shape, fill).index_copy(0, torch.as_tensor(at, device=part.device).long(), part)
