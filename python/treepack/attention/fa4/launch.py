# mypy: ignore-errors
"""Tree attention by FlashAttention-4 (`flash_attn.cute`): the tree as its mask, our tiles as its block sparsity.

Extra `treepack[fa4]`; imported only when chosen (its import takes seconds, its first call compiles for seconds, once
for all lengths). Hopper only here.
Its backward pass adds dQ in the order in which tiles finish, so unlike `impl="triton"` it is not bit-equal from run
to run.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..tiles import tile_relation

_INSTALL = "pip install 'treepack[fa4]'"


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    cache: dict[Any, Any],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out (N, H, D), lse (H, N) natural)`; `cache` keeps the block lists of this tree between layers.

    Raises:
        ImportError: the packages are missing or of another version; RuntimeError: no Hopper GPU; ValueError,
        TypeError: what it does not take.
    """
    require(q, v, sliding_window, softcap)
    if "fa4" not in cache:
        query_block = 128 if q.shape[-1] <= 64 else 64  # FlashAttention-4's own backward tile at this head size
        real = torch.arange(subtree_end.shape[0], device=subtree_end.device) < subtree_end
        cache["fa4"] = (
            block_lists(subtree_end, 128), block_lists(subtree_end, query_block, transpose=True), query_block,
            None if bool(real.all()) else real)  # fmt: skip
    forward, backward, query_block, real = cache["fa4"]
    out, lse = _Function.apply(q, k, v, subtree_end, scale, forward, backward, query_block, real)
    if sinks is not None:
        if real is None:
            real = torch.ones_like(subtree_end, dtype=torch.bool)
        with_sinks = torch.where(real, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]), 0.0)
        out = (out * torch.exp(lse - with_sinks).T[..., None]).to(q.dtype)
        lse = with_sinks
    return out, lse


def block_lists(subtree_end: Tensor, query_block: int, *, transpose: bool = False) -> tuple[Tensor, ...]:
    """(partial counts, partial indices, full counts, full indices), (1, 1, rows) and (1, 1, rows, widest) int32, key
    tiles of 128.

    Rows are query tiles, or key tiles when transposed (what the backward pass walks).
    """
    lists: list[Tensor] = []
    for mask in tile_relation(subtree_end, query_block, 128):
        mask = mask.T if transpose else mask
        counts = mask.sum(1)
        widest = max(1, int(counts.max()))  # once per tree: narrow tables instead of (tiles, tiles)
        order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)[:, :widest]
        # A copy with the strides of its shape: a table of one column counts as contiguous with any, and is refused.
        table = order.to(torch.int32)[None, None].clone(memory_format=torch.contiguous_format)
        lists += [counts.to(torch.int32)[None, None], table]
    return tuple(lists)


class _Function(torch.autograd.Function):
    @staticmethod
    @torch.compiler.disable
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        subtree_end: Any,
        scale: Any,
        forward: Any,
        backward: Any,
        query_block: Any,
        real: Any,
    ) -> Any:
        interface, sparse, mask = _modules()
        out, lse = interface._flash_attn_fwd(
            q[None], k[None], v[None], softmax_scale=scale, mask_mod=mask, aux_tensors=[subtree_end],
            block_sparse_tensors=sparse(*forward, block_size=(128, 128)), return_lse=True)[:2]  # fmt: skip
        out, lse = out[0], lse[0]
        if real is not None:  # a pass over the output, only where there is padding
            out = torch.where(real[:, None, None], out, 0.0)
            lse = torch.where(real, lse, 0.0)  # finite at padding, so that exp(s - lse) is 0 there
        ctx.save_for_backward(q, k, v, out, lse, subtree_end, *backward)
        ctx.scale, ctx.query_block = scale, query_block
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        interface, sparse, mask = _modules()
        q, k, v, out, lse, subtree_end, *lists = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 9
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        more = {} if dlse is None else {"dlse": dlse[None].contiguous()}
        dq, dk, dv = interface._flash_attn_bwd(
            q[None], k[None], v[None], out[None], dout[None], lse[None], softmax_scale=ctx.scale, mask_mod=mask,
            aux_tensors=[subtree_end],
            block_sparse_tensors=sparse(*lists, block_size=(ctx.query_block, 128)), **more)[:3]  # fmt: skip
        return dq[0], dk[0], dv[0], *(None,) * 6


@functools.cache
def _modules() -> tuple[Any, Any, Any]:
    """(flash_attn.cute.interface, its BlockSparseTensorsTorch, our mask)."""
    try:
        from flash_attn.cute import interface
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        from .mask import tree_mask
    except ImportError as error:
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(f'impl="fa4" needs FlashAttention-4: {error}. Install it with {_INSTALL}') from error
    missing = [
        name for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess") if not hasattr(interface, name)
    ]
    if missing:
        raise ImportError(
            f'impl="fa4": this flash_attn.cute has no {" or ".join(missing)}. '
            f"Install the tested version with {_INSTALL}"
        )
    interface._bwd_preprocess = _finished_first(interface._bwd_preprocess)
    return interface, BlockSparseTensorsTorch, tree_mask


def _finished_first(preprocess: Any) -> Any:
    """Makes the backward kernel start after its preprocess has ended.

    Its launch lets it overlap with the kernel before it; the dense form then waits for lse and delta, the block-sparse
    form of 4.0.0b12 does not, and reads what an earlier call left there (wrong gradients, now and then, of small
    trees). A kernel of torch's between the two starts after the one and ends before the other.
    """

    @functools.wraps(preprocess)
    def run(out: Any, dout: Any, delta: Any, *rest: Any, **options: Any) -> None:
        preprocess(out, dout, delta, *rest, **options)
        delta.flatten()[:1].neg()

    return run


def require(q: Tensor, v: Tensor, sliding_window: int | None, softcap: float | None) -> None:
    """Raises as `tree_attention` does where FlashAttention-4 cannot take this call here; compiles nothing."""
    unsupported = [
        name for name, value in (("sliding_window", sliding_window), ("softcap", softcap)) if value is not None
    ]
    if unsupported:
        raise ValueError(f'impl="fa4" does not take {" and ".join(unsupported)}; impl="triton" does')
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f'impl="fa4" takes bfloat16 and float16, not {q.dtype}')
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= 128:
        raise ValueError(
            f'impl="fa4" takes head sizes that are multiples of 8, up to 128, not {q.shape[-1]}; '
            'impl="triton" goes to 256'
        )
    if v.shape[-1] != q.shape[-1]:
        raise ValueError(
            f'impl="fa4" takes q, k and v of one head size, not {q.shape[-1]} for q and k and {v.shape[-1]} for v; '
            'impl="triton" and impl="flex" take two'
        )
    if not q.is_cuda:
        raise RuntimeError(f'impl="fa4" needs a Hopper GPU, q is on {q.device}')
    capability = torch.cuda.get_device_capability(q.device)
    if capability[0] != 9:
        raise RuntimeError(
            f'impl="fa4" is tested on Hopper (compute capability 9.0) only, '
            f"this GPU has {capability[0]}.{capability[1]}"
        )
    _modules()
