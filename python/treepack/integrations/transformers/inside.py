"""Values of the loss terms made by the model's own LM head while the model runs.

    run = InsideHead(model, tree, temperature=0.7, entropy=True)
    with run:
        output = model(**run.inputs)
    values = run.values(output)                      # TermLogProbs

`term_log_probs` reads the hidden states by a hook and runs the head afterwards, which needs the head's weight whole
outside of the model's forward. FSDP has it whole only while the head's own module runs. So for one call the forward of
that module is another: it gets the hidden states of all positions and returns the values of the terms, which leave the
model as its logits, through every wrapper, and no logits of all positions exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...logprobs.api import TermLogProbs, head_values
from ...logprobs.temperatures import temperature_of
from .capture import after_head, check_known, tie
from .checks.tree import check_ids
from .forward import check_ran, model_inputs
from .model import logit_options, unwrap

__all__ = ["InsideHead"]

_VERIFIED = "_treepack_inside_verified"


class InsideHead:
    """One run of a Hugging Face model on a packed tree, sharded or not: `with` it, and then `values`.

    Args:
        model: a causal language model with `attn_implementation="treepack"`, inside FSDP (1 or 2), DDP, PEFT or plain.
        tree: a `PackedTree` on its device.
        temperature: one number, or one for each sample of the tree.
        entropy: also make the entropy of each term.
        impl: implementation of the attention.

    Attributes:
        inputs: keyword arguments of the model.

    Raises:
        ValueError: a model that `check_model` refuses, or a head that is not one linear layer.
    """

    def __init__(
        self, model: Any, tree: Any, *, temperature: Any = 1.0, entropy: bool = False, impl: str | None = None
    ) -> None:
        self.inner = unwrap(model)
        # Without the two tiny samples: FSDP1 takes its first forward for that of training, and breaks.
        self.inputs = model_inputs(tree, model=self.inner, impl=impl, model_check=False)
        self.head = _head_of(self.inner)
        self.tree = tree
        check_ids(self.inner, tree)
        self._options: dict[str, Any] = {"temperature": temperature_of(tree, temperature), "entropy": entropy}
        self._first = not self.inner.__dict__.get(_VERIFIED, False)
        self._made: Tensor | None = None
        self._raw: Tensor | None = None
        self._terms = 0

    def __enter__(self) -> InsideHead:
        self.head.forward = self._forward  # an attribute of this one module; `__exit__` takes it away again
        return self

    def __exit__(self, *_: object) -> None:
        del self.head.forward

    def _forward(self, hidden: Tensor) -> Tensor:
        """In place of the head's own: the values of all terms side by side, (1, 1, terms or twice as many)."""
        scale, softcap = logit_options(self.inner)
        made = head_values(
            hidden,
            self.head.weight,
            self.tree,
            bias=self.head.bias,
            scale=scale,
            softcap=softcap,
            full_log_probs=False,
            **self._options,
        )
        self._terms = len(made.log_probs)
        parts = [made.log_probs] if made.entropy is None else [made.log_probs, made.entropy]
        if self._first:  # what the head makes of one position, to see what the model does to its logits after it
            self._raw = nn.functional.linear(hidden.detach()[0, -1:], self.head.weight, self.head.bias)[0].detach()
            parts.append(self._raw.to(made.log_probs.dtype))
        self._made = torch.cat(parts)[None, None]
        return self._made

    def values(self, output: Any) -> TermLogProbs:
        """Log-probs and entropy of the terms from the output of the model.

        Raises:
            ValueError: a model that did not call its head, changes its logits in an unknown way, or has layers that did
                not run tree attention.
        """
        name = type(self.inner).__name__
        if self._made is None:
            raise ValueError(
                f"{name} ran without calling its LM head, so nothing was made of the terms: fused kernels that take "
                "its place have to be switched off"
            )
        if self._first:
            self._verify(name, output.logits)
        # Wrappers act where their outputs meet the backward pass: the values go back through the output as well.
        flat = tie(self._made, output.logits)[0, 0]
        log_probs = flat[: self._terms]
        return TermLogProbs(log_probs, flat[self._terms : 2 * self._terms] if self._options["entropy"] else None)

    def _verify(self, name: str, logits: Tensor) -> None:
        """Once for each model: the layers all ran tree attention, and the logits of one position are what
        `logit_options` says."""
        check_ran(self.inner, self.inputs["tree_tiles"])
        assert self._raw is not None
        if not self._raw.isfinite().all():
            return  # this call shows nothing
        scale, softcap = logit_options(self.inner)
        ours = after_head(self._raw.float(), scale, softcap)
        theirs = logits[0, 0, -len(ours) :].detach().float()
        half = self._raw.dtype in (torch.float16, torch.bfloat16)
        check_known(name, (ours - theirs).abs().max(), ours.abs().max(), half, scale, softcap)
        self.inner.__dict__[_VERIFIED] = True


def _head_of(model: Any) -> Any:
    """The LM head of an unwrapped model: a linear layer, which FSDP2 may have made a class of its own of."""
    head = model.get_output_embeddings()
    kind = type(head)
    if kind is nn.Linear or (isinstance(head, nn.Linear) and kind.__name__ == "FSDPLinear"):
        return head
    raise ValueError(
        f"the LM head is {kind.__module__}.{kind.__qualname__}; only a plain torch.nn.Linear can run on the rows alone "
        "(no adapter, quantisation or FSDP1 unit of its own on it)"
    )
