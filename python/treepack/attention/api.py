"""Tree attention: checks, then one implementation.

    out = treepack.tree_attention(q, k, v, tree)                         # a PackedTree on the device of q
    out = treepack.tree_attention(q, k, v, subtree_end=subtree_end)      # only the mask: tile lists are made on the
    device at each call
    out = treepack.tree_attention(q, k, v, tree_tiles(subtree_end))      # ... or once, for all layers

Implementations are chosen by `impl` or, unset, by the device alone: "triton" on CUDA, "reference" on the CPU. A
choice that cannot run raises; nothing falls back.

"triton" is two sets of kernels: on Hopper the Gluon ones for what they cover, the portable ones for the rest, by a
fixed rule (docs/kernel.md); "gluon" and "triton_plain" force one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import reference
from .metadata import TreeTiles, metadata

TRITON = ("triton", "triton_plain", "gluon")  # what reads tile lists and, on Hopper, their schedule
IMPLEMENTATIONS = (*TRITON, "fa4", "flex", "reference")


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: Any = None,
    *,
    subtree_end: Tensor | None = None,
    position_ids: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a packed forest: every token sees its ancestors and itself.

    Args:
        q: (1, H, N, D) as Hugging Face gives it (any strides, no copy is made) or (N, H, D); bfloat16, float16 or
            float32. It may have fewer rows than k and v: the queries are then the last rows of the forest, as in a
            range of a tree behind the keys of its ancestors.
        k, v: the same with H_kv heads; H must be a multiple of H_kv. v may have a head size D_V of its own, as in
            multi-head latent attention. Where q is shorter, by a number that is no multiple of 128, the kernels copy
            them.
        tree: a `PackedTree` or `TreeTiles` on the device of q: anything with `subtree_end`, and optionally
            `position_ids` and `tiles`.
        subtree_end: (N,) instead of a tree.
        position_ids: (N,) depth of each token, read with `sliding_window` only; derived from `subtree_end` where
            absent.
        scale: factor on q.k; default 1 / sqrt(D).
        sliding_window: a query sees keys fewer than this many tokens above it in its own sample, itself included.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: (H,), one extra logit per query head that takes probability and gives nothing.
        return_lse: also return the log of the softmax denominator (sinks included), natural log, float32, (1, H, N)
            or (H, N), of the rows of q; differentiable.
        impl: "triton", "triton_plain", "gluon", "fa4", "flex" or "reference"; None: "triton" on CUDA, "reference"
            elsewhere.

    Returns:
        Output in the shape and dtype of q, with the head size of v, stored as (N, H, D_V), or `(output, lse)`. At
        padding rows both are 0, and so are all gradients.

    Raises:
        ValueError: shapes, lengths, devices or options that do not fit; the message says what was given and what is
            supported.
        TypeError: a dtype that the implementation does not take.
        RuntimeError, ImportError: the implementation cannot run here.

    Example:
        >>> end = torch.tensor([4, 2, 4, 4], dtype=torch.int32)      # 0 - 1  and  0 - 2 - 3
        >>> q, k, v = torch.randn(3, 4, 2, 16).unbind()
        >>> tree_attention(q, k, v, subtree_end=end).shape
        torch.Size([4, 2, 16])
    """
    tiles = metadata(tree, subtree_end, position_ids)
    _check(q, k, v, tiles.subtree_end, sliding_window, softcap, sinks)
    impl = impl or ("triton" if q.is_cuda else "reference")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if impl == "reference":
        return reference.tree_attention(
            q, k, v, tiles.subtree_end, position_ids=tiles.position_ids, scale=scale, sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks, return_lse=return_lse)  # fmt: skip
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    batched = q.dim() == 4
    if batched:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    if q.shape[0] < k.shape[0]:
        if impl not in TRITON:
            raise ValueError(
                f'impl="{impl}" takes whole forests: q has {q.shape[0]} rows, k and v {k.shape[0]}; '
                f'impl="triton" and impl="reference" take queries that are the last rows'
            )
        tiles = tiles.last_rows(q.shape[0])
        k, v = (_padded_in_front(x, len(tiles.subtree_end)) for x in (k, v))
    options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    out, lse, unit = _run(impl, q, k, v, tiles, options, return_lse)
    out = out.transpose(0, 1).unsqueeze(0) if batched else out
    if not return_lse:
        return out
    lse = lse[:, tiles.above :] if tiles.above else lse
    lse = lse if unit == 1.0 else lse * unit
    return out, lse.unsqueeze(0) if batched else lse


def _padded_in_front(x: Tensor, rows: int) -> Tensor:
    """(rows, H, D) that ends with x."""
    return x if x.shape[0] == rows else torch.cat([x.new_zeros(rows - x.shape[0], *x.shape[1:]), x])


def _run(
    impl: str, q: Tensor, k: Tensor, v: Tensor, tiles: TreeTiles, options: dict[str, Any], with_lse: bool
) -> tuple[Tensor, Tensor, float]:
    """(out (N, H, D_V), lse (H, N), the factor that makes lse natural) of a kernel."""
    if impl in TRITON:
        return _triton().tree_attention(impl, q, k, v, tiles, with_lse=with_lse, **options)  # type: ignore[no-any-return]
    if impl == "flex":
        from . import flex

        depth = tiles.depth if options["sliding_window"] else None
        return (*flex.tree_attention(q, k, v, tiles.subtree_end, depth, tiles.cache, **options), 1.0)
    from .fa4 import launch as fa4

    return (*fa4.tree_attention(q, k, v, tiles.subtree_end, tiles.cache, **options), 1.0)


def _triton() -> Any:
    """`call`, or an error that says what is missing: a torch without Triton (CPU, macOS, Windows), a
    Triton that is broken or too old."""
    try:
        from . import call
    except Exception as error:  # whatever a broken installation raises
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(
            f'impl="triton" needs the package triton, 3.6 or newer, and it cannot be imported here '
            f'({type(error).__name__}: {error}); impl="reference" needs torch alone'
        ) from error
    return call


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        raise ValueError(f"q, k and v must all be (1, H, N, D) or all (N, H, D): {shapes()}")
    batched = q.dim() == 4
    if batched and (q.shape[0] != 1 or k.shape[0] != 1 or v.shape[0] != 1):
        raise ValueError(f"a packed forest is one row, so the batch size must be 1: {shapes()}")
    length, head = (2, 1) if batched else (0, 1)
    n, heads, kv_heads = k.shape[length], q.shape[head], k.shape[head]
    if kv_heads == 0 or heads % kv_heads or v.shape[head] != kv_heads:
        raise ValueError(f"q heads must be a multiple of k heads, and k and v must have the same number: {shapes()}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"q and k must have the same head size (that of v may be another): {shapes()}")
    if not q.shape[-1] or not v.shape[-1]:
        raise ValueError(f"the head sizes must be at least 1: {shapes()}")
    if v.shape[length] != n or q.shape[length] > n:
        raise ValueError(f"k and v must have the same length, and q that or a shorter one (the last rows): {shapes()}")
    if subtree_end.dim() != 1 or subtree_end.shape[0] != n:
        raise ValueError(
            f"subtree_end is {tuple(subtree_end.shape)} for {n} tokens: it was made for another packed tree"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    for name, x in (("k", k), ("v", v), ("subtree_end", subtree_end), ("sinks", sinks)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 (a token sees itself), not {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}; None means no cap")
    if sinks is not None and (sinks.dim() != 1 or sinks.shape[0] != heads):
        raise ValueError(f"sinks must be ({heads},), one per query head, not {tuple(sinks.shape)}")
