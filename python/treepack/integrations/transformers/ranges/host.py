"""What a range that waits keeps for its backward pass (with gradient checkpointing the inputs of the layers), in pinned
host memory until that pass asks for it.

    saved in the forward pass     copied to the host on a stream of its own, beside the next layer
    asked for, last one first     copied back; the one saved before it follows at once, beside the layer that runs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Host"]

#: Smaller tensors stay: what they take is little, and each copy is a call.
_LEAST_BYTES = 1 << 20


class Host:
    """The host memory of the ranges of one pass."""

    def __init__(self, device: torch.device, parameters: Iterable[Tensor]):
        """`parameters`: of the model, whose memory is not given back by a copy."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        whole = (x for x in parameters if not hasattr(x, "to_local"))
        self._kept = {x.untyped_storage().data_ptr() for x in whole}

    @contextmanager
    def keeps(self) -> Iterator[None]:
        """A forward pass whose saved tensors lie on the host."""
        saved: list[_Saved] = []

        def pack(x: Tensor) -> Any:
            if not self._moves(x):
                return x
            saved.append(_Saved(x, self._stream, saved[-1] if saved else None))
            return saved[-1]

        with saved_tensors_hooks(pack, _unpack):
            yield

    def _moves(self, x: Tensor) -> bool:
        return (
            type(x) is Tensor  # neither parameters nor what is spread over ranks
            and x.numel() * x.element_size() >= _LEAST_BYTES
            and x.is_contiguous()
            and x.untyped_storage().data_ptr() not in self._kept
        )


def _unpack(x: Any) -> Tensor:
    found: Tensor = x.fetch() if isinstance(x, _Saved) else x
    return found


class _Saved:
    """A tensor on the host, and the one that was saved before it."""

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, before: _Saved | None):
        self._device, self._stream, self._before = x.device, stream, before
        self._back: tuple[Tensor, Any] | None = None
        self._fetched = False
        if stream is None:
            self._host = x.detach().clone()
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x.detach(), non_blocking=True)
        x.record_stream(stream)  # its memory is not used anew before the copy is done

    def fetch(self) -> Tensor:
        """It on its device; the one before it is on its way when this returns."""
        self._fetched = True
        if self._stream is None:
            return self._host
        self._start()
        (found, ready), self._back = self._back, None  # type: ignore[misc]
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        found.record_stream(current)
        if self._before is not None and not self._before._fetched:
            self._before._start()
        self._before = None
        return found

    def _start(self) -> None:
        if self._back is None:
            assert self._stream is not None
            with torch.cuda.stream(self._stream):
                found = self._host.to(self._device, non_blocking=True)
                self._back = found, self._stream.record_event()
