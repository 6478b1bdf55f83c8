"""A block in which a model runs for us and not for its user: afterwards nothing of it is left in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Capture

__all__ = ["untouched"]

# Buffers that a forward pass writes are small: frequencies, counters. Quantised weights are buffers too.
_COPIED = 2**20


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Within the block: evaluation mode, no gradients, nothing compiled. Afterwards as before: the mode of every
    module, its numbers and tensors (buffers, whatever a forward pass keeps), and the random generators of torch.

    What is no number and no tensor stays as the run left it: kernels that are loaded at the first call, say.
    """
    state = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    tensors = [x for _, before, buffers in state for x in (*before.values(), *buffers.values())]
    copies = {id(x): (x, x._version, x.clone()) for x in tensors if isinstance(x, Tensor) and _is_copied(x)}
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(sorted(devices), device_type="cuda"))
        if Capture.compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, _, _ in state:
            module.__dict__["training"] = False  # `train` and `eval` are overridden here and there
        try:
            yield
        finally:
            for x, version, copy in copies.values():
                if x._version != version:
                    x.copy_(copy)
            for module, before, buffers in state:
                _put_back(module, before, buffers)
            # Weights that autocast cast here are without gradients, and it would use them again.
            torch.clear_autocast_cache()


def _is_copied(x: Tensor) -> bool:
    return x.numel() <= _COPIED and not x.is_meta and not x.is_inference()


def _put_back(module: nn.Module, before: dict[str, Any], buffers: dict[str, Any]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)
    here = vars(module)
    here["training"] = before["training"]
    for name in [name for name, now in here.items() if now is not before.get(name)]:
        now = here[name]
        if name not in before:
            if isinstance(now, Tensor):
                del here[name]
        elif (
            isinstance(before[name], Tensor)
            or isinstance(now, Tensor)
            or (_is_number(before[name]) and _is_number(now))
        ):
            here[name] = before[name]


def _is_number(x: Any) -> bool:
    """Flags are none: what they stand for (a hook that was set, a group that was made) stays."""
    return isinstance(x, int | float) and not isinstance(x, bool)
