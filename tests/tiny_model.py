"""A transformer small enough for a test: tree attention by the reference, the head on the rows, float64.

tree -> embedding + position -> 2 x (attention, feed-forward) -> logits of the R rows -> log-probs of the M terms
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from treepack.attention import reference

VOCABULARY, WIDTH, HEADS, LONGEST = 16, 8, 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, subtree_end: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(len(x), 3, HEADS, -1).unbind(1)
        x = x + self.out(reference.tree_attention(q, k, v, subtree_end).flatten(1))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Logits of the rows, (R, vocabulary)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor, subtree_end: Tensor, row_position: Tensor) -> Tensor:
        x = self.token(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = block(x, subtree_end)
        return self.head(x[row_position.long()])


def logits(model: nn.Module, tree: Any) -> Tensor:
    """What the model gives for a tree, on the host or moved."""
    tree = tree.to("cpu")
    return model(tree.input_ids, tree.position_ids, tree.subtree_end, tree.row_position)


def loss_sum(model: nn.Module, tree: Any) -> Tensor:
    """Sum over the terms of -advantage x log-prob. Not divided: whoever knows all terms does that."""
    return terms_loss(logits(model, tree), tree)


def terms_loss(rows: Tensor, tree: Any) -> Tensor:
    tree = tree.to("cpu")
    log_probs = functional.log_softmax(rows, -1)[tree.term_row.long(), tree.term_target.long()]
    return -(log_probs * tree.terms["advantage"].double()).sum()


def alone(model: nn.Module, samples: list[dict[str, Any]]) -> tuple[list[Tensor], int]:
    """Gradients of the mean over all terms with every sample run by itself, without treepack; number of terms."""
    model.zero_grad()
    terms = sum(sum(sample["completion_mask"][1:]) for sample in samples)
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])
        n = len(ids)
        rows = model(ids, torch.arange(n), torch.full((n,), n), torch.arange(n - 1))
        log_probs = functional.log_softmax(rows, -1).gather(1, ids[1:, None])[:, 0]
        trained = torch.tensor(sample["completion_mask"][1:], dtype=torch.float64)
        (-(log_probs * trained).sum() * sample["advantage"] / terms).backward()
    return [parameter.grad.clone() for parameter in model.parameters()], terms
