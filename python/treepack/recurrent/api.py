"""The operators of layers with a state on a packed tree: checks, then one implementation.

    y = tree_conv1d(x, weight, bias, tree=tree, activation="silu")
    o = tree_gated_delta_rule(q, k, v, g, beta, tree=tree, qk_l2norm=True)

`tree` is what `tree_attention` takes: a `PackedTree` or a `TreeTiles` on the device of the layer. Implementations are
chosen by `impl` or, unset, by the device alone. A choice that cannot run raises; nothing falls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import rule
from .metadata import TreeSegments, tree_segments

IMPLEMENTATIONS = rule.IMPLEMENTATIONS
ACTIVATIONS = (None, "silu", "swish")  # two names of one function


@rule.eager
def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tree: Any,
    activation: str | None = None,
    impl: str | None = None,
) -> Tensor:
    """A causal convolution per channel, along the path of each token from its root.

    Args:
        x: (N, C) or (1, N, C), any strides.
        weight: (C, W) or (C, 1, W), as `torch.nn.Conv1d` has it. bias: (C,).
        tree: a `PackedTree` or `TreeTiles` on the device of x.
        activation: None, "silu" or "swish" (the same).
        impl: "triton" or "reference"; None: "triton" on CUDA, "reference" elsewhere.

    Returns:
        y in the shape and dtype of x, 0 at padding.

    Raises:
        ValueError, TypeError: what does not fit; the message says what was given and what is allowed.

    Example:
        >>> from treepack.attention import tree_tiles
        >>> tree = tree_tiles(torch.tensor([4, 2, 4, 4]))            # 0 - 1  and  0 - 2 - 3
        >>> tree_conv1d(torch.ones(4, 1), torch.ones(1, 4), tree=tree).flatten()
        tensor([1., 2., 2., 3.])
    """
    segments = tree_segments(tree)
    given = x
    (x,) = check_rows(segments, x=(x, 2))
    channels = x.shape[1]
    if weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(f"weight must be ({channels}, W), one row per channel of x, not {tuple(weight.shape)}")
    if bias is not None:
        check_shape("bias", bias, (channels,), "one per channel of x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; choose None, 'silu' or 'swish'")
    _check_devices(x, weight=weight, bias=bias)
    y: Tensor = rule.convolution(impl, x).tree_conv1d(x, weight, bias, segments, silu=activation is not None)
    return y.reshape(given.shape)


@rule.eager
def tree_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    tree: Any,
    scale: float | None = None,
    qk_l2norm: bool = False,
    impl: str | None = None,
) -> Tensor:
    """The gated delta rule on a packed forest (Qwen3-Next, Qwen3.5): `reference.py` has the equation.

    Args:
        q, k: (N, H, K) or (1, N, H, K).
        v: (N, HV, V), HV a multiple of H: value head i reads key head i // (HV // H).
        g: (N, HV), the log of the decay. beta: (N, HV).
        tree: a `PackedTree` or `TreeTiles` on the device of q.
        scale: factor on q; default 1 / sqrt(K).
        qk_l2norm: q and k are divided by their lengths first.
        impl: "triton", "levels" or "reference"; None: "triton" on CUDA, "reference" elsewhere.

    Returns:
        o in the shape and dtype of v, 0 at padding.

    Raises:
        ValueError, TypeError: what does not fit; the message says what was given and what is allowed.
    """
    segments = tree_segments(tree)
    given = v
    q, k, v, g, beta = check_rows(segments, q=(q, 3), k=(k, 3), v=(v, 3), g=(g, 2), beta=(beta, 2))
    _check_heads(q, k, v)
    check_shape("g", g, tuple(v.shape[:2]), "one decay per token and head of v")
    check_shape("beta", beta, tuple(v.shape[:2]), "one per token and head of v")
    scale = _scale(scale, k)
    run = rule.scan(impl, q, k, v, g, beta).tree_gated_delta_rule
    o: Tensor = run(q, k, v, g, beta, segments, scale=scale, qk_l2norm=qk_l2norm)
    return o.reshape(given.shape)


@rule.eager
def tree_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    tree: Any,
    scale: float | None = None,
    qk_l2norm: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Kimi delta attention on a packed forest: `tree_gated_delta_rule` with a decay per channel, g (N, HV, K)."""
    segments = tree_segments(tree)
    given = v
    q, k, v, g, beta = check_rows(segments, q=(q, 3), k=(k, 3), v=(v, 3), g=(g, 3), beta=(beta, 2))
    _check_heads(q, k, v)
    check_shape("g", g, (*v.shape[:2], k.shape[2]), "one decay per token, head of v and channel of k")
    check_shape("beta", beta, tuple(v.shape[:2]), "one per token and head of v")
    scale = _scale(scale, k)
    run = rule.scan(impl, q, k, v, g, beta).tree_kda
    o: Tensor = run(q, k, v, g, beta, segments, scale=scale, qk_l2norm=qk_l2norm)
    return o.reshape(given.shape)


@rule.eager
def tree_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    tree: Any,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Linear attention with a decay per head on a packed forest, the recurrence of Mamba-2 (`tree_mamba2`).

    Args, result and errors are those of `tree_gated_delta_rule`, without beta.
    """
    segments = tree_segments(tree)
    given = v
    q, k, v, g = check_rows(segments, q=(q, 3), k=(k, 3), v=(v, 3), g=(g, 2))
    _check_heads(q, k, v)
    check_shape("g", g, tuple(v.shape[:2]), "one decay per token and head of v")
    run = rule.scan(impl, q, k, v, g).tree_linear_attention
    o: Tensor = run(q, k, v, g, segments, scale=_scale(scale, k))
    return o.reshape(given.shape)


def check_rows(tree: TreeSegments, **inputs: tuple[Tensor, int]) -> list[Tensor]:
    """The inputs, (tensor, its dimensions without a batch), as (N, ...): of floats, on the device and of the length of
    the tree."""
    rows = []
    for name, (x, dims) in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, not a {type(x).__name__}")
        if x.dim() == dims + 1 and x.shape[0] == 1:
            x = x.squeeze(0)  # not x[0], whose gradient is a copy
        if x.dim() != dims:
            raise ValueError(
                f"{name} must have {dims} dimensions, the first the tokens of the packed row, or one of size 1 before "
                f"them: {tuple(inputs[name][0].shape)}"
            )
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must hold floats, not {x.dtype}")
        if x.shape[0] != tree.tokens:
            raise ValueError(f"{name} has {x.shape[0]} tokens, the tree {tree.tokens}: it is another packed tree's")
        if x.device != tree.subtree_end.device:
            raise ValueError(
                f"{name} is on {x.device}, the tree on {tree.subtree_end.device}: tree.to(device) moves it"
            )
        rows.append(x)
    return rows


def check_shape(name: str, x: Tensor, shape: Sequence[int], meaning: str) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {tuple(shape)}, {meaning}, not {tuple(x.shape)}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape != k.shape:
        raise ValueError(f"q and k must have one shape: {shapes}")
    if q.shape[1] == 0 or v.shape[1] % q.shape[1]:
        raise ValueError(f"v must have a multiple of the heads of q and k: {shapes}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")


def _check_devices(x: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, x on {x.device}")


def _scale(scale: float | None, k: Tensor) -> float:
    return float(k.shape[-1] ** -0.5 if scale is None else scale)
