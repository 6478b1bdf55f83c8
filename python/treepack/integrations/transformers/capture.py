"""The hidden states of a Hugging Face model that is called as a whole, read by a hook on its base model."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from .model import base, logit_options, output_head

__all__ = ["Capture", "after_head", "check_known", "tie"]

# Logits that the check of a model looks at together: a float32 copy of a whole head takes gigabytes.
_CHECKED_IDS = 4096
_REMEDY = "compute them from the hidden states with treepack.logprobs.head_log_probs"


class Capture:
    """A forward hook on a base model that keeps its first output while it is armed: `with capture:`, by one thread at a
    time, which may do so again within the model's own forward.

    One stays on a model for good: torch.compile takes hooks into the graph when it compiles and does not look again.
    An object of this module, so that a model with it pickles and copies.
    """

    def __init__(self) -> None:
        self.armed = False
        self.verified = False
        self.autocast = False
        self.hidden: Tensor | None = None
        self.router_logits: tuple[Tensor, ...] | None = None
        self.owner = 0
        self._lock = threading.RLock()
        self._outer: list[tuple[bool, Tensor | None, tuple[Tensor, ...] | None]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"verified": self.verified}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.verified = state["verified"]

    @classmethod
    def attach(cls, model: Any) -> Capture:
        """The hook of an unwrapped model, put there at the first call."""
        below = base(model)
        with _making:
            found: Capture | None = below.__dict__.get("_treepack_capture")
            if found is None:
                found = below._treepack_capture = cls()
                below.register_forward_hook(found)
        return found

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not self.armed or self.hidden is not None:
            return
        # Another thread may call the model itself. A compiler cannot trace the question.
        if torch.compiler.is_compiling() or self.owner == threading.get_ident():
            self.hidden = output[0]
            self.router_logits = getattr(output, "router_logits", None)
            self.autocast = torch.is_autocast_enabled(self.hidden.device.type)

    def __enter__(self) -> Capture:
        self._lock.acquire()
        self.owner = threading.get_ident()
        self._outer.append((self.armed, self.hidden, self.router_logits))
        self.armed, self.hidden, self.router_logits = True, None, None
        return self

    def __exit__(self, *_: object) -> None:
        self.armed, self.hidden, self.router_logits = self._outer.pop()  # no tensor is left behind
        self._lock.release()

    def take(self) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(hidden states (1, N, h), router logits), while armed."""
        assert self.hidden is not None
        return self.hidden, self.router_logits

    @staticmethod
    def compiled(model: Any) -> bool:
        """Whether any part of the model is compiled: layers then cannot be counted from Python."""
        return any(
            hasattr(m, "_orig_mod")
            or getattr(m, "_compiled_call_impl", None) is not None
            or hasattr(m.__dict__.get("forward"), "_torchdynamo_orig_callable")
            for m in model.modules()
        )

    def verify(self, model: Any, hidden: Tensor, logits: Tensor) -> None:
        """Once for each model: the logits that it makes of one position (1, h) are those that `lm_head` and
        `logit_options` make of it. Waits for the device."""
        weight, bias = output_head(model)
        scale, softcap = logit_options(model)
        name, shape = type(model).__name__, (*hidden.shape[:-1], weight.shape[0])
        if logits.shape != shape:
            raise ValueError(f"{name} makes logits {tuple(logits.shape)} of an LM head of {shape}: {_REMEDY}")
        if not hidden.detach().isfinite().all():  # in a checkpoint, nothing of this may be saved
            return  # this call shows nothing
        off = top = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            for start in range(0, weight.shape[0], _CHECKED_IDS):
                ids = slice(start, start + _CHECKED_IDS)
                ours = hidden.to(dtype) @ weight[ids].to(hidden.dtype).T.to(dtype)
                ours = ours if bias is None else ours + bias[ids]
                ours = after_head(ours, scale, softcap)
                same = ours == logits[..., ids]  # ids that a bias of -inf takes out
                off = torch.maximum(off, (ours - logits[..., ids]).masked_fill(same, 0).abs().max())
                top = torch.maximum(top, ours.masked_fill(ours.isinf(), 0).abs().max())
        # Autocast may lie within the model's own forward, which then returns float32.
        half = self.autocast or {logits.dtype, hidden.dtype, weight.dtype} & {torch.float16, torch.bfloat16}
        check_known(name, off, top, bool(half), scale, softcap)
        self.verified = True


def after_head(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """What a model makes of the values of its LM head, by its `logit_options`."""
    logits = logits * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def check_known(name: str, off: Tensor, top: Tensor, half: bool, scale: float, softcap: float | None) -> None:
    """ValueError where logits are `off` from those of `after_head`, of which `top` is the largest."""
    if not off <= (3e-2 if half else 1e-4) * top:
        raise ValueError(
            f"{name} changes its logits after the LM head in a way that is not known here (they differ by "
            f"{float(off):.3g} from scale {scale} and softcap {softcap}): {_REMEDY}"
        )


_making = threading.Lock()


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype, output.device
        return hidden.view_as(hidden)  # of which a frozen base wants no gradient

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return (g if ctx.needs_input_grad[0] else None), torch.zeros(shape, dtype=dtype, device=device)


def tie(hidden: Tensor, output: Tensor) -> Tensor:
    """`hidden`, whose backward pass also goes through `output`, with a gradient of 0.

    Wrappers that average or gather gradients (DDP with a static graph, FSDP) start to do so where their outputs meet
    the backward pass; the hidden states left the model by a hook, beside them.
    """
    if not output.requires_grad:
        return hidden
    tied: Tensor = _Tie.apply(hidden, output)
    return tied
