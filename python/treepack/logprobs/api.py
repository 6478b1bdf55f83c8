"""Log-probs of the loss terms of a packed tree: hidden states in, (M,) out, only the R rows through the LM head.

    log_probs = head_log_probs(hidden_states, lm_head.weight, tree)

The head runs in chunks of a fixed size (`dense.py`: 2^27 logits, 512 MiB in float32), forward and backward. A row with
a kept set is normalised over its set, one without over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .head import check_ids, head_terms
from .temperatures import Temperature, by_temperature, temperature_of
from .terms import HeadTerms, add

__all__ = ["TermLogProbs", "head_log_probs", "label_log_probs"]


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


@overload
def head_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None = ...,
    temperature: float | Tensor | Sequence[float] = ...,
    scale: float = ...,
    softcap: float | None = ...,
    entropy: Literal[False] = ...,
    full_log_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def head_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None = ...,
    temperature: float | Tensor | Sequence[float] = ...,
    scale: float = ...,
    softcap: float | None = ...,
    entropy: Literal[True],
    full_log_probs: bool = ...,
) -> TermLogProbs: ...
@overload
def head_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None = ...,
    temperature: float | Tensor | Sequence[float] = ...,
    scale: float = ...,
    softcap: float | None = ...,
    entropy: bool = ...,
    full_log_probs: Literal[True],
) -> TermLogProbs: ...
@overload
def head_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None = ...,
    temperature: float | Tensor | Sequence[float] = ...,
    scale: float = ...,
    softcap: float | None = ...,
    entropy: bool = ...,
    full_log_probs: bool = ...,
) -> Tensor | TermLogProbs: ...
def head_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor | Sequence[float] = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    full_log_probs: bool = False,
) -> Tensor | TermLogProbs:
    """Log-probs of the loss terms from hidden states, for any model; `treepack.term_log_probs` runs a Hugging Face one.

    Args:
        hidden_states: (N, h) or (1, N, h), after the final norm; any float dtype.
        weight: (V, h) of the LM head; hidden states of another dtype are converted to the weight's. Under autocast both
            are converted to its dtype, as the head's own forward would do.
        tree: on the same device: anything with `row_position`, `term_row`, `term_target`, `sampling_mask`,
            `sampling_mask_counts`.
        bias: (V,); -inf takes an id out.
        scale: factor on the logits, then softcap: `softcap * tanh(logits / softcap)`, then temperature.
        temperature: as in `term_log_probs`; one for each sample needs a `PackedTree`.
        entropy, full_log_probs: as in `term_log_probs`.

    Returns:
        (M,) or `TermLogProbs`.

    Raises:
        ValueError: shapes or devices that do not fit, a temperature or softcap that is not positive; on the CPU, a
            target or kept id that the weight has no row for (on a GPU such a target's log-prob is NaN).
        TypeError: a tree that is still on the host.
    """
    values = head_values(
        hidden_states,
        weight,
        tree,
        bias=bias,
        temperature=temperature_of(tree, temperature),
        scale=scale,
        softcap=softcap,
        entropy=entropy,
        full_log_probs=full_log_probs,
    )
    return values if entropy or full_log_probs else values.log_probs


def label_log_probs(values: Tensor, tree: Any) -> Tensor:
    """Per-position log-probs of `tree.shift_labels` as log-probs of the terms: (N,) or (1, N) to (M,), differentiable.

    The way back from heads that take labels in the shape of `input_ids` (fused linear cross-entropies: the log-prob is
    their unreduced loss, negated). Every term gets its own value, also where samples share a position.

    Raises:
        ValueError: not a tree of `branching="label"`, kept sets, or another length.
    """
    count = labels_of(tree).shape[0]
    if values.numel() != count:
        raise ValueError(f"values are {tuple(values.shape)}, the tree has {count} positions")
    return _take(values.reshape(-1), tree.row_position.long()[tree.term_row.long()])


def labels_of(tree: Any) -> Tensor:
    """(N,) the labels of a tree, for a head that takes them in the shape of the ids. ValueError where it has none."""
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


def head_values(
    hidden: Tensor,
    weight: Tensor,
    tree: Any,
    *,
    bias: Tensor | None,
    temperature: Temperature,
    scale: float,
    softcap: float | None,
    entropy: bool,
    full_log_probs: bool,
) -> TermLogProbs:
    """What `head_log_probs` returns, log-probs alone included, in one form; the temperature is checked already."""
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
    one = temperature if isinstance(temperature, float) else 1.0
    terms = HeadTerms(
        rows,
        tree.term_row,
        tree.term_target,
        tree.sampling_mask,
        tree.sampling_mask_counts,
        scale=scale,
        softcap=softcap,
        temperature=one,
        entropy=entropy,
        full=full_log_probs,
    )
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if isinstance(temperature, float):
        return TermLogProbs(*head_terms(hidden, weight, bias, terms))
    check_ids(terms, weight)  # of the whole tree, whose terms a message counts
    parts, places = [], []
    for part, place in by_temperature(terms, tree, temperature):
        parts.append(head_terms(hidden, weight, bias, part))
        places.append(place)
    where = torch.cat(places)
    log_probs, entropies, full = zip(*parts, strict=True)
    return TermLogProbs(
        _in_order(log_probs, where),
        _in_order(entropies, where) if entropy else None,
        _in_order(full, where) if full_log_probs else None,
    )


def _in_order(parts: Sequence[Any], where: Tensor) -> Tensor:
    """Values of parts of the terms, and which terms they are -> (M,)."""
    values = torch.cat(list(parts))
    return torch.empty_like(values).index_copy(0, where, values)
