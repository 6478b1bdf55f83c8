"""The part of the LM head with kept sets: only the T (row, id) pairs get a logit, `CHUNK_IDS` products at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .terms import HeadTerms, accumulator, add

#: Elements of a gathered (kept ids, h) table, 2^25: 128 MiB in float32.
CHUNK_IDS = 2**25
#: Ids of one block of the weight's gradient.
SET_BLOCK = 2**14


class SetRows:
    """Rows normalised over their kept set: only the T (row, id) pairs get a logit."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, terms: HeadTerms):
        self.rows, self.weight, self.bias, self.terms = rows, weight, bias, terms
        self.dtype = accumulator(rows.dtype)
        self.counts, self.ids = terms.sampling_mask_counts.long(), terms.sampling_mask.long()
        every = torch.arange(rows.shape[0], device=rows.device)
        self.row = torch.repeat_interleave(every, self.counts, output_size=self.ids.shape[0])
        self.chunk = max(1, CHUNK_IDS // max(1, rows.shape[1]))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """(z of each pair, lse of each row, entropy of each row); 0 for rows without a set."""
        logits = torch.empty(self.ids.shape[0], dtype=self.dtype, device=self.ids.device)
        for at in range(0, self.ids.shape[0], self.chunk):
            s = slice(at, at + self.chunk)
            products = self.rows[self.row[s]].to(self.dtype) * self.weight[self.ids[s]].to(self.dtype)
            logits[s] = products.sum(1)
        if self.bias is not None:
            logits += self.bias[self.ids]
        z = self.terms.shaped(logits)
        top = torch.full_like(self.counts, -torch.inf, dtype=self.dtype).scatter_reduce(0, self.row, z, "amax")
        top = torch.where(top > -torch.inf, top, 0)  # rows without a set, or with nothing but -inf
        e = torch.exp(z - top[self.row])
        total = add(torch.zeros_like(top), self.row, e)
        total = torch.where(self.counts > 0, total, 1)
        lse = top + total.log()
        entropy = lse - add(torch.zeros_like(top), self.row, torch.where(e > 0, e * z, 0)) / total
        return z, lse, torch.where(self.counts > 1, entropy, 0)

    def find(self, term_row: Tensor, target: Tensor, in_set: Tensor) -> Tensor:
        """The pair of each term: its target within the set of its row. 0 for terms of rows without a set."""
        vocabulary = self.weight.shape[0]
        keys, order = (self.row * vocabulary + self.ids).sort()
        wanted = term_row * vocabulary + target
        place = torch.searchsorted(keys, wanted).clamp_(max=keys.shape[0] - 1)
        lost = ((keys[place] != wanted) & in_set).nonzero()[:, 0]
        if lost.numel():
            m = int(lost[0])
            raise ValueError(f"term {m} has the target {int(target[m])}, which is not in the kept set of its row")
        return torch.where(in_set, order[place], 0)

    def backward(
        self,
        term_row: Tensor,
        pair: Tensor,
        g: Tensor,
        g_entropy: Tensor | None,
        z: Tensor,
        lse: Tensor,
        entropy: Tensor,
        d_rows: Tensor,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
    ) -> None:
        """Adds to the gradients of the rows, the weight and the bias."""
        g = g.to(self.dtype)
        over = add(torch.zeros_like(lse), term_row, -g)[self.row]
        p = torch.exp(z - lse[self.row])
        if g_entropy is not None:
            g_rows = add(torch.zeros_like(lse), term_row, g_entropy.to(self.dtype))
            # z is -inf where a bias takes an id out: p (z - lse + H) is 0 there.
            over = over - g_rows[self.row] * torch.where(p > 0, z - (lse - entropy)[self.row], 0)
        dz = add(p.mul_(over), pair, g)
        # A set of one id gives no choice: exactly 0, whatever the order of the sums.
        dz = torch.where(self.counts[self.row] == 1, 0, dz)
        dz = self.terms.unshaped(dz, z)
        for at in range(0, self.ids.shape[0], self.chunk):
            s = slice(at, at + self.chunk)
            add(d_rows, self.row[s], dz[s, None] * self.weight[self.ids[s]].to(self.dtype))
        if d_bias is not None:
            add(d_bias, self.ids, dz)
        if d_weight is None:
            return
        # By blocks of ids, so that the float32 sums of a block are small and rounded once.
        ids, order = self.ids.sort(stable=True)
        vocabulary = self.weight.shape[0]
        starts = list(range(0, vocabulary, SET_BLOCK))
        cuts = torch.searchsorted(ids, torch.tensor([*starts, vocabulary], device=ids.device)).tolist()
        for start, a, b in zip(starts, cuts, cuts[1:], strict=False):
            if a == b:
                continue
            block = d_weight[start : start + SET_BLOCK]
            total = block.to(self.dtype, copy=True)
            for at in range(a, b, self.chunk):
                pairs = order[at : min(at + self.chunk, b)]
                add(total, self.ids[pairs] - start, dz[pairs, None] * self.rows[self.row[pairs]].to(self.dtype))
            block.copy_(total)
