# mypy: ignore-errors
"""Which kernels of Triton run a call: by device, dtype, head size and options (docs/kernel.md, "Two sets of kernels").

The operator looks at strides when it runs; nothing else is looked at, and nothing falls back in silence.
"""

from __future__ import annotations

import functools
import warnings

import torch
import triton
from torch import Tensor

from . import versions
from .triton import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)  # compute capability: bfloat16 products, asynchronous copies
# Portable; Hopper's where they read the layouts; Hopper's or an error; portable with one form of dK/dV or the other.
PLAIN, AUTO, GLUON, LOOPED, SPLIT = 0, 1, 2, 3, 4
GLUON_SIZES = (64, 80, 96, 128, 192, 256)
GLUON_SCALE = 1e-20  # their mask is -inf before the scale: with one that rounds to 0 it would be NaN
# What the Hopper kernels have and what ran on a Hopper GPU are two things: "triton" takes the second alone, "gluon" the
# first. A form moves over when tests/gpu has passed with it there (docs/kernel.md, "Two sets of kernels").
PROVEN_SIZES = ((64, 64), (128, 128), (256, 256))
PROVEN_OPTIONS = ("window", "softcap")
INTERPRETED = launch.interpreted()


def check(impl: str, q: Tensor, v: Tensor) -> None:
    """Raises where no kernel of Triton takes q and v: TypeError a dtype, ValueError a head size, RuntimeError a
    device."""
    if q.dtype not in DTYPES:
        raise TypeError(
            f'impl="{impl}" takes bfloat16, float16 and float32, not {q.dtype}; impl="reference" takes any float dtype'
        )
    for size, of in ((q.shape[-1], "q and k"), (v.shape[-1], "v")):
        if size % 8 or not 8 <= size <= 256:
            raise ValueError(
                f'impl="{impl}" takes head sizes that are multiples of 8, from 8 to 256, not {size} ({of}); '
                'impl="reference" takes any'
            )
    if INTERPRETED:
        return
    if not q.is_cuda:
        raise RuntimeError(f'impl="{impl}" needs a GPU, q is on {q.device}; impl="reference" runs anywhere')
    if torch.version.hip is None and (found := capability(q.device.index)) < OLDEST:
        raise RuntimeError(
            f'impl="{impl}" needs a GPU of compute capability 8.0 or newer (A100, L4, H100, B200, RTX 30 and later), '
            f'{q.device} has {found[0]}.{found[1]}; impl="reference" runs anywhere'
        )


def choose(impl: str, q: Tensor, v: Tensor, window: int, softcap: float, scale: float) -> int:
    """Which set of kernels runs: one of the numbers above."""
    if impl == "triton_plain":
        return PLAIN
    objection = gluon_objection(q, v, window, softcap, scale)
    if objection is not None:
        if impl == "gluon":
            raise ValueError(f'impl="gluon" cannot run this: {objection}; impl="triton" takes it')
        return PLAIN
    if impl != "gluon" and not proven((q.shape[-1], v.shape[-1]), window > 0, softcap > 0):
        return PLAIN
    untested = version_objection()
    if untested is None:
        return GLUON if impl == "gluon" else AUTO
    if impl == "gluon":
        raise RuntimeError(f'impl="gluon" cannot run here: {untested}; impl="triton" runs the portable kernels')
    _say_once(untested)
    return PLAIN


def gluon_objection(q: Tensor, v: Tensor, window: int, softcap: float, scale: float) -> str | None:
    """Why the Hopper kernels do not cover this call, or None; layouts are looked at when it runs."""
    if not on_hopper(q):
        return f"they need a GPU of compute capability 9.0 (H100, H200), q is on {q.device}"
    if INTERPRETED:
        return "they do not run in Triton's interpreter (TRITON_INTERPRET)"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"they take bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] not in GLUON_SIZES:
        return f"they take head sizes {', '.join(map(str, GLUON_SIZES))}, not {q.shape[-1]}"
    if v.shape[-1] not in GLUON_SIZES or v.shape[-1] > q.shape[-1]:
        return (
            f"they take v of the head size of q and k or a smaller one of {', '.join(map(str, GLUON_SIZES))}, not "
            f"{q.shape[-1]} for q and k and {v.shape[-1]} for v"
        )
    if softcap:  # the mask meets the cap then, in place of the scale
        return None if softcap >= GLUON_SCALE else f"they take a softcap of at least {GLUON_SCALE}, not {softcap}"
    return None if scale >= GLUON_SCALE else f"they take a scale of at least {GLUON_SCALE}, not {scale}"


def proven(sizes: tuple[int, int], window: bool, softcap: bool) -> bool:
    """Whether the Hopper kernels of this form passed tests/gpu on a Hopper GPU."""
    options = {"window": window, "softcap": softcap}
    return sizes in PROVEN_SIZES and all(name in PROVEN_OPTIONS for name, there in options.items() if there)


def on_hopper(x: Tensor) -> bool:
    """Whether x lies on a GPU that the Hopper kernels are made for (AMD's MI200 has the same number)."""
    return x.is_cuda and torch.version.hip is None and capability(x.device.index) == (9, 0)


@torch.compiler.assume_constant_result
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(index)


@torch.compiler.assume_constant_result
def version_objection() -> str | None:
    """Why the Hopper kernels do not run with the Triton that is here, or None."""
    return versions.objection(triton.__version__)


@torch.compiler.assume_constant_result
def _say_once(untested: str) -> bool:
    _say(untested)
    return True  # a compiler wants a constant


@functools.cache
def _say(untested: str) -> None:
    warnings.warn(f"{untested}. Until then the portable kernels run, which are slower.", RuntimeWarning, stacklevel=2)
