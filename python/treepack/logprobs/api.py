"""Log-probs of the loss terms of a packed tree: model and tree in, (M,) out, only the R rows through the LM head.

    log_probs = treepack.term_log_probs(model, tree)                       # a Hugging Face model
    log_probs = head_log_probs(hidden_states, lm_head.weight, tree)        # any model

The head runs in chunks of a fixed size (`dense.py`: 2^27 logits, 512 MiB in float32), forward and backward. A
row with a kept set is normalised over its set, one without over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head import head_terms
from .terms import HeadTerms, add

__all__ = ["TermLogProbs", "head_log_probs", "label_log_probs", "term_log_probs"]


class TermLogProbs(NamedTuple):
    """Log-probs of the terms and what else was asked for; None for the rest."""

    log_probs: Tensor
    """(M,), normalised over the kept set where the row has one."""
    entropy: Tensor | None = None
    """(M,): of the distribution that `log_probs` is taken from, in nats."""
    full_log_probs: Tensor | None = None
    """(M,), normalised over the vocabulary whatever the sets."""
    hidden_states: Tensor | None = None
    """(N, h) after the final norm."""
    aux_loss: Tensor | None = None
    """Scalar: the router's load-balancing loss over the raw tokens, without its coefficient."""


def term_log_probs(
    model: Any,
    tree: Any,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    full_log_probs: bool = False,
    hidden_states: bool = False,
    aux_loss: bool = False,
    head: Callable[[Tensor, Tensor], Tensor] | None = None,
    impl: str | None = None,
) -> Any:
    """Log-probs of the loss terms under a Hugging Face model, differentiable in all its parameters.

    Args:
        model: a causal language model with `attn_implementation="treepack"`; DDP, torch.compile and PEFT around it are
            fine.
        tree: a `PackedTree` on its device. A dummy tree (no samples) gives an empty result that is still connected to
            every parameter: its sum has zero gradients.
        temperature: logits are divided by it, after the model's own scale and softcap.
        entropy, full_log_probs: also return these, (M,), differentiable.
        hidden_states: also return the hidden states (N, h), for a value head at `tree.row_position`.
        aux_loss: also return the router's load-balancing loss, every position weighted by `position_samples`.
        head: another way from hidden states to log-probs, for heads that take labels in the shape of the ids:
            `head(hidden_states (1, N, h), shift_labels (1, N))` returns the log-prob of each label, (1, N) or (N,),
            anything where the label is -100. Needs a tree packed with `branching="label"` and without kept sets.
        impl: implementation of the attention; None: "triton" on CUDA, "reference" elsewhere.

    Returns:
        (M,) float32 (float64 for a float64 model), or `TermLogProbs` if anything else was asked for.

    Raises:
        ValueError: a model that would not compute on a tree what it computes on each sample (see `check_model`), a
            temperature that is not positive; on the CPU, a target or kept id that the head has no row for (on a GPU
            such a target's log-prob is NaN).
        TypeError: a tree that is still on the host.

    Example:
        >>> packed = treepack.pack(samples, max_tokens=16384)
        >>> for tree in packed:
        ...     tree = tree.to(model.device)
        ...     log_probs = treepack.term_log_probs(model, tree)
        ...     loss = -(log_probs * tree.terms["advantage"]).sum() / packed.stats.terms
        ...     loss.backward()
    """
    from ..integrations.transformers.forward import forward_tree, router_aux_loss
    from ..integrations.transformers.model import logit_options, output_head, unwrap

    _check_temperature(temperature)
    if head is not None and (entropy or full_log_probs or temperature != 1.0):
        raise ValueError("with head=..., temperature, entropy and full_log_probs are that function's own business")
    inner = unwrap(model)
    hidden, router_logits = forward_tree(model, tree, impl=impl, router_logits=aux_loss, own_head=head is not None)
    balance = None
    if aux_loss:
        if not router_logits:
            raise ValueError(f"aux_loss=True, but {type(inner).__name__} returned no router logits")
        config = inner.config.get_text_config()
        top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
        if top_k is None:
            raise ValueError(f"aux_loss=True, but the config of {type(inner).__name__} has no num_experts_per_tok")
        balance = router_aux_loss(router_logits, tree, num_experts=router_logits[0].shape[-1], top_k=top_k)
    if head is not None:
        values = TermLogProbs(label_log_probs(head(hidden[None], _labels(tree)[None]), tree))
    else:
        weight, bias = output_head(inner)
        scale, softcap = logit_options(inner)
        values = _head(hidden, weight, tree, bias, temperature, scale, softcap, entropy, full_log_probs)
    if not (entropy or full_log_probs or hidden_states or aux_loss):
        return values.log_probs
    return values._replace(hidden_states=hidden if hidden_states else None, aux_loss=balance)


def head_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    full_log_probs: bool = False,
) -> Any:
    """The same from hidden states, for models that are not Hugging Face's.

    Args:
        hidden_states: (N, h) or (1, N, h), after the final norm; any float dtype.
        weight: (V, h) of the LM head; hidden states of another dtype are converted to the weight's. Under autocast both
            are converted to its dtype, as the head's own forward would do.
        tree: on the same device: anything with `row_position`, `term_row`, `term_target`, `sampling_mask`,
            `sampling_mask_counts`.
        bias: (V,); -inf takes an id out.
        scale: factor on the logits, then softcap: `softcap * tanh(logits / softcap)`, then temperature.
        entropy, full_log_probs: as in `term_log_probs`.

    Returns:
        (M,) or `TermLogProbs`.

    Raises:
        ValueError: shapes or devices that do not fit, a temperature or softcap that is not positive; on the CPU, a
            target or kept id that the weight has no row for (on a GPU such a target's log-prob is NaN).
        TypeError: a tree that is still on the host.
    """
    _check_temperature(temperature)
    values = _head(hidden_states, weight, tree, bias, temperature, scale, softcap, entropy, full_log_probs)
    return values if entropy or full_log_probs else values.log_probs


def label_log_probs(values: Tensor, tree: Any) -> Tensor:
    """Per-position log-probs of `tree.shift_labels` as log-probs of the terms: (N,) or (1, N) to (M,), differentiable.

    The way back from heads that take labels in the shape of `input_ids` (fused linear cross-entropies: the log-prob is
    their unreduced loss, negated). Every term gets its own value, also where samples share a position.

    Raises:
        ValueError: not a tree of `branching="label"`, kept sets, or another length.
    """
    count = _labels(tree).shape[0]
    if values.numel() != count:
        raise ValueError(f"values are {tuple(values.shape)}, the tree has {count} positions")
    return _take(values.reshape(-1), tree.row_position.long()[tree.term_row.long()])


def _labels(tree: Any) -> Tensor:
    try:
        labels = tree.shift_labels
    except AttributeError as error:
        raise ValueError(f"labels in the shape of input_ids: {error}") from error
    if tree.sampling_mask.shape[0]:
        raise ValueError("the tree has kept sets, which labels in the shape of input_ids cannot carry")
    assert isinstance(labels, Tensor)
    return labels


class _Take(torch.autograd.Function):
    """values[index] with a backward pass that adds in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = values.shape
        return values[index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return add(g.new_zeros(ctx.shape, dtype=torch.promote_types(g.dtype, torch.float32)), index, g).to(
            g.dtype
        ), None


def _take(values: Tensor, index: Tensor) -> Tensor:
    out: Tensor = _Take.apply(values, index)
    return out


def _head(
    hidden: Tensor, weight: Tensor, tree: Any, bias: Tensor | None, temperature: float, scale: float,
    softcap: float | None, entropy: bool, full: bool,
) -> TermLogProbs:  # fmt: skip
    rows = tree.row_position
    if not isinstance(rows, Tensor):
        raise TypeError("the tree holds NumPy arrays: move it to the model's device first, tree.to(device)")
    if hidden.dim() == 3 and hidden.shape[0] == 1:
        hidden = hidden[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden states must be (N, h) or (1, N, h) and the weight (V, h), not "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.shape[0] != tree.subtree_end.shape[0]:
        raise ValueError(f"{hidden.shape[0]} hidden states for a tree of {tree.subtree_end.shape[0]} positions")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, the weight {tuple(weight.shape)}")
    for name, device in (("the weight", weight.device), ("the tree", rows.device)):
        if device != hidden.device:
            raise ValueError(f"{name} is on {device}, the hidden states are on {hidden.device}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}; None means no cap")
    terms = HeadTerms(
        rows, tree.term_row, tree.term_target, tree.sampling_mask, tree.sampling_mask_counts, scale=scale,
        softcap=softcap, temperature=temperature, entropy=entropy, full=full)  # fmt: skip
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    bias = None if bias is None else bias.to(dtype)
    return TermLogProbs(*head_terms(hidden.to(dtype), weight.to(dtype), bias, terms))


def _check_temperature(temperature: Any) -> None:
    if getattr(temperature, "ndim", 0):
        raise ValueError(f"temperature must be one number for the whole tree, not {temperature!r}")
    if not isinstance(temperature, Real) and not hasattr(temperature, "item"):
        raise TypeError(f"temperature must be a number, not {temperature!r}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, not {temperature}")
