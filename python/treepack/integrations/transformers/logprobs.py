"""Log-probs of the loss terms of a packed tree under a Hugging Face model.

log_probs = treepack.term_log_probs(model, tree)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from ...distributed.shard import Form
from ...logprobs.api import TermLogProbs, head_values, label_log_probs, labels_of
from ...logprobs.temperatures import Temperature, temperature_of
from ...tree.tree import PackedTree
from .forward import forward_tree
from .model import logit_options, output_head, unwrap
from .router import balance_loss, router_sums
from .shards import of_all_ranks, shard_of

__all__ = ["check_options", "head_of", "own_head_values", "term_log_probs"]

#: (hidden states (1, N, h), shift_labels (1, N)) -> the log-prob of each label.
Head = Callable[[Tensor, Tensor], Tensor]


# A flag that a type checker sees to be True says what comes back; one that it cannot see leaves both.
@overload
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: Literal[False] = ...,
    full_log_probs: Literal[False] = ...,
    hidden_states: Literal[False] = ...,
    aux_loss: Literal[False] = ...,
    head: Head | None = ...,
    impl: str | None = ...,
    model_check: bool = ...,
    mesh: Any = ...,
    shard: Form | None = ...,
) -> Tensor: ...
@overload
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: Literal[True],
    full_log_probs: bool = ...,
    hidden_states: bool = ...,
    aux_loss: bool = ...,
    head: Head | None = ...,
    impl: str | None = ...,
    model_check: bool = ...,
    mesh: Any = ...,
    shard: Form | None = ...,
) -> TermLogProbs: ...
@overload
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: bool = ...,
    full_log_probs: Literal[True],
    hidden_states: bool = ...,
    aux_loss: bool = ...,
    head: Head | None = ...,
    impl: str | None = ...,
    model_check: bool = ...,
    mesh: Any = ...,
    shard: Form | None = ...,
) -> TermLogProbs: ...
@overload
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: bool = ...,
    full_log_probs: bool = ...,
    hidden_states: Literal[True],
    aux_loss: bool = ...,
    head: Head | None = ...,
    impl: str | None = ...,
    model_check: bool = ...,
    mesh: Any = ...,
    shard: Form | None = ...,
) -> TermLogProbs: ...
@overload
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: bool = ...,
    full_log_probs: bool = ...,
    hidden_states: bool = ...,
    aux_loss: Literal[True],
    head: Head | None = ...,
    impl: str | None = ...,
    model_check: bool = ...,
    mesh: Any = ...,
    shard: Form | None = ...,
) -> TermLogProbs: ...
@overload
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: bool = ...,
    full_log_probs: bool = ...,
    hidden_states: bool = ...,
    aux_loss: bool = ...,
    head: Head | None = ...,
    impl: str | None = ...,
    model_check: bool = ...,
    mesh: Any = ...,
    shard: Form | None = ...,
) -> Tensor | TermLogProbs: ...
def term_log_probs(
    model: Any,
    tree: PackedTree[Tensor],
    *,
    temperature: float | Tensor | Sequence[float] = 1.0,
    entropy: bool = False,
    full_log_probs: bool = False,
    hidden_states: bool = False,
    aux_loss: bool = False,
    head: Head | None = None,
    impl: str | None = None,
    model_check: bool = True,
    mesh: Any = None,
    shard: Form | None = None,
) -> Tensor | TermLogProbs:
    """Log-probs of the loss terms under a Hugging Face model, differentiable in all its parameters.

    Args:
        model: a causal language model with `attn_implementation="treepack"`; DDP, torch.compile and PEFT around it are
            fine.
        tree: a `PackedTree` on its device. A dummy tree (no samples) gives an empty result that is still connected to
            every parameter: its sum has zero gradients.
        temperature: logits are divided by it, after the model's own scale and softcap. One number, or one for each
            sample, (n,) in the order of `sample_index`, which are read on the host.
        entropy, full_log_probs: also return these, (M,), differentiable.
        hidden_states: also return the hidden states (N, h), for a value head at `tree.row_position`.
        aux_loss: also return the router's load-balancing loss, every position weighted by `position_samples`.
        head: another way from hidden states to log-probs, for heads that take labels in the shape of the ids:
            `head(hidden_states (1, N, h), shift_labels (1, N))` returns the log-prob of each label, (1, N) or (N,),
            anything where the label is -100. Needs a tree packed with `branching="label"` and without kept sets.
        impl: implementation of the attention; None: "triton" on CUDA, "reference" elsewhere.
        model_check: at the first use of a model two tiny samples are run packed and alone, and a layer that leaks
            between them is refused; False leaves this out, as `TREEPACK_MODEL_CHECK=0` does.
        mesh: one dimension of a DeviceMesh, whose ranks run this tree together; each of them passes the same tree. All
            ranks get the values of all terms, and hidden states (n, h) of their own rows, which are those of
            `TreeShard(tree, mesh, shard).rows`. Each rank takes its own part of the gradient: where all compute the
            same loss, the gradients of the ranks add up to those of one process
            (`treepack.distributed.sum_gradients`). What of a loss is not made of these values counts once for every
            rank.
        shard: with a mesh: "rows" (the default) runs a range of rows on each rank, "heads" runs attention by heads and
            all else by rows.

    Returns:
        (M,) float32 (float64 for a float64 model), or `TermLogProbs` if anything else was asked for.

    Raises:
        ValueError: a model that would not compute on a tree what it computes on each sample (see `check_model`), a
            temperature that is not positive or of another length; on the CPU, a target or kept id that the head has no
            row for (on a GPU such a target's log-prob is NaN). With a mesh: several dimensions of one, ranks with
            different trees, columns or weights, layers that carry a state, a compiled model, heads that the ranks
            cannot part.
        TypeError: a tree that is still on the host, a mesh that is none.

    Example:
        >>> packed = treepack.pack(samples, max_tokens=16384)
        >>> for tree in packed:
        ...     tree = tree.to(model.device)
        ...     log_probs = treepack.term_log_probs(model, tree)
        ...     loss = -(log_probs * tree.terms["advantage"]).sum() / packed.stats.terms
        ...     loss.backward()
    """
    heat = temperature_of(tree, temperature)
    check_options(head, heat, entropy or full_log_probs)
    inner = unwrap(model)
    part = shard_of(tree, mesh, shard)
    hidden, router_logits = forward_tree(
        model, tree, impl=impl, router_logits=aux_loss, own_head=head is not None, model_check=model_check, part=part
    )
    rows = tree if part is None else part.rows
    sums = router_sums(inner, router_logits, rows) if aux_loss else None
    values = head_of(inner, hidden, rows, head, heat, entropy=entropy, full_log_probs=full_log_probs)
    if part is not None:
        hidden, values, sums = of_all_ranks(part, hidden, values, sums)
    balance = None if sums is None else balance_loss([sums])
    if not (entropy or full_log_probs or hidden_states or aux_loss):
        return values.log_probs
    return values._replace(hidden_states=hidden if hidden_states else None, aux_loss=balance)


def check_options(head: Head | None, temperature: Temperature, more: bool) -> None:
    """ValueError for options that a head of one's own does not take; `more`: whether more than log-probs is asked
    for."""
    if head is not None and (more or not isinstance(temperature, float) or temperature != 1.0):
        raise ValueError("with head=..., temperature, entropy and full_log_probs are that function's own business")


def head_of(
    inner: Any,
    hidden: Tensor,
    tree: Any,
    head: Head | None,
    temperature: Temperature,
    *,
    entropy: bool,
    full_log_probs: bool,
) -> TermLogProbs:
    """Values of the terms from the hidden states (N, h), by the head of an unwrapped model or by another one."""
    if head is not None:
        return TermLogProbs(label_log_probs(head(hidden[None], labels_of(tree)[None]), tree))
    return own_head_values(inner, hidden, tree, temperature, entropy=entropy, full_log_probs=full_log_probs)


def own_head_values(
    inner: Any, hidden: Tensor, tree: Any, temperature: Temperature, *, entropy: bool, full_log_probs: bool = False
) -> TermLogProbs:
    """Values of the terms by the LM head of an unwrapped model, with its own scale and softcap."""
    weight, bias = output_head(inner)
    scale, softcap = logit_options(inner)
    return head_values(
        hidden,
        weight,
        tree,
        bias=bias,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        entropy=entropy,
        full_log_probs=full_log_probs,
    )
