"""Which implementation runs: by `impl` or, unset, by the device alone, and what it needs."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .._optional import require

IMPLEMENTATIONS = ("triton", "levels", "reference")
OLDEST_ON_HOPPER = (3, 7, 1)  # of Triton: before, the backward pass of a gated scan is wrong there

Function = TypeVar("Function", bound=Any)


def eager(function: Function) -> Function:
    """A function that `torch.compile` calls as it is: the graph breaks there, as at flash-linear-attention's own."""
    disable: Any = torch.compiler.disable
    return cast("Function", disable(function))


def scan(impl: str | None, q: Tensor, *others: Tensor) -> ModuleType:
    """The module that has the scans: `chunked`, `levels` or `reference`.

    Raises:
        ValueError: an unknown `impl`, or a tensor on a device that it does not run on.
        MissingPackage: flash-linear-attention is not installed.
        RuntimeError: a Triton whose gradients are wrong on this device.
    """
    chosen = _chosen(impl, q, IMPLEMENTATIONS)
    if chosen == "reference":
        from . import reference

        return reference
    require("fla", f'a scan with impl="{chosen}"', "recurrent")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others)):
        _check_triton(q.device.index)
    from . import chunked, levels

    if chosen == "triton":
        why = chunked.reason()
        if why is None:
            return chunked
        if impl == "triton":
            raise RuntimeError(f'impl="triton" cannot run: {why}; impl="levels" runs with any, slower')
        _warn(why)
    return levels


def convolution(impl: str | None, x: Tensor) -> ModuleType:
    """The module that has the convolution: `conv` or `reference`."""
    if _chosen(impl, x, ("triton", "reference")) == "reference":
        from . import reference

        return reference
    try:
        from . import conv
    except Exception as error:  # whatever a broken installation raises
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(
            f'impl="triton" needs the package triton, 3.6 or newer, and it cannot be imported here '
            f'({type(error).__name__}: {error}); impl="reference" needs torch alone'
        ) from error
    return conv


def _chosen(impl: str | None, x: Tensor, known: tuple[str, ...]) -> str:
    chosen = impl or ("triton" if x.is_cuda else "reference")
    if chosen not in known:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(known)}")
    if chosen != "reference" and not x.is_cuda:
        raise ValueError(
            f'impl="{chosen}" runs on CUDA, and the tensors are on {x.device}; impl="reference" runs there'
        )
    if chosen != "reference" and x.dtype == torch.float64:
        raise TypeError(f'impl="{chosen}" takes bfloat16, float16 and float32, not float64; impl="reference" does')
    return chosen


@cache
def _check_triton(device: int | None) -> None:
    version = import_module("triton").__version__
    installed = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])
    if torch.cuda.get_device_capability(device)[0] == 9 and (3, 4) <= installed < OLDEST_ON_HOPPER:
        raise RuntimeError(
            f"Triton {version} computes wrong gradients of gated scans on Hopper GPUs "
            f"(github.com/fla-org/flash-linear-attention/issues/640): install triton>=3.7.1, which torch 2.12 brings"
        )


@cache
def _warn(why: str) -> None:
    warnings.warn(f'recurrent layers run level by level, which is slower (impl="levels"): {why}', stacklevel=4)
