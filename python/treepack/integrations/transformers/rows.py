"""Log-probs of rows of tokens, by way of trees: for loops that hand rows to one function and want log-probs back.

log_probs = treepack.row_log_probs(model, input_ids, attention_mask, last=completion_ids.shape[1])
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from ...distributed.aligned import align
from ...logprobs.temperatures import check_temperature
from ...tree.layout import dummy_tree
from ...tree.tree import HostTree
from .forward import forward_tree
from .logprobs import own_head_values
from .model import unwrap
from .router import balance_loss, router_sums
from .row_batch import RowBatch, read_rows

__all__ = ["RowLogProbs", "row_log_probs", "row_values"]


class RowLogProbs(NamedTuple):
    """Values in the places of the rows; None for what was not asked for."""

    log_probs: Tensor
    """(B, last), or in the shape of flat or jagged ids."""
    entropy: Tensor | None = None
    """The same shape, in nats."""
    aux_loss: Tensor | None = None
    """Scalar: the router's load-balancing loss over the tokens of all rows, without its coefficient."""


@overload
def row_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = ...,
    *,
    cu_seqlens: Tensor | None = ...,
    completion_mask: Tensor | None = ...,
    last: int | None = ...,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: Literal[False] = ...,
    aux_loss: Literal[False] = ...,
    max_tokens: int | None = ...,
    group: Any = ...,
    impl: str | None = ...,
) -> Tensor: ...
@overload
def row_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = ...,
    *,
    cu_seqlens: Tensor | None = ...,
    completion_mask: Tensor | None = ...,
    last: int | None = ...,
    temperature: float | Tensor | Sequence[float] = ...,
    entropy: bool = ...,
    aux_loss: bool = ...,
    max_tokens: int | None = ...,
    group: Any = ...,
    impl: str | None = ...,
) -> Any: ...
def row_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    completion_mask: Tensor | None = None,
    last: int | None = None,
    temperature: float | Tensor | Sequence[float] = 1.0,
    entropy: bool = False,
    aux_loss: bool = False,
    max_tokens: int | None = None,
    group: Any = None,
    impl: str | None = None,
) -> Tensor | RowLogProbs:
    """Log-probs of rows of tokens under a Hugging Face model, each shared prefix computed once.

    The rows are packed into trees on the spot, the trees run one after another, and every value comes back to the place
    of its token: what a trainer's own function of padded rows returns. Differentiable in all parameters. The graphs of
    all trees live until the backward pass, so memory is that of the positions of all of them, whatever `max_tokens`;
    under `torch.no_grad()` it is that of one tree.

    Args:
        model: a causal language model with `attn_implementation="treepack"`, wrapped or not, as in `term_log_probs`.
        input_ids: (B, S) padded rows; or (R,) or (1, R) with `cu_seqlens`; or a nested tensor (layout torch.jagged).
        attention_mask: (B, S), 1 at tokens and 0 at padding, which may be anywhere in a row and is left out: a token
            follows the one before it that is no padding. A row may be all padding. None: no padding.
        cu_seqlens: (n + 1,) offsets of the samples of a flat batch.
        completion_mask: in the shape of the ids: 1 where a value is wanted, 0 elsewhere, which saves the LM head there.
            None: everywhere.
        last: of padded rows: number of last columns that values are wanted of; None: all but the first.
        temperature: logits are divided by it: one number, or one for each row, (B,).
        entropy: also return the entropy of the distribution of each token, differentiable.
        aux_loss: also return the router's load-balancing loss of all tokens of the rows: of the batch as a whole,
            however many trees it took. Without it no such loss is made, whatever the config says.
        max_tokens: most positions of a tree. None: one tree for all rows, which has at most as many positions as they
            have tokens.
        group: a process group on whose ranks the model has to run equally often (FSDP, ZeRO: its forward waits for the
            other ranks); ranks with fewer trees run dummies. Every rank of it calls this, one without tokens too.
        impl: implementation of the attention, as in `term_log_probs`.

    Returns:
        Float32 log-probs (float64 for a float64 model) on the device of the ids, or of the model where the ids are on
        the host; `RowLogProbs` if anything else was asked for. (B, last): entry [b, j] is of
        `input_ids[b, S - last + j]`, given what precedes it in the row. In the shape of flat or jagged ids entry t is
        of token t + 1, and of the last token of a sample 0. 0 at padding, at the first token of a row, and where
        `completion_mask` is 0.

    Raises:
        PackError: rows that cannot be packed; a row longer than `max_tokens`: which row, its length, the limit.
        ValueError: shapes or options that do not fit together, a model that `check_model` refuses.

    Example:
        >>> input_ids = torch.tensor([[0, 5, 7, 3, 9], [5, 7, 2, 4, 0]])  # one row padded on the left, one on the right
        >>> attention_mask = (input_ids > 0).long()
        >>> log_probs = treepack.row_log_probs(model, input_ids, attention_mask, last=3)
        >>> log_probs.shape, (log_probs == 0).tolist()
        (torch.Size([2, 3]), [[False, False, False], [False, False, True]])
    """
    batch = read_rows(input_ids, attention_mask, cu_seqlens, completion_mask, last)
    values = row_values(
        model,
        batch,
        _device(input_ids, model),
        temperature=temperature,
        entropy=entropy,
        aux_loss=aux_loss,
        max_tokens=max_tokens,
        group=group,
        impl=impl,
    )
    return values if entropy or aux_loss else values.log_probs


def row_values(
    model: Any,
    batch: RowBatch,
    device: torch.device,
    *,
    temperature: float | Tensor | Sequence[float],
    entropy: bool,
    aux_loss: bool,
    max_tokens: int | None,
    group: Any,
    impl: str | None = None,
    head_autocast: bool = True,
) -> RowLogProbs:
    """What `row_log_probs` returns, in one form. `head_autocast=False` runs the LM head in the dtype of its weight
    under autocast too."""
    heat = check_temperature(temperature, batch.count, batch.called, f"{batch.called} {{}}".format)
    inner = unwrap(model)
    places, log_probs, entropies, routers = [], [], [], []
    for host in _trees(batch, max_tokens, group):
        tree = host.to(device)
        hidden, router_logits = forward_tree(model, tree, impl=impl, router_logits=aux_loss or None)
        of_samples = heat if isinstance(heat, float) or not host.num_samples else heat[batch.rows_of(host)]
        with nullcontext() if head_autocast else torch.autocast(device.type, enabled=False):
            values = own_head_values(inner, hidden, tree, of_samples, entropy=entropy)
        places.append(torch.from_numpy(batch.places_of(host).astype(np.int64)).to(device))
        log_probs.append(values.log_probs)
        if values.entropy is not None:
            entropies.append(values.entropy)
        if aux_loss:
            routers.append(router_sums(inner, router_logits, tree))
    where = torch.cat(places)
    return RowLogProbs(
        _in_place(log_probs, where, batch),
        _in_place(entropies, where, batch) if entropy else None,
        balance_loss(routers) if aux_loss else None,
    )


def _trees(batch: RowBatch, max_tokens: int | None, group: Any) -> list[HostTree]:
    """The trees that this rank runs: at least one, so that the result is connected to every parameter."""
    trees = list(batch.pack(max_tokens))
    if group is not None and max_tokens is not None:  # without a budget every rank has one
        trees = align(trees, group).trees
    return trees or [dummy_tree({})]


def _device(input_ids: Tensor, model: Any) -> torch.device:
    """Where the trees run: where the ids are; with the model where they are on the host."""
    of_model: torch.device = unwrap(model).get_input_embeddings().weight.device
    return input_ids.device if input_ids.device.type != "cpu" or of_model.type == "meta" else of_model


def _in_place(parts: list[Tensor], where: Tensor, batch: RowBatch) -> Tensor:
    values = torch.cat(parts)
    out: Tensor = batch.shaped(values.new_zeros(prod(batch.shape)).index_copy(0, where, values))
    return out
