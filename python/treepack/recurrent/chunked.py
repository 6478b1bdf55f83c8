"""The scans in the chunk form, on a GPU: what is local to a chunk by flash-linear-attention, with the segments of the
tree as its sequences; the two steps that cross chunks by the walk over the tree (`triton/walk.py`).

flash-linear-attention's functions are called as they are, but for the two that they call to carry the state. These are
internal: `TESTED` names the versions whose names and arguments were tested, and `reason` says what is not as known.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .metadata import TreeSegments
from .plan import Sizes, Walk, chunk_size, walk
from .triton import launch, norm

TESTED = ("0.6.0",)
# What the kernels take. Linear attention has no equation to solve within a chunk, and more heads, whose states count.
DELTA_SIZES, KDA_SIZES, LINEAR_SIZES = Sizes((16, 32, 64), 24), Sizes((32, 64), 24), Sizes((16, 32, 64), 68)

# module: {function: the arguments that are given to it by name, and what it calls that is replaced}
_CARRIED = ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu")
_COMMON = ("cu_seqlens", "chunk_indices", "chunk_size")
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "fla.ops.gated_delta_rule.chunk": {
        "chunk_gated_delta_rule_fwd": ("q", "k", "v", "g", "beta", "scale", *_COMMON),
        "chunk_gated_delta_rule_bwd": ("q", "k", "v", "g", "beta", "A", "scale", "do", "dht", *_COMMON),
    },
    "fla.ops.kda.chunk_fwd": {"chunk_kda_fwd": ("q", "k", "v", "g", "beta", "scale", *_COMMON)},
    "fla.ops.kda.chunk_bwd": {
        "chunk_kda_bwd": ("q", "k", "v", "beta", "Aqk", "Akk", "scale", "do", "dht", "g", "g_org", *_COMMON)
    },
    "fla.ops.common.chunk_o": {
        "chunk_fwd_o": ("q", "k", "v", "h", "g", "scale", *_COMMON),
        "chunk_bwd_dv_local": ("q", "k", "do", "g", "scale", *_COMMON),
        "chunk_bwd_dqkwg": ("q", "k", "v", "do", "h", "dh", "g", "scale", *_COMMON),
    },
    "fla.ops.utils": {"chunk_local_cumsum": ("g", "chunk_size", "reverse", "scale", "cu_seqlens", "chunk_indices")},
}


@cache
def reason() -> str | None:
    """What about the installed flash-linear-attention is not as known; None where all is."""
    version = getattr(importlib.import_module("fla"), "__version__", "without a version")
    if version not in TESTED:
        return f"flash-linear-attention is {version}, tested is {' or '.join(TESTED)}"
    for module, functions in NAMES.items():
        for name, arguments in functions.items():
            try:
                function = inspect.unwrap(getattr(importlib.import_module(module), name))
            except (ImportError, AttributeError) as error:
                return f"{module}.{name} is not there ({error})"
            missing = set(arguments) - set(inspect.signature(function).parameters)
            if missing:
                return f"{module}.{name} does not take {', '.join(sorted(missing))}"
    for module, name, calls in (
        ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule_fwd", _CARRIED[:1]),
        ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule_bwd", _CARRIED),
        ("fla.ops.kda.chunk_fwd", "chunk_kda_fwd", _CARRIED[:1]),
        ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd", _CARRIED),
    ):
        function = getattr(importlib.import_module(module), name)
        missing = set(calls) - set(getattr(function, "__code__", _none.__code__).co_names)
        if missing:
            return f"{module}.{name} does not call {', '.join(sorted(missing))}"
    return None


def _none() -> None: ...


@cache
def _known(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _on_tree(module: str, name: str, walk: Walk, dtype: torch.dtype) -> Callable[..., Any]:
    """A function of flash-linear-attention whose state is carried over the tree. A copy of the function with other
    globals: swapping names in its module would meet other threads."""

    def forward_h(k: Tensor, w: Tensor, u: Tensor, g: Tensor | None = None, gk: Tensor | None = None, **_: Any) -> Any:
        return (*launch.walk_forward(k, u, w, g, gk, walk, dtype), None)

    def backward_dhu(
        q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
        scale: float = 1.0, **_: Any,
    ) -> Any:  # fmt: skip
        states, values = launch.walk_backward(q, k, w, do, dv, g, gk, scale, walk, dtype)
        return states, None, values

    known: Any = _known(module, name)
    names = dict(zip(_CARRIED, (forward_h, backward_dhu), strict=True))
    return FunctionType(known.__code__, {**known.__globals__, **names}, name, known.__defaults__, known.__closure__)


def _where(walk: Walk) -> dict[str, Any]:
    return {"cu_seqlens": walk.cu_seqlens, "chunk_indices": walk.chunk_indices, "chunk_size": walk.size}


def _cleared(walk: Walk, *rows: Tensor) -> None:
    """Rows of padding, which no kernel writes, become 0."""
    for x in rows:
        if x.shape[1] > walk.tokens:
            x[:, walk.tokens :] = 0


class _Rule(NamedTuple):
    """A delta rule of flash-linear-attention: its two functions, and what the first leaves for the second."""

    forward: tuple[str, str]
    backward: tuple[str, str]
    given: tuple[int, int]
    """Places of the output and of the cumulated gate in what the first function returns."""
    solved: dict[str, int]
    """Argument of the second function -> place of its value there."""


_GATED = _Rule(
    ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule_fwd"),
    ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule_bwd"),
    (1, 0),
    {"A": 2},
)
_KDA = _Rule(
    ("fla.ops.kda.chunk_fwd", "chunk_kda_fwd"),
    ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd"),
    (0, 2),
    {"Aqk": 3, "Akk": 4},
)


class _Delta(torch.autograd.Function):
    """A delta rule, (1, N, ...) contiguous."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rule: _Rule, walk: Walk, scale: float,
        qk_l2norm: bool,
    ) -> Tensor:  # fmt: skip
        lengths: tuple[Tensor, ...] = ()
        if qk_l2norm:
            (q, of_q), (k, of_k) = norm.l2norm(q), norm.l2norm(k)
            lengths = (of_q, of_k)
        found = _on_tree(*rule.forward, walk, k.dtype)(
            q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=None, output_final_state=False, **_where(walk)
        )
        o, cumulated = (found[place] for place in rule.given)
        ctx.save_for_backward(q, k, v, cumulated, beta, *(found[place] for place in rule.solved.values()), *lengths)
        ctx.rule, ctx.walk, ctx.scale, ctx.g_dtype = rule, walk, scale, g.dtype
        out: Tensor = o.to(v.dtype)
        _cleared(walk, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> Any:
        rule: _Rule = ctx.rule
        q, k, v, g, beta, *more = ctx.saved_tensors
        solved, lengths = dict(zip(rule.solved, more, strict=False)), more[len(rule.solved) :]
        dq, dk, dv, dbeta, dg, *_ = _on_tree(*rule.backward, ctx.walk, k.dtype)(
            q=q, k=k, v=v, g=g, beta=beta, **solved, scale=ctx.scale, initial_state=None, do=do.contiguous(), dht=None,
            **_where(ctx.walk),
        )  # fmt: skip
        if lengths:
            dq, dk = (norm.l2norm_gradient(*x) for x in ((q, lengths[0], dq), (k, lengths[1], dk)))
        out = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(ctx.g_dtype), dbeta.to(beta.dtype)
        _cleared(ctx.walk, *out)
        return (*out, None, None, None, None)


class _Linear(torch.autograd.Function):
    """Linear attention with a decay per head, (1, N, ...) contiguous."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, walk: Walk, scale: float) -> Tensor:
        cumulated = _cumulated(g, walk, scale=1 / LN2)
        states, _ = launch.walk_forward(k, v, None, cumulated, None, walk, k.dtype)
        o: Tensor = _known("fla.ops.common.chunk_o", "chunk_fwd_o")(
            q=q, k=k, v=v, h=states, g=cumulated, scale=scale, **_where(walk)
        )
        ctx.save_for_backward(q, k, v, cumulated)
        ctx.walk, ctx.scale, ctx.g_dtype = walk, scale, g.dtype
        out: Tensor = o.to(v.dtype)
        _cleared(walk, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, g = ctx.saved_tensors
        walk, scale, do = ctx.walk, ctx.scale, do.contiguous()
        # float32 states: the gradient of a gate is a difference of sums over them
        states, _ = launch.walk_forward(k, v, None, g, None, walk, torch.float32)
        within = _known("fla.ops.common.chunk_o", "chunk_bwd_dv_local")(
            q=q, k=k, do=do, g=g, scale=scale, **_where(walk)
        )
        dstates, dv = launch.walk_backward(q, k, None, do, within, g, None, scale, walk, torch.float32)
        dq, dk, _, dg = _known("fla.ops.common.chunk_o", "chunk_bwd_dqkwg")(
            q=q, k=k, v=v, do=do, h=states, dh=dstates, g=g, scale=scale, **_where(walk)
        )
        dg = _cumulated(dg, walk, reverse=True)
        out = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(ctx.g_dtype)
        _cleared(walk, *out)
        return (*out, None, None)


LN2 = 0.6931471805599453


def _cumulated(g: Tensor, walk: Walk, **options: Any) -> Tensor:
    cumulated: Tensor = _known("fla.ops.utils", "chunk_local_cumsum")(g, **options, **_where(walk))
    return cumulated


def _rows(*inputs: Tensor) -> list[Tensor]:
    return [x.unsqueeze(0).contiguous() for x in inputs]


def tree_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, *, scale: float, qk_l2norm: bool
) -> Tensor:
    """As `reference.tree_gated_delta_rule`."""
    launch.check_sizes(k.shape[2], v.shape[2])
    way = walk(tree, chunk_size(tree, DELTA_SIZES))
    out: Tensor = _Delta.apply(*_rows(q, k, v, g, beta), _GATED, way, scale, qk_l2norm)
    return out.squeeze(0)


def tree_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeSegments, *, scale: float, qk_l2norm: bool
) -> Tensor:
    """As `reference.tree_kda`."""
    launch.check_sizes(k.shape[2], v.shape[2])
    way = walk(tree, chunk_size(tree, KDA_SIZES))
    out: Tensor = _Delta.apply(*_rows(q, k, v, g, beta), _KDA, way, scale, qk_l2norm)
    return out.squeeze(0)


def tree_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, tree: TreeSegments, *, scale: float) -> Tensor:
    """As `reference.tree_linear_attention`."""
    launch.check_sizes(k.shape[2], v.shape[2])
    out: Tensor = _Linear.apply(*_rows(q, k, v, g), walk(tree, chunk_size(tree, LINEAR_SIZES)), scale)
    return out.squeeze(0)
