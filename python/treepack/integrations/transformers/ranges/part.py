"""RangePart: one range of a tree, as the loop of a user sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....distributed.rows import Rows
from ....logprobs.temperatures import temperature_of
from ....tree.ranges import Range
from ..logprobs import Head, check_options

__all__ = ["RangePart"]


class RangePart:
    """One range: its log-probs, its columns, its backward pass.

    Terms belong to the range in which their position lies, so each is in one range. `term_index` says which terms of
    the tree they are.
    """

    def __init__(self, run: Any, index: int, rows: Rows, waits: bool):
        self._run = run  # the `Pass` that it is of, whose file imports this one
        self._rows = rows
        self.index = index
        """Its number among the ranges of the tree."""
        self.waits = waits
        """Whether later ranges need it; then `backward` is done when the last of these is."""
        self._anchor: Tensor | None = None
        self._ran = self._closed = self._with_gradients = False

    # --- what is in it ---

    @property
    def range(self) -> Range:
        """Its rows, and those above it."""
        return self._rows.where

    @property
    def num_tokens(self) -> int:
        return self._rows.num_tokens

    @property
    def num_terms(self) -> int:
        return self._rows.num_terms

    @property
    def term_index(self) -> Tensor:
        """(m,) int64: its terms among those of the tree; m may be 0."""
        return self._rows.term_index

    @property
    def term_sample(self) -> Tensor:
        """(m,) int32: sample of each term, as place in the tree's `sample_index`."""
        return self._rows.term_sample

    @property
    def terms(self) -> Mapping[str, Tensor]:
        """Columns per loss term, (m, ...)."""
        return self._rows.terms

    @property
    def row_position(self) -> Tensor:
        """(r,) int32: of each row, the place among the positions of the range; for a value head on `hidden_states`."""
        return self._rows.row_position

    @property
    def term_row(self) -> Tensor:
        """(m,) int32: row of each term, counted from the first row of the range."""
        return self._rows.term_row

    # --- what is done with it ---

    def term_log_probs(
        self,
        *,
        temperature: float | Tensor | Sequence[float] = 1.0,
        entropy: bool = False,
        full_log_probs: bool = False,
        hidden_states: bool = False,
        head: Head | None = None,
    ) -> Any:
        """Log-probs of its terms, (m,), or `TermLogProbs`: `treepack.term_log_probs` of this range, once.

        Raises:
            ValueError: a range that is not the present one, one that has run, or what `term_log_probs` refuses.
        """
        heat = temperature_of(self._run.tree, temperature)
        check_options(head, heat, entropy or full_log_probs)
        with self._run.step(self):
            if self._ran:
                raise ValueError(
                    f"{self._name} has run: a range runs once, so ask for all that you need in one call "
                    "(entropy=True, hidden_states=True, ...)"
                )
            hidden, values = self._run.forward(
                self, head=head, temperature=heat, entropy=entropy, full_log_probs=full_log_probs
            )
        if entropy or full_log_probs or hidden_states:
            return values._replace(hidden_states=hidden if hidden_states else None)
        return values.log_probs

    def backward(self, loss: Tensor | None = None) -> None:
        """The backward pass of this range: now, or where later ranges need it, after theirs.

        Args:
            loss: a scalar made of this range's log-probs; None: it has no loss of its own, but later ranges may need
                it. Gradients are added up in the parameters as by `loss.backward()`.

        Raises:
            ValueError: a range that is not the present one or has had its backward pass, or a loss that is none.
        """
        with self._run.step(self):
            if self._closed:
                raise ValueError(f"{self._name} has had its backward: it is called once for each range")
            if loss is not None:
                self._check_loss(loss)
            if not self._ran:
                self._run.forward(self, entropy=False, full_log_probs=False)
            if not self._with_gradients:
                raise ValueError(f"{self._name} ran without gradients (torch.no_grad): nothing leads back through it")
            self._closed = True
            self._run.close(self, loss)

    def __repr__(self) -> str:
        start, stop, ancestors = self.range
        return f"RangePart({self.index}: rows {start} to {stop}, {len(ancestors)} ancestors, {self.num_terms} terms)"

    # --- inside ---

    @property
    def _name(self) -> str:
        return f"range {self.index} of {self._run.count}"

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            has = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"{self._name}: its loss is {has}; a tensor of one number is needed, or None for no loss")
        if not self._ran:
            raise ValueError(f"{self._name}: it has a loss but has not run; make the loss of part.term_log_probs()")
        if self._with_gradients and not loss.requires_grad and self.num_terms:
            raise ValueError(
                f"{self._name}: its loss does not depend on its log-probs (requires_grad is False); part.backward() "
                "without a loss says that it has none"
            )

    def _done(self) -> bool:
        """Whether the next range may run."""
        return self._closed or (self._ran and not self._with_gradients)


class Seal(torch.autograd.Function):
    """The hidden states of a range, through which only its own backward pass may go, and an anchor: a number from which
    that pass goes where the loss depends on nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, part: RangePart) -> tuple[Tensor, Tensor]:
        ctx.part, ctx.shape = part, hidden.shape
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden), hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, of_anchor: Tensor | None) -> Any:
        part: RangePart = ctx.part
        running = part._run.running
        if running is part:
            if g is None and of_anchor is not None:
                g = of_anchor.new_zeros(ctx.shape)
            return g, None
        if running is None:
            raise ValueError(
                f"{part._name}: its loss went backward by itself, past the ranges that it belongs with; call "
                "part.backward(loss) in place of loss.backward()"
            )
        raise ValueError(
            f"{part._name}: the loss of {running._name} goes back through it; every range has a loss of its own, so "
            "sums for the log are made of loss.detach()"
        )
