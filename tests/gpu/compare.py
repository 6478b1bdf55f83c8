"""Inputs on the GPU, and both rules of `attention/tolerance.py` against the float64 reference.

Eager is the reference itself without upcasting.
"""

from __future__ import annotations

import random

import forests
import torch
from torch import Tensor

from treepack.attention import reference, tree_attention
from treepack.attention.tolerance import complaints

LABELS = ("out", "lse", "dq", "dk", "dv", "dsinks")


def tree(nests, padding: int = 0) -> Tensor:
    """subtree_end of nests on the GPU, int32."""
    return torch.from_numpy(forests.layout(nests, padding=padding).subtree_end).cuda()


def random_tree(tokens: int, seed: int = 0, padding: int = 0) -> Tensor:
    return tree(forests.random_nests(random.Random(1000 * seed + tokens), tokens), padding)


def leaves(
    n: int,
    heads: int,
    kv_heads: int,
    size: int,
    dtype=torch.bfloat16,
    layout: str = "columns",
    seed: int = 0,
    queries: int | None = None,
    values: int | None = None,
) -> list[Tensor]:
    """q, k, v as (1, H, N, D) leaves that require gradients, in one of the layouts that callers have; q of the last
    `queries` rows alone, v of another head size where `values` says so.

    columns: transposed views of (1, N, H, D), as Hugging Face gives them; rows: contiguous; fused: slices of one (1,
        N, H + 2 H_kv, D) projection;
    strided: head size not innermost; misaligned: columns, one element off a 16-byte boundary; latent: rows, and the
        values beside something else of their head, which is NaN here.
    """
    g = torch.Generator("cuda").manual_seed(seed)
    counts, sizes = (heads, kv_heads, kv_heads), (size, size, values or size)
    rows = (n if queries is None else queries, n, n)
    given = list(zip(counts, rows, sizes, strict=True))
    if layout == "fused":
        whole = torch.randn(1, n, sum(counts), size, generator=g, device="cuda", dtype=dtype)
        found = [x.transpose(1, 2) for x in whole.split(counts, dim=2)]
    elif layout in ("rows", "strided"):
        shapes = [(1, h, d, n) if layout == "strided" else (1, h, n, d) for h, n, d in given]
        found = [torch.randn(shape, generator=g, device="cuda", dtype=dtype) for shape in shapes]
        found = [x.transpose(2, 3) for x in found] if layout == "strided" else found
    elif layout == "latent":
        found = [torch.randn(1, h, n, d, generator=g, device="cuda", dtype=dtype) for h, n, d in given]
        beside = torch.full((1, n, kv_heads, 64 + sizes[2]), torch.nan, device="cuda", dtype=dtype)
        beside[..., 64:] = found[2].transpose(1, 2)
        found[2] = beside[..., 64:].transpose(1, 2)
    else:
        skip = 1 if layout == "misaligned" else 0
        flat = [torch.randn(n * h * d + skip, generator=g, device="cuda", dtype=dtype) for h, n, d in given]
        found = [x[skip:].view(1, n, h, d).transpose(1, 2) for x, (h, n, d) in zip(flat, given, strict=True)]
    return [x.requires_grad_() for x in found]


def evaluate(attention, tensors: list[Tensor], seed: int = 1, with_lse: bool = True) -> list[Tensor]:
    """[out, lse, gradients of tensors] of a function of the tensors that returns (out, lse)."""
    out, lse = attention(*tensors)
    g = torch.Generator("cuda").manual_seed(seed)

    def weights(x):
        # Stored as (1, N, H, D), like the gradient that a model sends back.
        shape = [x.shape[i] for i in (0, 2, 1, 3)] if x.dim() == 4 else x.shape
        values = torch.randn(shape, generator=g, device="cuda", dtype=torch.float32).to(x.dtype)
        return values.transpose(1, 2) if x.dim() == 4 else values

    loss = (out * weights(out)).sum()
    if with_lse:
        loss = loss + (lse * weights(lse)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)]


def check(end: Tensor, tensors: list[Tensor], impl: str = "triton", sinks: bool = False, **options) -> list[Tensor]:
    """Asserts both rules for output, lse and every gradient; returns what the implementation gave."""
    n_real = int((end > torch.arange(len(end), device="cuda")).sum())
    with_lse = options.pop("with_lse", True)
    if sinks:
        g = torch.Generator("cuda").manual_seed(7)
        tensors = [*tensors, torch.randn(tensors[0].shape[1], generator=g, device="cuda").requires_grad_()]

    def call(function, **fixed):
        def attention(q, k, v, s=None):
            return function(q, k, v, sinks=s, return_lse=True, **options, **fixed)

        return attention

    ours = evaluate(call(tree_attention, subtree_end=end, impl=impl), tensors, with_lse=with_lse)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = evaluate(call(reference.tree_attention, subtree_end=end), wide, with_lse=with_lse)
    eager = evaluate(call(reference.tree_attention, subtree_end=end, upcast=False), tensors, with_lse=with_lse)
    for label, a in zip(LABELS, ours, strict=False):
        if a.dim() == 4:
            padding = len(end) - n_real  # at the end
            assert padding == 0 or (a[:, :, -padding:] == 0).all(), f"{label}: padding rows are not 0"
    report = complaints(LABELS, ours, want, eager)
    assert not report, "; ".join(report)
    return ours
