"""Tree attention: checks, then one implementation of `kernels/`.

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

from .kernels import reference

__all__ = ["TreeTiles", "tree_attention", "tree_tiles"]

TRITON = ("triton", "triton_plain", "gluon")  # what reads tile lists and, on Hopper, their schedule
IMPLEMENTATIONS = (*TRITON, "fa4", "flex", "reference")


class TreeTiles:
    """What attention needs to know about one packed forest, made once and shared by all layers and heads.

    Threads may share one: what two of them make at the same time is equal, and one of the two is kept.

    Attributes:
        subtree_end: (N,) int32.
        position_ids: (N,) depth of each token, or None: derived when a sliding window asks for it.
        tiles: {128: (rows, items), 64: (rows, items)}, the tile lists of `kernels/tiles.py`; a size that is not
            there is made when first needed.
        derived: what was made from these on demand: lists of other sizes and windows, the block masks of other
            implementations.

    Raises:
        ValueError: tile lists that are not int32 or not on the device of `subtree_end`.
    """

    def __init__(
        self,
        subtree_end: Tensor,
        position_ids: Tensor | None = None,
        tiles: dict[int, tuple[Tensor, Tensor]] | None = None,
    ):
        self.subtree_end = subtree_end
        self.position_ids = position_ids
        self.tiles = dict(tiles or {})
        for block, lists in self.tiles.items():
            for x in lists:
                if x.device != subtree_end.device or x.dtype != torch.int32:
                    raise ValueError(
                        f"the tile lists of {block} hold {x.dtype} on {x.device}; they must be int32 on the device of "
                        f"subtree_end, {subtree_end.device}: move the tree as a whole with tree.to(device)"
                    )
        self._depth: Tensor | None = None
        self.derived: dict[Any, Any] = {}

    def depth(self) -> Tensor:
        """(N,) int32 depth of each token."""
        if self._depth is None:
            depth = reference.tree_depth(self.subtree_end) if self.position_ids is None else self.position_ids
            self._depth = depth.to(torch.int32).contiguous()
        return self._depth

    def lists(self, block: int, window: int = 0, transpose: bool = False) -> tuple[Tensor, Tensor]:
        """`(rows, items)` of one tile size; with a window, the lists of that window."""
        if not window and not transpose and block in self.tiles:
            return self.tiles[block]
        key = (block, window, transpose)
        if key not in self.derived:
            from .kernels.triton_op import tile_lists

            self.derived[key] = tile_lists(self.subtree_end, self.depth() if window else None, block, window, transpose)
        lists: tuple[Tensor, Tensor] = self.derived[key]
        return lists

    def schedule(self) -> Tensor:
        """(tiles, 4) int32, in which order the Hopper kernels take tiles of 128: `kernels/tiles.py`."""
        if "schedule" not in self.derived:
            from .kernels.triton_op import tile_schedule

            self.derived["schedule"] = tile_schedule(self.subtree_end, self.lists(128)[0])
        schedule: Tensor = self.derived["schedule"]
        return schedule

    def dkv_items(self, heads: int, kv_heads: int) -> Tensor:
        """int32, which program of the Hopper dK/dV computes what for layers with these heads:
        `kernels/tiles.py`."""
        key = ("dkv_items", heads, kv_heads)
        if key in self.derived:
            kept: Tensor = self.derived[key]
            return kept
        from .kernels.triton_op import backward_items

        items: Tensor = backward_items(self.schedule(), heads, kv_heads)
        if not torch.compiler.is_compiling():  # a checkpointed layer may not change what is outside of it
            self.derived[key] = items
        return items

    def prepare(
        self, window: int = 0, *, training: bool, hopper: bool, heads: tuple[int, int] | None = None
    ) -> tuple[Tensor | None, ...]:
        """What the Triton kernels read beside `subtree_end` for one kind of layer, made where it is not there yet: the
        inputs of the operator from `depth` to `dkv_items`.

        Args:
            window: the layer's sliding window, 0 = none.
            training: the backward pass will run.
            hopper: the Hopper kernels may run.
            heads: query heads and K/V heads of the layer; None where they are not known yet.
        """
        forward = self.lists(128, window)
        backward = self.lists(64, window) if training else forward
        queries = self.lists(64, window, transpose=True) if training and window else (None, None)
        schedule = self.schedule() if hopper else None
        items = self.dkv_items(*heads) if hopper and training and heads else None
        return self.depth() if window else None, *forward, *backward, *queries, schedule, items

    def metadata_bytes(self) -> int:
        """Bytes of everything held here that a plain forward and backward pass reads: `subtree_end` and the two
        lists."""
        tensors = [self.subtree_end, *self.lists(128), *self.lists(64)]
        return sum(x.numel() * x.element_size() for x in tensors)


def tree_tiles(subtree_end: Tensor, position_ids: Tensor | None = None) -> TreeTiles:
    """The metadata of a forest from `subtree_end` alone, on its device, without waiting for it.

    Args:
        subtree_end: (N,) int32 or int64, one past the last descendant of each token; `subtree_end[i] == i` marks
            padding.
        position_ids: (N,) depth of each token; derived where absent.

    Returns:
        A `TreeTiles` to hand to `tree_attention` in place of a tree.
    """
    tiles = TreeTiles(subtree_end.to(torch.int32).contiguous(), position_ids)
    for block in (128, 64):
        tiles.lists(block)
    return tiles


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
            float32.
        k, v: the same with H_kv heads; H must be a multiple of H_kv.
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
            or (H, N); differentiable.
        impl: "triton", "triton_plain", "gluon", "fa4", "flex" or "reference"; None: "triton" on CUDA, "reference"
            elsewhere.

    Returns:
        Output in the layout and dtype of q, stored as (N, H, D), or `(output, lse)`. At padding rows both are 0, and
        so are all gradients.

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
    tiles = _metadata(tree, subtree_end, position_ids)
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
    options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    out, lse, unit = _run(impl, q, k, v, tiles, options, return_lse)
    out = out.transpose(0, 1).unsqueeze(0) if batched else out
    if not return_lse:
        return out
    lse = lse if unit == 1.0 else lse * unit
    return out, lse.unsqueeze(0) if batched else lse


def _run(
    impl: str, q: Tensor, k: Tensor, v: Tensor, tiles: TreeTiles, options: dict[str, Any], with_lse: bool
) -> tuple[Tensor, Tensor, float]:
    """(out (N, H, D), lse (H, N), the factor that makes lse natural) of a kernel."""
    if impl in TRITON:
        return _triton_call().tree_attention(impl, q, k, v, tiles, with_lse=with_lse, **options)  # type: ignore[no-any-return]
    if impl == "flex":
        from .kernels import flex

        depth = tiles.depth if options["sliding_window"] else None
        return (*flex.tree_attention(q, k, v, tiles.subtree_end, depth, tiles.derived, **options), 1.0)
    from .kernels import fa4

    return (*fa4.tree_attention(q, k, v, tiles.subtree_end, tiles.derived, **options), 1.0)


def _triton_call() -> Any:
    """`kernels.triton_call`, or an error that says what is missing: a torch without Triton (CPU, macOS, Windows), a
    Triton that is broken or too old."""
    try:
        from .kernels import triton_call
    except Exception as error:  # whatever a broken installation raises
        raise ImportError(
            f'impl="triton" needs the package triton, 3.6 or newer, and it cannot be imported here '
            f'({type(error).__name__}: {error}); impl="reference" needs torch alone'
        ) from error
    return triton_call


def _metadata(tree: Any, subtree_end: Tensor | None, position_ids: Tensor | None) -> TreeTiles:
    if (tree is None) == (subtree_end is None):
        raise ValueError("give either a tree or subtree_end=...")
    if isinstance(tree, TreeTiles):
        return tree
    # Kept with a PackedTree, so that all layers that are given the tree share it. Not while a compiler traces the call:
    # what it would leave there are tensors of its own; nor in inference mode, whose tensors cannot be trained on.
    tracing = torch.compiler.is_compiling()
    shared = position_ids is None and not tracing and not torch.is_inference_mode_enabled()
    keep = getattr(tree, "derived", None) if shared else None
    if keep is not None and "attention" in keep:
        kept: TreeTiles = keep["attention"]
        return kept
    given = None
    if tree is not None:
        subtree_end, given = tree.subtree_end, getattr(tree, "tiles", None)
        position_ids = getattr(tree, "position_ids", None) if position_ids is None else position_ids
    if not isinstance(subtree_end, Tensor):
        raise TypeError(
            f"subtree_end must be a torch tensor, not {type(subtree_end).__name__}; "
            "move the tree with tree.to(device) first"
        )
    if subtree_end.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"subtree_end must be int32 or int64, not {subtree_end.dtype}")
    made = TreeTiles(subtree_end.to(torch.int32).contiguous(), position_ids, given)
    if keep is not None:
        keep["attention"] = made
    return made


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
    n, heads, kv_heads = q.shape[length], q.shape[head], k.shape[head]
    if kv_heads == 0 or heads % kv_heads or v.shape[head] != kv_heads:
        raise ValueError(f"q heads must be a multiple of k heads, and k and v must have the same number: {shapes()}")
    if k.shape[-1] != q.shape[-1] or v.shape[-1] != q.shape[-1]:
        raise ValueError(f"q, k and v must have the same head size: {shapes()}")
    if k.shape[length] != n or v.shape[length] != n:
        raise ValueError(f"q, k and v must have the same length: {shapes()}")
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
