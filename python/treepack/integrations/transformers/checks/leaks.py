"""The first use of a model with a tree: two tiny samples run packed and alone, and a layer that leaks between them is
found, whatever its class is called.

    packed      prefix, branch a, branch b                   no gradients, evaluation mode, attention by the reference,
    first       prefix, branch a, padding                    the same on every rank, so that a sharded model may gather
    second      prefix, branch b, padding
    rounded     `first`, with embeddings that are one rounding off

A module leaks if its values differ between packed and alone although what it was given agrees. How far they may differ
is measured, by `rounded`: all rows have one length, so that only sums within attention and experts run in another
order. Where something is found, two more pairs of samples must show it for the same token: rounding may turn the choice
of an expert, but not every time.

Rules by name (the other files here) say more, and see what this cannot: windows and tables longer than the samples,
randomness in training, places for images.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..model import base
from .differences import Culprit, Differences
from .layers import NoTreeError
from .rows import Row, rows_for
from .sketches import Recorder, Run
from .untouched import untouched

__all__ = ["check_leaks"]

_DRAWS = 3  # pairs of samples, where the first shows something


class _Known:
    """What is known of one model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running = False
        self.state: object = None  # what was checked
        self.wrong = ""


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_making = threading.Lock()


def check_leaks(model: Any, inner: Any, tree: Any) -> None:
    """Runs two tiny samples at the first use of a model, and again when its config or its modules have changed.

    `TREEPACK_MODEL_CHECK=0` leaves it out. A call that is compiled or captured into a graph is not checked.

    Args:
        model: with its wrappers. inner: without (what `check_model` returns).
        tree: what is to run next; its device and dtypes are taken.

    Raises:
        ValueError: a module leaks between samples, or does not hand the tree on to attention.
    """
    if os.environ.get("TREEPACK_MODEL_CHECK", "1") == "0" or _is_taken_down(tree.subtree_end):
        return
    with _making:
        known = _known.setdefault(inner, _Known())
    state = _state(inner)
    if known.state != state:
        with known.lock:
            if known.running:  # by this thread: a hook in the model that uses the model
                return
            if known.state != state:
                if not _has_weights(base(inner)):
                    return
                known.running = True
                try:
                    known.wrong, known.state = _find(model, inner, tree), state
                finally:
                    known.running = False
    if known.wrong:
        raise ValueError(known.wrong)


def _is_taken_down(end: Tensor) -> bool:
    """Whether the call is compiled or captured, or runs on shapes alone."""
    if torch.compiler.is_compiling() or type(end) is not Tensor or end.is_meta:
        return True
    return end.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_weights(below: nn.Module) -> bool:
    """Not those of ZeRO-3, which learns from its first pass in which order it needs them."""
    weights = list(below.parameters())
    if any(hasattr(x, "ds_id") for x in weights):
        return False
    return not any(x.is_meta for x in weights) or any(hasattr(m, "_hf_hook") for m in below.modules())


def _state(inner: Any) -> object:
    """What a verdict is good for: the settings of the model and the classes of all its modules."""
    settings = vars(inner.config.get_text_config())
    classes, left, seen = [], [inner], {inner}
    while left:  # as `modules()`, which takes several times as long, at every call
        module = left.pop()
        classes.append(type(module))
        more = [part for part in module._modules.values() if part is not None and part not in seen]
        seen.update(more)
        left += more
    return repr([x for x in settings.items() if not hasattr(x[1], "to_dict")]), classes


def _find(model: Any, inner: Any, tree: Any) -> str:
    """What is wrong, "" if nothing."""
    below = base(inner)
    parts = set(below.modules())
    modules = {path: module for path, module in inner.named_modules() if module in parts}
    root = _root(model, inner, below)
    recorder = Recorder(modules)

    def run(row: Row) -> Run:
        return recorder.record(len(row.ids), lambda: _run(root, inner, tree, row))

    found: Differences | None = None
    message = ""
    with untouched(root):
        for draw in range(_DRAWS):
            rows = rows_for(inner, draw)
            if rows is None:
                return ""
            try:
                packed, first, second = (run(row) for row in (rows.packed, rows.first, rows.second))
            except NoTreeError as error:
                return _not_handed_on(inner, modules, error.module, functools.partial(run, rows.first))
            itemsize = _itemsize(below, packed)
            with _rounded(inner, itemsize):
                rounded = run(rows.first)
            here = Differences.of(rows, packed, first, second, rounded)
            found = here if found is None else found.again(here)
            culprit = found.culprit(itemsize)
            if culprit is None:
                return ""
            message = _message(inner, rows.prefix, culprit, type(modules[culprit.path]).__name__)
    return message


def _root(model: Any, inner: Any, below: nn.Module) -> nn.Module:
    """What to run: the base model, without the head; of a model in shards, the outermost of them, which gathers."""
    parts: list[nn.Module] = list(model.modules())
    return next((m for m in parts if _is_sharded(m) and any(part is inner for part in m.modules())), below)


def _is_sharded(module: nn.Module) -> bool:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def _run(root: nn.Module, inner: Any, tree: Any, row: Row) -> None:
    inputs = row.inputs(tree)
    if root is not base(inner):
        if "logits_to_keep" in inspect.signature(inner.forward).parameters:
            inputs["logits_to_keep"] = 1
        if getattr(inner.config.get_text_config(), "output_router_logits", False):
            del inputs["attention_mask"]  # the router's loss would take it for a padding mask
    root(**inputs)


@contextmanager
def _rounded(inner: Any, itemsize: int) -> Iterator[None]:
    """A block in which the embeddings of the tokens are off by one in the last place, up or down."""
    eps = 2**-8 if itemsize == 2 else 2**-23

    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + output * output.cos().sign() * eps

    embedding: nn.Module = inner.get_input_embeddings()
    handle = embedding.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def _itemsize(below: nn.Module, run: Run) -> int:
    """Bytes of the narrowest number that the model computes in: 8, 4 or 2."""
    if run.autocast or torch.get_float32_matmul_precision() != "highest":  # TF32 rounds as half precision does
        return 2
    return min((max(x.dtype.itemsize, 2) for x in below.parameters() if x.is_floating_point()), default=4)


def _not_handed_on(inner: Any, modules: dict[str, nn.Module], attention: Any, run: Callable[[], object]) -> str:
    """Attention got no tree: the innermost module around it that did. Runs once more, to look at what modules get."""
    at = next(path for path, module in modules.items() if module is attention)
    got: list[str] = []

    def look(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: got.append(path) if "subtree_end" in kwargs else None

    around = {path: module for path, module in modules.items() if path == "" or at.startswith(f"{path}.")}
    handles = [module.register_forward_pre_hook(look(path), with_kwargs=True) for path, module in around.items()]
    try:
        run()
    except NoTreeError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    caller = type(modules[got[-1]]).__name__ if got else type(inner).__name__
    return (
        f"{type(inner).__name__}: {caller}.forward (at {at}) does not hand on the keyword arguments of model(...), "
        "with which the tree travels, so attention would not get it; another model is needed, or a forward that hands "
        "**kwargs on to attention"
    )


def _message(inner: Any, prefix: int, culprit: Culprit, kind: str) -> str:
    does = (
        "it takes in what comes later in the row, or the row as a whole"
        if culprit.later
        else "it takes in the branch that lies before in the row, or counts places along the row"
    )
    after = culprit.token - prefix
    token = f"token {culprit.token}" + (f", {after} after the fork," if after >= 0 else ", of the common prefix,")
    return (
        f"{type(inner).__name__}: layer {culprit.path or '(the model)'} ({kind}) leaks between samples. Of two samples "
        f"with a common prefix of {prefix} tokens, packed and each alone, its values for {token} of sample "
        f"{culprit.sample} are {culprit.off:.2g} of their size apart, where rounding explains {culprit.allowed:.2g}, "
        f"and what it was given agrees: {does}. Run such a model on unpacked samples "
        '(model.set_attn_implementation("sdpa")), or make the layer follow subtree_end and position_ids, which it gets '
        "as keyword arguments; treepack.testing.check_parity compares log-probs and gradients. "
        "TREEPACK_MODEL_CHECK=0, or model_check=False, leaves this check out"
    )
