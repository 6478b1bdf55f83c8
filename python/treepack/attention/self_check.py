# mypy: ignore-errors
"""The first use of a set of kernels in a process, on a small tree: the kernels against the reference, both passes.

Kernels are tested on few machines and run on many: GPUs, drivers and compilers that nobody tried give wrong numbers
without an error, now and then. So the first call for a device, dtype, pair of head sizes and set of features is
checked, on values of its own, on the stream of the call; what is wrong raises, and every later call of the kind raises
again.
Nothing of it reaches autograd: a checkpoint counts the tensors that its region saves.

`TREEPACK_SELF_CHECK=0` leaves it out. A call that is compiled or captured into a graph is not checked; the warm-up
before a capture is.
"""

from __future__ import annotations

import functools
import os
import platform
import threading
import time
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .._pages import page
from . import operator, reference, rule, tiles, tolerance
from .triton.common import APART, COLUMNS, POINTERS, ROWS, matrix_view

LABELS = ("out", "lse", "dq", "dk", "dv")
NAMES = {rule.PLAIN: "portable", rule.AUTO: "Hopper", rule.GLUON: "Hopper"}
WINDOW, SOFTCAP, SCALE = 40, 2.0, 0.2
MOST_GROUP, MOST_KV_HEADS = 8, 2  # dense attention in float64 stands beside it


class KernelCheckError(RuntimeError):
    """Kernels that give wrong results on this machine."""


class Verdict(NamedTuple):
    """What the check of one kind of call said."""

    kernels: str
    device: str
    dtype: str
    head_size: int  # of q and k
    value_size: int
    features: tuple[str, ...]
    milliseconds: float  # compilation included
    wrong: str  # "" where the kernels are right

    def sizes(self) -> str:
        """The head sizes: one number, or "192 / 128" where that of v is another."""
        return f"{self.head_size}" + (f" / {self.value_size}" if self.value_size != self.head_size else "")


_verdicts: dict[tuple, Verdict | None] = {}  # None: not to be checked
_lock = threading.RLock()


def wanted() -> bool:
    """Whether first uses are checked in this process."""
    return os.environ.get("TREEPACK_SELF_CHECK", "1") != "0"


def verdicts() -> list[Verdict]:
    """What was checked in this process so far."""
    return [verdict for verdict in _verdicts.values() if verdict is not None]


def at_first_use(
    kernels: int, q: Tensor, k: Tensor, v: Tensor, window: bool, softcap: bool, sinks: bool, training: bool,
    with_lse: bool,
) -> None:  # fmt: skip
    """Checks the kernels that a call of this kind runs, where that was not done yet.

    Raises:
        KernelCheckError: they are wrong here.
    """
    if not operator.is_plain(q) or rule.INTERPRETED:
        return
    side_by_side = tuple(x.stride(1) == x.shape[-1] for x in (q, k, v))
    key = (q.device.index, q.dtype, q.shape[-1], v.shape[-1], kernels, side_by_side, k.shape[1] != q.shape[1], window,
           softcap, sinks, training, with_lse)  # fmt: skip
    verdict = _verdicts.get(key, _verdicts)  # the dictionary itself: not there
    if verdict is _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return
        verdict = _check_once(key, kernels, q, k, v, window, softcap, sinks, training, with_lse)
    if verdict is not None and verdict.wrong:
        raise KernelCheckError(_message(verdict))


def _check_once(key: tuple, kernels: int, q: Tensor, k: Tensor, v: Tensor, *features: bool) -> Verdict | None:
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = _check(kernels, q, k, v, *features) if wanted() else None
        return _verdicts[key]


def _check(
    kernels: int, q: Tensor, k: Tensor, v: Tensor, window: bool, softcap: bool, sinks: bool, training: bool,
    with_lse: bool,
) -> Verdict:  # fmt: skip
    """Both forms of dK/dV where the call could take either; with a gradient of lse too where lse is asked for."""
    started = time.perf_counter()
    group = min(q.shape[1] // k.shape[1], MOST_GROUP)
    kv_heads = min(k.shape[1], MOST_KV_HEADS) if group < MOST_GROUP else 1
    both = training and kernels == rule.PLAIN and group > 1
    forms = (rule.LOOPED, rule.SPLIT) if both else (kernels,)
    wrong = []
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False), operator.on(q):
        case = _Case(q, k, v, group * kv_heads, kv_heads, window, softcap, sinks)
        for dlse in (case.dlse, None) if training and with_lse else (None,):
            want, eager = case.reference(torch.float64, dlse), case.reference(q.dtype, dlse)
            for form in forms:
                wrong += tolerance.complaints(LABELS, case.run(form, training, dlse), want, eager)
    options = {"sliding_window": window, "softcap": softcap, "sinks": sinks, "forward and backward": training}
    return Verdict(
        kernels=NAMES[kernels],
        device=torch.cuda.get_device_name(q.device) if q.is_cuda else str(q.device),
        dtype=str(q.dtype).removeprefix("torch."),
        head_size=q.shape[-1],
        value_size=v.shape[-1],
        features=tuple(name for name, there in options.items() if there),
        milliseconds=round((time.perf_counter() - started) * 1e3, 1),
        wrong="; ".join(dict.fromkeys(wrong)),
    )


def _message(verdict: Verdict) -> str:
    other = 'impl="triton_plain" runs the portable kernels, ' if verdict.kernels == "Hopper" else ""
    return (
        f"the {verdict.kernels} kernels of tree attention give wrong results here, with {verdict.dtype}, head size "
        f"{verdict.sizes()}, {', '.join(verdict.features)}: {verdict.wrong}. This is {verdict.device}, torch "
        f"{torch.__version__}, Triton {triton.__version__}, CUDA {torch.version.cuda}, Python "
        f'{platform.python_version()}. {other}impl="flex" and impl="reference" do without them; tested versions are '
        f"in {page('kernel', 'versions-of-triton')}. TREEPACK_SELF_CHECK=0 leaves this check out"
    )


class _Case:
    """Values like those of a call: its dtype, head sizes, group and layouts, on a small tree."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, window: bool, softcap: bool, sinks: bool
    ):
        self.window, self.softcap = (WINDOW if window else None), (SOFTCAP if softcap else None)
        end, depth, *rest = _metadata(heads, kv_heads, self.window)
        self.end, self.depth, *self.rest = (x if x is None else x.to(q.device) for x in (end, depth, *rest))
        generator = torch.Generator(q.device).manual_seed(0)

        def draw(like: Tensor, count: int, layout: int = COLUMNS) -> Tensor:
            n, size = len(end), like.shape[-1]
            width = 2 * size if layout == APART else size
            shape, axes = _SHAPES[layout]
            shape = [{"n": n, "h": count, "d": width}[axis] for axis in shape]
            values = torch.randn(shape, generator=generator, device=q.device, dtype=torch.float32)
            return values.to(like.dtype).permute(axes)[..., width - size :]

        self.q, self.k, self.v = (draw(x, h, _layout(x)) for x, h in ((q, heads), (k, kv_heads), (v, kv_heads)))
        self.dout = draw(v, heads)
        self.dlse = self.dout[..., 0].T.float().contiguous()
        self.sinks = torch.linspace(-1.0, 1.0, heads, device=q.device) if sinks else None

    def reference(self, dtype: torch.dtype, dlse: Tensor | None) -> list[Tensor]:
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        return reference.both_passes(
            q, k, v, self.end, dout, dlse, position_ids=self.depth, scale=SCALE, sliding_window=self.window,
            softcap=self.softcap, sinks=self.sinks)  # fmt: skip

    def run(self, kernels: int, training: bool, dlse: Tensor | None) -> list[Tensor]:
        """`[out, lse]` of the kernels, and `[dq, dk, dv]`."""
        metadata = (self.end, self.depth, *self.rest, SCALE, self.window or 0, self.softcap or 0.0, kernels)
        inputs = (self.q, self.k, self.v)
        out, lse2 = operator.forward_pass(*inputs, self.sinks, *metadata)
        found = [out, lse2 * operator.LN2]
        if training:
            dlse2 = None if dlse is None else dlse * operator.LN2
            found += operator.backward_pass(self.dout, dlse2, *inputs, out, lse2, *metadata)[:3]
        return found


# How values are stored, and the order that makes them (N, H, D).
_SHAPES = {COLUMNS: ("nhd", (0, 1, 2)), ROWS: ("hnd", (1, 0, 2)), POINTERS: ("hdn", (2, 0, 1))}
_SHAPES[APART] = _SHAPES[COLUMNS]


def _layout(x: Tensor) -> int:
    view = matrix_view(x, apart=True)
    return POINTERS if view is None else view[2]


@functools.cache
def _metadata(heads: int, kv_heads: int, window: int | None) -> tuple[Tensor | None, ...]:
    """`(subtree_end, depth, *lists, schedule, dkv_items)`, as the operator takes them, on the host: a prompt of 258
    tokens with two answers, one of which forks again, a second root, padding. It has runs of full tiles; some key
    tiles are split and some are not."""
    end = torch.tensor(
        [439] * 258 + [379] * 70 + [378] * 50 + [379] + [439] * 60 + [454] * 15 + list(range(454, 460)),
        dtype=torch.int32,
        device="cpu",
    )
    options = {"depth": reference.tree_depth(end) if window else None, "window": window}
    lists = [x for block in tiles.LIST_SIZES for x in tiles.tile_lists(end, block, **options)]
    queries = tiles.tile_lists(end, 64, transpose=True, **options) if window else (None, None)
    if window:
        schedule = tiles.window_schedule(end, options["depth"], window, lists[0])
        columns = schedule[: 4 * lists[0].shape[0]].view(-1, 4)
    else:
        schedule = columns = tiles.tile_schedule(end, lists[0])
    items = tiles.backward_items(columns, heads, kv_heads, processors=6)
    return end, options["depth"], *lists, *queries, schedule, items
