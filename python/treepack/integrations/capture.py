"""The hidden states of a Hugging Face model that is called as a whole, read by a hook on its base model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .models import base, logit_options, output_head

__all__ = ["Capture"]


class Capture:
    """A forward hook on a base model that keeps its output while it is armed (`with capture:`).

    One stays on a model for good: torch.compile takes hooks into the graph when it compiles and does not look again.
    An object of this module, so that a model with it pickles and copies.
    """

    def __init__(self) -> None:
        self.armed = False
        self.verified = False
        self.hidden: Tensor | None = None
        self.router_logits: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, model: Any) -> Capture:
        """The hook of an unwrapped model, put there at the first call."""
        below = base(model)
        found: Capture | None = below.__dict__.get("_treepack_capture")
        if found is None:
            found = below._treepack_capture = cls()
            below.register_forward_hook(found)
        return found

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.armed:
            self.hidden = output[0]
            self.router_logits = getattr(output, "router_logits", None)

    def __enter__(self) -> Capture:
        self.armed, self.hidden, self.router_logits = True, None, None
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.armed = False
        if kind is not None:  # a call that failed leaves no tensor behind
            self.hidden = self.router_logits = None

    def take(self) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(hidden states (1, N, h), router logits), which are not kept here any longer."""
        hidden, router_logits = self.hidden, self.router_logits
        assert hidden is not None
        self.hidden = self.router_logits = None
        return hidden, router_logits

    @staticmethod
    def compiled(model: Any) -> bool:
        """Whether any part of the model is compiled: layers then cannot be counted from Python."""
        return any(
            hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()
        )

    def verify(self, model: Any, hidden: Tensor, logits: Tensor) -> None:
        """Once for each model: the logits that it makes of one position (1, h) are those that `lm_head` and
        `logit_options` make of it. Waits for the device."""
        weight, bias = output_head(model)
        scale, softcap = logit_options(model)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            ours = hidden.to(dtype) @ weight.to(hidden.dtype).T.to(dtype)
            ours = ours if bias is None else ours + bias
            ours = ours * scale
            if softcap:
                ours = softcap * torch.tanh(ours / softcap)
            half = {logits.dtype, hidden.dtype, weight.dtype} & {torch.float16, torch.bfloat16}
            tolerance = 3e-2 if half else 1e-4
            same = ours.shape == logits.shape
            if not same or (ours - logits).abs().max() > tolerance * ours.abs().max():
                what = f"shape {tuple(logits.shape)} against {tuple(ours.shape)}" if not same else "values"
                raise ValueError(
                    f"{type(model).__name__} changes its logits after the LM head in a way that is not known here "
                    f"({what} differ from scale {scale} and softcap {softcap}); compute them "
                    "from the hidden states with treepack.logprobs.head_log_probs"
                )
        self.verified = True
