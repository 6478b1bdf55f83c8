"""Log-probs of loss terms from hidden states: the LM head on the R rows alone, without an R x V tensor.

    hidden (N, h), weight (V, h), rows and terms of a tree  ->  log-probs, entropy, full log-probs, all (M,)

Rows without a kept set are normalised over the vocabulary in blocks, at most `CHUNK_ROWS` rows and `CHUNK_LOGITS`
logits at a time (`dense.py`). Rows with a kept set need the logits of that set's ids only, `CHUNK_IDS` products
of width h at a time (`kept_sets.py`). The backward pass computes the logits again instead of keeping them. Sums are
float32 (float64 where the hidden states are) and always in the same order.

Axes: r = row, m = term, v = vocabulary, t = kept id (all sets end to end), h = hidden size. With z the logits after
scale, softcap and temperature, p = exp(z - lse) and H the entropy of p:

    log_prob[m] = z[row, target] - lse[row]                   d log_prob / d z = [v = target] - p
    H[r]        = lse - sum_v p z                             d H        / d z = -p (z - lse + H)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dense import DenseRows
from .kept_sets import SetRows
from .terms import HeadTerms, add

__all__ = ["HeadTerms", "check_ids", "head_terms"]


def head_terms(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: HeadTerms
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(log-probs, entropy or None, full-vocabulary log-probs or None) of all terms, each (M,) float32 or float64.

    Args:
        hidden: (N, h), after the final norm. weight: (V, h). bias: (V,) or None; -inf takes an id out. One dtype, one
            device.
        terms: the rows and terms, and which of the results are wanted.

    Raises:
        ValueError: on the CPU, a target or a kept id that the weight has no row for. A GPU is not waited for: there the
            log-prob of such a target is NaN, and such a kept id ends in CUDA's own assert.
    """
    check_ids(terms, weight)
    # Under autocast a product of float32 tensors would round its result to half precision.
    with torch.autocast(hidden.device.type, enabled=False):
        out: tuple[Tensor, Tensor | None, Tensor | None] = _Head.apply(hidden, weight, bias, terms)
    return out


def check_ids(terms: HeadTerms, weight: Tensor) -> None:
    """ValueError for a target or a kept id that the weight has no row for; on the CPU alone."""
    if weight.device.type != "cpu" or torch.compiler.is_compiling():
        return
    vocabulary = weight.shape[0]
    allowed = (
        f"but the LM head has {vocabulary} rows, for ids from 0 to {vocabulary - 1}; a head of another model, or "
        "samples of another tokenizer? pack(vocab_size=...) looks at every id"
    )
    target, kept = terms.term_target, terms.sampling_mask
    for m in ((target < 0) | (target >= vocabulary)).nonzero()[:1, 0].tolist():
        raise ValueError(f"term {m} has the target {int(target[m])}, {allowed}")
    for t in ((kept < 0) | (kept >= vocabulary)).nonzero()[:1, 0].tolist():
        row = int(torch.searchsorted(terms.sampling_mask_counts.cumsum(0), t, right=True))
        term = (terms.term_row == row).nonzero()[:1, 0].tolist()
        where = f"term {term[0]}" if term else f"row {row}"
        raise ValueError(f"{where} has the id {int(kept[t])} in its kept set, {allowed}")


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: HeadTerms) -> Any:
        rows = hidden.index_select(0, terms.row_position.long())
        term_row, target = terms.term_row.long(), terms.term_target.long()
        counts = terms.sampling_mask_counts.long()
        sets = terms.sampling_mask.shape[0] > 0
        in_set = counts[term_row] > 0 if sets else None

        # The part over the vocabulary: all rows, or those without a set.
        some = sets and not terms.full
        dense_rows = (counts == 0).nonzero()[:, 0] if some else None
        dense_terms = (~in_set).nonzero()[:, 0] if some and in_set is not None else None
        dense = DenseRows(rows if dense_rows is None else rows[dense_rows], weight, bias, terms)
        if dense_rows is None or dense_terms is None:
            dense.slot, dense.target = term_row, target
        else:
            slot = (counts == 0).cumsum(0) - 1
            dense.slot, dense.target = slot[term_row[dense_terms]], target[dense_terms]
        lse, entropy_rows, z_target = dense.forward()
        full = z_target - lse[dense.slot]
        entropy = entropy_rows[dense.slot] if terms.entropy else None
        log_probs = full

        z = set_lse = set_entropy = pair = None
        if in_set is not None:
            sparse = SetRows(rows, weight, bias, terms)
            z, set_lse, set_entropy = sparse.forward()
            pair = sparse.find(term_row, target, in_set)
            alone = z[pair] - set_lse[term_row]
            if dense_terms is None:
                log_probs = torch.where(in_set, alone, full)
                entropy = torch.where(in_set, set_entropy[term_row], entropy) if entropy is not None else None
            else:
                log_probs = alone.index_copy(0, dense_terms, full)
                entropy = None if entropy is None else set_entropy[term_row].index_copy(0, dense_terms, entropy)
        ctx.terms, ctx.has_bias = terms, bias is not None
        ctx.save_for_backward(
            hidden, weight, bias, lse, entropy_rows, z, set_lse, set_entropy, pair, dense_rows, dense_terms
        )
        return log_probs, entropy, full.clone() if terms.full else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_entropy: Tensor | None, g_full: Tensor | None) -> Any:
        hidden, weight, bias, lse, entropy, z, set_lse, set_entropy, pair, dense_rows, dense_terms = ctx.saved_tensors
        terms: HeadTerms = ctx.terms
        g_entropy = g_entropy if terms.entropy else None
        g_full = g_full if terms.full else None
        term_row, target = terms.term_row.long(), terms.term_target.long()
        position, count = terms.row_position.long(), terms.row_position.shape[0]
        rows = hidden.index_select(0, position)
        d_rows = torch.zeros(rows.shape, dtype=lse.dtype, device=rows.device)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if ctx.needs_input_grad[2] else None

        # What of each gradient goes through the vocabulary and what through the sets.
        g_set, ge_set = g, None
        if z is not None:
            in_set = terms.sampling_mask_counts.long()[term_row] > 0
            g_set = torch.where(in_set, g, 0)
            ge_set = None if g_entropy is None else torch.where(in_set, g_entropy, 0)
            g = torch.where(in_set, 0, g)
            g_entropy = None if g_entropy is None else torch.where(in_set, 0, g_entropy)
        g = g if g_full is None else g + g_full

        dense = DenseRows(rows if dense_rows is None else rows[dense_rows], weight, bias, terms)
        if dense_rows is None:
            dense.slot, dense.target = term_row, target
        else:
            slot = (terms.sampling_mask_counts == 0).cumsum(0) - 1
            dense.slot, dense.target = slot[term_row[dense_terms]], target[dense_terms]
            g, g_entropy = g[dense_terms], None if g_entropy is None else g_entropy[dense_terms]
        part = dense.backward(g, g_entropy, lse, entropy, d_weight, d_bias)
        d_rows = part if dense_rows is None else d_rows.index_copy_(0, dense_rows, part)
        if z is not None:
            SetRows(rows, weight, bias, terms).backward(
                term_row, pair, g_set, ge_set, z, set_lse, set_entropy, d_rows, d_weight, d_bias
            )
        d_hidden = None
        if ctx.needs_input_grad[0]:
            # Several rows can share a position: their sum is float32 and in a fixed order.
            d_hidden = torch.zeros(hidden.shape, dtype=d_rows.dtype, device=hidden.device)
            d_hidden = add(d_hidden, position, d_rows).to(hidden.dtype) if count else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(weight.dtype), None
