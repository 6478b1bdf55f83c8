"""A small transformer in plain torch, run once on packed trees and once on each sample alone.

Packed it attends through `treepack.attention.reference`, alone through torch's causal attention: the two runs share the
weights and nothing else that could hide a mistake. Shapes: N tokens, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import treepack
from treepack.attention.reference import tree_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (N, H, D), k and v (N, G, D) -> (N, H, D)


def rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotary embedding of (N, heads, D) by position: the depth in the sample, not the place in the packed row."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = (position_ids[:, None] * frequencies)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class Block(nn.Module):
    """Pre-norm attention with grouped heads, and a gated MLP."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], dim=1)
        mixed = attention(rotate(q, position_ids), rotate(k, position_ids), v)
        x = x + self.out(mixed.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Transformer(nn.Module):
    """Token ids and positions (N,) to hidden states (N, width); `head` makes logits of the rows that need them."""

    def __init__(self, vocab_size: int, width: int = 64, heads: int = 4, key_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, position_ids, attention)
        return self.norm(x)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention over one sample."""
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def packed_log_probs(model: Transformer, packed: treepack.Packed) -> list[tuple[int, Tensor]]:
    """(sample, log-probs of its terms) of all samples, each shared token forwarded once."""
    out: list[tuple[int, Tensor]] = []
    for tree in packed:
        on_device = tree.to("cpu")

        def attention(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor = on_device.subtree_end) -> Tensor:
            return tree_attention(q, k, v, subtree_end)

        hidden = model(on_device.input_ids, on_device.position_ids, attention)
        rows = model.head(hidden[on_device.row_position.long()]).log_softmax(-1)
        terms = rows[on_device.term_row.long(), on_device.term_target.long()]
        out += zip(tree.sample_index.tolist(), tree.unpack_terms(terms), strict=True)
    return out


def alone_log_probs(model: Transformer, sample: dict[str, Any]) -> Tensor:
    """Log-probs of the trained tokens of one sample; the first token has no predecessor and is never one."""
    input_ids = torch.as_tensor(sample["input_ids"])
    hidden = model(input_ids, torch.arange(len(input_ids)), causal_attention)
    targets = 1 + torch.as_tensor(sample["completion_mask"])[1:].nonzero()[:, 0]
    return model.head(hidden[targets - 1]).log_softmax(-1)[torch.arange(len(targets)), input_ids[targets]]


@dataclass
class Comparison:
    """Rows of (name, packed, alone, largest difference): sums of log-probs, and norms of gradients."""

    raw_tokens: int
    packed_tokens: int
    trees: int
    log_probs: list[tuple[str, float, float, float]]
    gradients: list[tuple[str, float, float, float]]

    @property
    def largest_difference(self) -> float:
        """Over all log-probs and all entries of all gradients; NaN counts as infinite."""
        differences = [row[3] for row in self.log_probs + self.gradients]
        return max(difference if difference == difference else float("inf") for difference in differences)


def compare(samples: list[dict[str, Any]], *, max_tokens: int, vocab_size: int, seed: int = 0) -> Comparison:
    """Run both ways with the loss -sum(advantage * log-prob) and compare every log-prob and every gradient.

    Args:
        samples: dicts with `input_ids`, `completion_mask`, `advantage`; each with at least one trained token.
        max_tokens: budget of a tree.
        vocab_size: ids are below it.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model = Transformer(vocab_size).double()
    packed = treepack.pack(samples, max_tokens=max_tokens)
    advantages = [sample["advantage"] for sample in samples]

    def gradients(log_probs: list[Tensor]) -> list[Tensor]:
        loss = -sum(advantage * values.sum() for advantage, values in zip(advantages, log_probs, strict=True))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    packed_values = [values for _, values in sorted(packed_log_probs(model, packed), key=lambda item: item[0])]
    alone_values = [alone_log_probs(model, sample) for sample in samples]
    names = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    stats, indexes = packed.stats, map(str, range(len(samples)))
    return Comparison(
        stats.raw_tokens,
        stats.packed_tokens,
        stats.trees,
        log_probs=side_by_side(indexes, packed_values, alone_values, torch.sum),
        gradients=side_by_side(names, gradients(packed_values), gradients(alone_values), torch.linalg.vector_norm),
    )


def side_by_side(
    names: Iterable[str], packed: list[Tensor], alone: list[Tensor], reduce: Callable[[Tensor], Tensor]
) -> list[tuple[str, float, float, float]]:
    """Rows of (name, packed, alone, largest difference); `reduce` makes one number of each tensor, for show."""
    rows = []
    for name, a, b in zip(names, packed, alone, strict=True):
        a, b = a.detach(), b.detach()
        rows.append((name, float(reduce(a)), float(reduce(b)), float((a - b).abs().max())))
    return rows
