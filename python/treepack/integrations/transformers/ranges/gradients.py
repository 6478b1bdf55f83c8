"""When the gradients of several ranks are added up: once, after the last range.

The ranges of a rank are as many as its tree needs, and their backward passes do not follow their forward passes. So no
pass of a range adds up anything; a last one over a row of padding, which every rank has, does it.

    DDP     ranges run through the module inside, whose passes it does not see; the last pass reduces what has gathered
    FSDP2   parameters stay gathered, and gradients whole, until the last pass scatters them
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

__all__ = ["Gradients"]

#: What a class or one that it derives from is called -> why a model inside it cannot run by ranges.
_REFUSED = {
    "FullyShardedDataParallel": "each of its passes gathers parameters on all ranks, which have different numbers of "
    "ranges; shard it by torch.distributed.fsdp.fully_shard (FSDP2)",
    "DeepSpeedEngine": "its backward pass is its own (engine.backward)",
}


class Gradients:
    """How a model, with its wrappers, adds up gradients over ranks.

    Raises:
        ValueError: a wrapper whose passes would not fit together.
    """

    def __init__(self, model: nn.Module):
        for module in model.modules():
            for kind in type(module).__mro__:
                if kind.__name__ in _REFUSED:
                    raise ValueError(f"{kind.__name__} does not run a tree by ranges: {_REFUSED[kind.__name__]}")
        self._model: Any = model
        self._sharded = [m for m in model.modules() if any(x.__name__ == "FSDPModule" for x in type(m).__mro__)]
        ddp = [m for m in model.modules() if type(m).__name__ == "DistributedDataParallel"]
        if ddp and ddp[0] is not model:
            raise ValueError(
                f"DistributedDataParallel is within {type(model).__name__}: it must be the outermost wrapper"
            )
        self._ddp: Any = ddp[0] if ddp else None
        if getattr(self._ddp, "static_graph", False):
            raise ValueError(
                "DistributedDataParallel(static_graph=True) takes every step for the same backward pass, and ranges "
                "are several; leave static_graph out"
            )
        if self._sharded and self._model is not self._sharded[0]:
            raise ValueError(
                f"{type(model).__name__} is not sharded itself: call fully_shard(model) after that of its layers"
            )

    @property
    def sharded(self) -> bool:
        return bool(self._sharded)

    @property
    def spread(self) -> bool:
        """Whether there is anything to add up."""
        return self._ddp is not None or bool(self._sharded)

    @property
    def model(self) -> Any:
        """The model for the passes of ranges, which add up nothing."""
        return self._model if self._ddp is None else self._ddp.module

    def alone(self) -> AbstractContextManager[Any]:
        """A backward pass within this block adds up nothing."""
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def begin(self) -> None:
        """Before the first range. With FSDP2 the first pass gathers all parameters, and they stay."""
        if self._sharded:
            self._model.set_requires_gradient_sync(False)
            self._model.set_reshard_after_forward(False)
            self._model.set_reshard_after_backward(False)

    def end(self, last_pass: Callable[[], None] | None) -> None:
        """After the last range. `last_pass` goes forward and backward over no term; None: nothing is added up yet."""
        if self._sharded and last_pass is not None:
            self._model.set_requires_gradient_sync(True)
            self._model.set_reshard_after_backward(True)
        if last_pass is not None and self.spread:
            last_pass()
        if self._sharded:  # as fully_shard sets it
            self._model.set_reshard_after_forward(True)
            self._model.set_reshard_after_forward(False, recurse=False)
