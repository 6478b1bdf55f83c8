"""The part of the LM head over the vocabulary: blocks of rows and ids, forward and backward.

On CUDA one Triton pass over each block of logits takes the softmax sums, and one makes their gradient
(`triton.py`); float64 and other devices take the same steps in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .terms import HeadTerms, accumulator, add, product

#: Logits that exist at one time, 2^27: 512 MiB in float32, and half of it again in bfloat16 for the matrix products.
CHUNK_LOGITS = 2**27
#: Rows of one block; with more rows than this the blocks of the vocabulary stop getting narrower.
CHUNK_ROWS = 2**15
#: False takes the steps in torch on CUDA too: for comparisons.
FUSED = True


def _lowest(terms: HeadTerms, dtype: torch.dtype) -> float:
    """What stands for a bias of -inf, which takes an id out: infinities would meet zeros in the sums. After scale and
    temperature this is about -1e30, whose exp is 0 and whose product with 0 is."""
    lowest = 1e30 * float(terms.temperature) / (abs(float(terms.scale)) or 1.0)
    return -min(max(lowest, 1e10), torch.finfo(dtype).max / 4)


class DenseRows:
    """Rows normalised over the vocabulary, block by block."""

    slot: Tensor  # (M',) row of each term, counted among these rows
    target: Tensor  # (M',)

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, terms: HeadTerms):
        self.rows, self.weight, self.terms = rows, weight, terms
        self.dtype = accumulator(rows.dtype)
        self.bias = self.removed = None
        if bias is not None:
            self.removed = bias == -torch.inf
            self.bias = bias.to(self.dtype).masked_fill(self.removed, _lowest(terms, self.dtype))
        self.fused = FUSED and rows.is_cuda and self.dtype == torch.float32
        # In torch, entropy and softcap keep a second copy of the logits.
        twice = not self.fused and (terms.entropy or terms.softcap)
        budget = CHUNK_LOGITS // 2 if twice else CHUNK_LOGITS
        n = rows.shape[0]
        self.row_chunk = max(1, min(n, CHUNK_ROWS))
        self.block = max(1, min(weight.shape[0], budget // self.row_chunk))
        if self.block > 128:
            self.block -= self.block % 128

    def spans(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        n, vocabulary = self.rows.shape[0], self.weight.shape[0]
        rows = [(a, min(a + self.row_chunk, n)) for a in range(0, n, self.row_chunk)]
        return rows, [(a, min(a + self.block, vocabulary)) for a in range(0, vocabulary, self.block)]

    def logits(self, rows: slice, ids: slice) -> Tensor:
        """Raw logits of a block, a fresh tensor in the accumulator's dtype."""
        logits = product(self.rows[rows], self.weight[ids].T, self.dtype)
        if self.bias is not None:
            logits += self.bias[ids]
        return logits

    def cells(self, rows: slice, ids: slice) -> tuple[Tensor, Tensor]:
        """Flat index of each term's target in a block (0 where it lies outside), and whether it lies inside."""
        inside = (self.target >= ids.start) & (self.target < ids.stop)
        if len(self.spans()[0]) > 1:
            inside &= (self.slot >= rows.start) & (self.slot < rows.stop)
        index = (self.slot - rows.start) * (ids.stop - ids.start) + self.target - ids.start
        return torch.where(inside, index, 0), inside

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """(lse of each row, entropy of each row or empty, z of each term's target: NaN if there is no such id)."""
        n = self.rows.shape[0]
        lse = torch.zeros(n, dtype=self.dtype, device=self.rows.device)
        entropy = torch.zeros_like(lse if self.terms.entropy else lse[:0])
        target = torch.full(self.slot.shape, torch.nan, dtype=self.dtype, device=self.rows.device)
        row_spans, id_spans = self.spans()
        for r in (slice(*span) for span in row_spans):
            top = torch.full_like(lse[r], -torch.inf)
            total, weighted = torch.zeros_like(top), torch.zeros_like(top)
            for v in (slice(*span) for span in id_spans):
                logits = self.logits(r, v)
                index, inside = self.cells(r, v)
                target = torch.where(inside, logits.view(-1)[index], target)
                self.add_sums(logits, top, total, weighted)
                del logits
            lse[r] = top + total.log()
            if self.terms.entropy:
                entropy[r] = lse[r] - weighted / total
        if self.removed is not None:
            target.masked_fill_(self.removed[self.target.clamp(0, self.weight.shape[0] - 1)], -torch.inf)
        return lse, entropy, self.terms.shaped(target)

    def add_sums(self, logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor) -> None:
        """Bring the running maximum, sum of exp and sum of z exp of each row up to date with one more block."""
        if self.fused:
            from .triton import add_sums

            t = self.terms
            add_sums(logits, top, total, weighted, t.scale, t.softcap or 0.0, t.temperature, t.entropy)
            return
        z = self.terms.shaped(logits)
        higher = torch.maximum(top, z.amax(1))
        shrink = torch.exp(top - higher)
        if self.terms.entropy:
            e = torch.exp(z - higher[:, None])
            weighted.mul_(shrink).add_(torch.bmm(e[:, None, :], z[:, :, None]).view(-1))
        else:
            e = z.sub_(higher[:, None]).exp_()
        total.mul_(shrink).add_(e.sum(1))
        top.copy_(higher)

    def backward(
        self,
        g: Tensor,
        g_entropy: Tensor | None,
        lse: Tensor,
        entropy: Tensor,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
    ) -> Tensor:
        """The gradient of the rows; writes that of the weight and adds that of the bias."""
        g = g.to(self.dtype)
        d_rows = torch.zeros(self.rows.shape, dtype=self.dtype, device=self.rows.device)
        # (gradient of each row's lse, of its entropy or None, and of each term's target)
        g_lse = add(torch.zeros_like(lse), self.slot, -g)
        if g_entropy is not None:
            g_entropy = add(torch.zeros_like(lse), self.slot, g_entropy.to(self.dtype))
        gradient = (self.fused_gradient if self.fused else self.torch_gradient)(g, g_lse, g_entropy, lse, entropy)
        row_spans, id_spans = self.spans()
        for v in (slice(*span) for span in id_spans):
            block = self.weight[v]
            d_block = None
            for r in (slice(*span) for span in row_spans):
                dz = gradient(r, v)
                if d_bias is not None:
                    d_bias[v] += dz.sum(0, dtype=self.dtype)
                dz = dz.to(block.dtype)
                d_rows[r] += product(dz, block, self.dtype)
                if d_weight is not None and len(row_spans) == 1:
                    torch.mm(dz.T, self.rows[r], out=d_weight[v])
                elif d_weight is not None:
                    piece = product(dz.T, self.rows[r], self.dtype)
                    d_block = piece if d_block is None else d_block.add_(piece)
                del dz
            if d_weight is not None and d_block is not None:
                d_weight[v] = d_block
        return d_rows

    def torch_gradient(
        self, g: Tensor, g_lse: Tensor, g_entropy: Tensor | None, lse: Tensor, entropy: Tensor
    ) -> Callable[[slice, slice], Tensor]:
        """A function of (rows, ids) to the gradient of the raw logits of that block."""

        def make(r: slice, v: slice) -> Tensor:
            z = self.terms.shaped(self.logits(r, v))
            raw = z.clone() if self.terms.softcap else z
            if g_entropy is None:
                dz = z.sub_(lse[r, None]).exp_().mul_(g_lse[r, None])
            else:
                over = z - (lse[r] - entropy[r])[:, None]
                over.mul_(-g_entropy[r, None]).add_(g_lse[r, None])
                dz = z.sub_(lse[r, None]).exp_().mul_(over)
            index, inside = self.cells(r, v)
            add(dz.view(-1), index, torch.where(inside, g, 0))
            return self.terms.unshaped(dz, raw)

        return make

    def fused_gradient(
        self, g: Tensor, g_lse: Tensor, g_entropy: Tensor | None, lse: Tensor, entropy: Tensor
    ) -> Callable[[slice, slice], Tensor]:
        """The same in one pass over the block, in the weight's dtype; the terms are sorted by row, once."""
        from .triton import logit_gradient

        slot, order = self.slot.sort(stable=True)
        bounds = torch.searchsorted(slot, torch.arange(self.rows.shape[0] + 1, device=slot.device))
        target, g = self.target[order].contiguous(), g[order].contiguous()
        t = self.terms

        def make(r: slice, v: slice) -> Tensor:
            return logit_gradient(
                self.logits(r, v),
                self.weight.dtype,
                lse[r],
                g_lse[r],
                entropy[r] if t.entropy else None,
                None if g_entropy is None else g_entropy[r],
                bounds[r.start : r.stop + 1],
                target,
                g,
                v.start,
                t.scale,
                t.softcap or 0.0,
                t.temperature,
            )

        return make
