"""RangeRunner: the ranges of a tree in depth-first order, and which of them wait.

    stack    ranges that are done but for their backward pass: later ranges need their keys and values
    after each range, those on top of the stack that the next one does not need run their backward pass

A range that waits keeps its graph, whose tensors lie in host memory meanwhile (`host`), and the keys and values of the
rows that others need.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....attention import TRITON, TreeTiles
from ....distributed.rows import Blank, Rows, terms_by_range
from ....logprobs.api import TermLogProbs
from ....logprobs.temperatures import Temperature
from ....tree.ranges import Range
from ....tree.tree import PackedTree
from ..capture import Capture
from ..checks.leaks import check_leaks
from ..checks.model import check_model
from ..checks.tree import check_ids, check_ranges, check_tree
from ..forward import forward_inputs
from ..logprobs import Head, head_of
from ..mixers import is_mixer
from ..model import call_inputs, decoder_of
from .gradients import Gradients
from .host import Host
from .keys import Chain, RangeKeys
from .part import RangePart, Seal

__all__ = ["Pass", "RangeRunner"]

#: Devices whose memory is not the host's.
_OFFLOADED = ("cuda",)


class RangeRunner:
    """Runs a tree of `treepack.pack(..., cut=True)` range by range; every token passes every layer once.

        for part in RangeRunner(model, tree):
            log_probs = part.term_log_probs()
            loss = -(log_probs * part.terms["advantage"]).sum() / terms
            part.backward(loss)

    The gradients are those of the whole tree under the sum of the losses. Each part is run and its `backward` called
    before the next one is asked for; under `torch.no_grad()` there is no backward. Gradients of several ranks (DDP,
    FSDP2) are added up at the end of the last part's `backward`.
    """

    def __init__(
        self,
        model: Any,
        tree: PackedTree[Tensor],
        *,
        impl: str | None = None,
        sync: bool = True,
        offload: bool = True,
        model_check: bool = True,
    ):
        """
        Args:
            model: a causal language model as `treepack.term_log_probs` takes it.
            tree: on the device of the model; one that is not cut is one range.
            impl: implementation of the attention: "triton", "triton_plain", "gluon" or "reference"; None: by device.
            model_check: False leaves out the two tiny samples that a model's first use is checked on.
            sync: whether this tree is the last of the step, after which gradients of several ranks are added up.
            offload: whether what a range that waits keeps lies in pinned host memory meanwhile (on a GPU).

        Raises:
            ValueError: a model that `check_model` refuses, that is compiled, or whose wrapper cannot run ranges.
            TypeError: not one tree, or one that is still on the host.
        """
        self._inner = check_model(model)
        stateful = next((type(m).__name__ for m in decoder_of(self._inner).modules() if is_mixer(type(m))), None)
        if stateful is not None:
            raise ValueError(
                f"{type(self._inner).__name__} has layers that carry a state ({stateful}), which does not go from "
                "range to range; pack without cut"
            )
        if Capture.compiled(model):
            raise ValueError(
                f"{type(self._inner).__name__} is compiled (torch.compile); keys and values that go from range to "
                "range pass its graph by: run ranges on the model that is not"
            )
        if impl not in (None, "reference", *TRITON):
            raise ValueError(
                f"impl={impl!r} takes whole forests; ranges run by {', '.join(map(repr, TRITON))} or 'reference'"
            )
        check_tree(self._inner, tree, by_range=True)
        if not isinstance(tree.buffer, Tensor):
            raise TypeError("the tree holds NumPy arrays: move it to the model's device first, tree.to(device)")
        check_ranges(self._inner, tree, parts=len(tree.cu_ranges) - 1, instead="pack without cut")
        check_ids(self._inner, tree)
        self._gradients = Gradients(model)
        if model_check:
            check_leaks(model, self._inner, tree)
        self.model, self.tree = model, tree
        self._impl, self._sync, self._offload = impl, sync, offload
        self.ranges: list[Range] = tree.ranges
        """The ranges, in the order in which they run."""

    def __len__(self) -> int:
        return len(self.ranges)

    def __iter__(self) -> Iterator[RangePart]:
        """The parts, one after the other; from the start each time.

        Raises:
            ValueError: the part before has not run, or its backward was not called.
        """
        return Pass(self).parts()

    def __repr__(self) -> str:
        return f"RangeRunner({type(self._inner).__name__}, {self.tree.num_tokens} tokens in {len(self)} ranges)"


class Pass:
    """One pass over all ranges."""

    def __init__(self, runner: RangeRunner):
        self._runner, self._inner, self.count, self.tree = runner, runner._inner, len(runner), runner.tree
        self._gradients = runner._gradients
        self._versions = self._parameter_versions()
        self._device = runner.tree.buffer.device
        self._present: RangePart | None = None
        self.running: RangePart | None = None
        self._waiting: list[tuple[RangePart, Tensor | None, Chain]] = []
        self._chain: Chain | None = None
        self._with_gradients: bool | None = None
        self._host: Host | None = None
        self._trouble = False  # something was refused or broke off, and has been said

    def parts(self) -> Iterator[RangePart]:
        runner, ranges = self._runner, self._runner.ranges
        terms = terms_by_range(runner.tree, runner.tree.cu_ranges)
        self._gradients.begin()
        try:
            for index, where in enumerate(ranges):
                rows = Rows(runner.tree, where, terms[index])
                self._chain = self._chain_of(index)
                self._present = RangePart(self, index, rows, waits=self._chain is not None)
                yield self._present
                if not self._present._done():
                    what = "part.backward(loss)" if self._present._ran else "part.term_log_probs()"
                    raise ValueError(f"{self._present._name}: {what} was not called before the next range")
                if not self._present._closed:  # without gradients
                    self._settle(index, self._present, None)
        except GeneratorExit:
            part = self._present
            # The last part's backward ends all there is to do, also where the loop does not come back.
            if part is not None and not self._trouble and not (part._done() and part.index == self.count - 1):
                warnings.warn(
                    f"the loop over ranges ended at {part._name}: gradients are those of a part of the tree",
                    stacklevel=2,
                )
            raise
        finally:
            # The graph of a part leads back to it.
            for part in filter(None, (self._present, *(part for part, _, _ in self._waiting))):
                part._anchor = None
            self._present = None
            self._waiting.clear()

    @contextmanager
    def step(self, part: RangePart) -> Iterator[None]:
        """A step of the present part."""
        self._trouble = True
        self._check_present(part)
        yield
        self._trouble = False

    def _check_present(self, part: RangePart) -> None:
        if part is not self._present:
            now = "the loop has ended" if self._present is None else f"{self._present._name} is the present one"
            raise ValueError(f"{part._name} is not at its turn: {now}, and ranges run in their order")
        if self._runner.tree.buffer.device != self._device:
            raise ValueError(f"the tree was moved from {self._device} while its ranges ran")
        if self._versions != self._parameter_versions():
            raise ValueError(
                f"{part._name}: parameters of the model have changed since the first range, whose keys and values are "
                "of the old ones; call optimizer.step() after the loop"
            )

    def forward(
        self, part: RangePart, head: Head | None = None, temperature: Temperature = 1.0, **options: bool
    ) -> tuple[Tensor, TermLogProbs]:
        """Hidden states (n, h) of the present range and what the head makes of them."""
        if self._with_gradients not in (None, torch.is_grad_enabled()):
            now = "on" if torch.is_grad_enabled() else "off"
            raise ValueError(
                f"{part._name}: gradients are {now}, and were not so for the first range; torch.no_grad() stands "
                "around the whole loop or nowhere"
            )
        self._with_gradients = part._with_gradients = torch.is_grad_enabled()
        part._ran = True
        tiles, padding = part._rows.tiles()
        keys = RangeKeys(self._above(part.range), padding, self._chain)
        with self._keeping(part):
            hidden = self._hidden(self._gradients.model, part._rows, tiles, keys, own_head=head is not None)
            if hidden.requires_grad:
                hidden, part._anchor = Seal.apply(hidden, part)
            return hidden, head_of(self._inner, hidden, part._rows, head, temperature, **options)

    def _keeping(self, part: RangePart) -> AbstractContextManager[None]:
        """Around the forward pass of a range: where what it saves lies until its backward pass."""
        if not (part.waits and part._with_gradients and self._runner._offload and self._device.type in _OFFLOADED):
            return nullcontext()
        if self._host is None:
            self._host = Host(self._device, self._inner.parameters())
        return self._host.keeps()

    def close(self, part: RangePart, loss: Tensor | None) -> None:
        """Takes the loss of the present range, and runs all backward passes that are due."""
        self._settle(part.index, part, loss)
        if part.index == self.count - 1:
            last = self._last_pass if self._runner._sync else None
            self._gradients.end(last)

    # --- which ranges wait ---

    def _chain_of(self, index: int) -> Chain | None:
        """The rows of a range that later ranges need: those which are ancestors of the next range's first row."""
        ranges = self._runner.ranges
        if index + 1 == self.count:
            return None
        above, start = ranges[index + 1].ancestors, ranges[index].start
        mine = above[np.searchsorted(above, start) :] - start
        return Chain(torch.from_numpy(mine).to(self._device).long()) if len(mine) else None

    def _above(self, where: Range) -> list[tuple[Chain, int]]:
        """The chains that hold the ancestors of a range, and how many rows of each are among them."""
        out, ancestors = [], where.ancestors
        for part, _, chain in self._waiting:
            first, last = np.searchsorted(ancestors, (part.range.start, part.range.stop)).tolist()
            if first < last:
                out.append((chain, last - first))
        return out

    def _settle(self, index: int, part: RangePart, loss: Tensor | None) -> None:
        chain = self._chain
        if chain is not None:
            self._waiting.append((part, loss, chain))
        elif part._closed:
            self._backward(part, loss)
        following = self._runner.ranges[index + 1 :][:1]
        while self._waiting:
            last, its_loss, its_chain = self._waiting[-1]
            if following and np.any(following[0].ancestors >= last.range.start):
                break
            its_chain.drop_kept()
            if last._closed:
                self._backward(last, its_loss)
            self._waiting.pop()

    # --- the passes ---

    def _hidden(
        self, model: Any, rows: Rows | Blank, tiles: TreeTiles, keys: RangeKeys | None, own_head: bool
    ) -> Tensor:
        """(n, h) of some rows through the model, wrappers included."""
        tiles.row_checked = True
        inputs = call_inputs(rows.input_ids, rows.position_ids, tiles, self._runner._impl) | {"tree_hook": keys}
        return forward_inputs(model, self._inner, inputs, own_head=own_head)[0]

    def _backward(self, part: RangePart, loss: Tensor | None) -> None:
        roots, upstream = [], []
        if loss is not None and loss.requires_grad:
            roots, upstream = [loss], [torch.ones_like(loss)]
        if part._anchor is not None:
            # In any case: later ranges have left gradients, whatever the loss depends on.
            roots, upstream = [*roots, part._anchor], [*upstream, torch.zeros_like(part._anchor)]
        with self._running(part), self._gradients.alone():
            torch.autograd.backward(roots, upstream)
        part._anchor = None

    @contextmanager
    def _running(self, part: RangePart) -> Iterator[None]:
        self.running = part
        try:
            yield
        finally:
            self.running = None

    def _last_pass(self) -> None:
        rows = Blank(self.tree)
        hidden = self._hidden(
            self._runner.model, rows, rows.tiles()[0], None, own_head=True
        )  # which is tied to the logits
        torch.autograd.backward([hidden], [torch.zeros_like(hidden)])

    def _parameter_versions(self) -> list[int]:
        """Numbers that grow when a parameter is written to. Those of sharded ones, which are gathered, do as well."""
        return [] if self._gradients.sharded else [x._version for x in self._runner.model.parameters()]
