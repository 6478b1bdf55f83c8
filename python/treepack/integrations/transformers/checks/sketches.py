"""What each module of a model took and gave in one run of a row, small enough to keep for all modules.

Of every tensor with a value for each token, a sketch of 16 numbers for each token: its values with random signs, added
up in 16 groups (Charikar, Chen, Farach-Colton 2002). The distance of two sketches is that of the tensors within about a
third. 4 KiB for a tensor, whatever its width, where the tensors of a large model would take gigabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Key", "Recorder", "Run"]

GROUPS = 16


class Key(NamedTuple):
    """Which tensor of which call."""

    path: str
    call: int  # a module may run several times
    side: str  # "in" or "out"
    number: int


class Run(NamedTuple):
    keys: list[Key]
    """In the order in which modules were done: parts before the whole."""
    sketches: Tensor
    """(keys, tokens, GROUPS) float32, on the host"""
    autocast: bool
    """Whether any module ran under autocast."""


class Recorder:
    """Runs something, and records the modules of a model meanwhile."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._signs: dict[tuple[int, torch.device], Tensor] = {}
        # What one module gives is what others take: by tensor, its version and its sketch.
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def record(self, tokens: int, run: Callable[[], object]) -> Run:
        """Hooks are there while `run` runs, and see this thread alone."""
        found: list[tuple[Key, Tensor]] = []
        calls: dict[str, int] = {}
        owner, autocast = threading.get_ident(), []

        def hook(path: str) -> Callable[..., None]:
            def seen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                if threading.get_ident() != owner:
                    return
                call = calls[path] = calls.get(path, -1) + 1
                for side, values in (("in", (args, kwargs)), ("out", output)):
                    for number, x in enumerate(_tensors(values)):
                        if (sketch := self._sketch(x, tokens, side)) is not None:
                            autocast.append(torch.is_autocast_enabled(x.device.type))
                            found.append((Key(path, call, side, number), sketch))

            return seen

        handles = [module.register_forward_hook(hook(path), with_kwargs=True) for path, module in self._modules.items()]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            return Run([], torch.empty(0, tokens, GROUPS), False)
        device = found[-1][1].device
        sketches = torch.stack([sketch.to(device) for _, sketch in found])
        return Run([key for key, _ in found], sketches.cpu(), any(autocast))

    def _sketch(self, x: Tensor, tokens: int, side: str) -> Tensor | None:
        """(tokens, GROUPS), or None for a tensor without a value for each token. Integers count as inputs alone: of
        what a module gives they are choices (experts), which rounding may change."""
        version = None if x.is_inference() else x._version
        made = self._made.get(x)  # type: ignore[no-untyped-call]
        if made is not None and made[0] == version is not None:
            kept: Tensor = made[1]
            return kept
        rows = _by_token(x, tokens)
        if rows is None or not (rows.is_floating_point() or side == "in"):
            return None
        sketch = self._project(rows.detach().float())
        self._made[x] = version, sketch
        return sketch

    def _project(self, rows: Tensor) -> Tensor:
        rows = rows * self._signs_of(rows.shape[1], rows.device)
        if extra := -rows.shape[1] % GROUPS:
            rows = nn.functional.pad(rows, (0, extra))
        return rows.view(len(rows), GROUPS, -1).sum(-1)

    def _signs_of(self, width: int, device: torch.device) -> Tensor:
        if (width, device) not in self._signs:
            generator = torch.Generator().manual_seed(width)
            signs = torch.randint(0, 2, (width,), generator=generator) * 2 - 1
            self._signs[width, device] = signs.to(device, torch.float32)
        return self._signs[width, device]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and outputs of transformers (which are dicts)."""
    if isinstance(value, Tensor):
        yield value.full_tensor() if hasattr(value, "full_tensor") else value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        parts: Iterable[Any] = value
        for part in parts:
            yield from _tensors(part)


def _by_token(x: Tensor, tokens: int) -> Tensor | None:
    """(tokens, width) of a tensor (1, tokens, ...), (1, heads, tokens, head size) or (tokens, width); else None."""
    x = torch.view_as_real(x) if x.is_complex() else x  # rotary embeddings, in some models
    if x.dim() < 2 or x.is_meta or x.numel() == 0 or x.dtype == torch.bool:
        return None
    if x.shape[0] == 1 and x.shape[1] == tokens:
        return x.reshape(tokens, -1)
    if x.dim() == 4 and x.shape[0] == 1 and x.shape[2] == tokens != x.shape[3]:
        return x[0].transpose(0, 1).reshape(tokens, -1)
    return x.reshape(tokens, -1) if x.shape[0] == tokens else None
