"""FlashAttention-3 from a folder: the wheel of a project that ships its kernels, unpacked (xformers 0.0.34 has them in
`flash_attn_3/_C.so`, built for CUDA 12; they run beside a torch for CUDA 13 where `libcudart.so.12` lies in the same
folder, or where the system finds it)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load(folder: str) -> None:
    """Registers the operators of a folder.

    Raises:
        OSError: they are not there, or do not load.
    """
    found = sorted(Path(folder).rglob("flash_attn_3/_C*.so"))
    if not found:
        raise FileNotFoundError(f"no flash_attn_3/_C*.so below {folder}")
    for runtime in sorted(Path(folder).rglob("libcudart.so.12*"))[:1]:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(found[0]))


class Varlen(torch.autograd.Function):
    """Causal attention of sequences one after another: q (N, H, D), k (M, H_kv, D), v (M, H_kv, D_V)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], window: int) -> Tensor:
        options = lengths | {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": True}
        options |= {"window_size_left": window, "window_size_right": 0}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        torch.ops.flash_attn_3.bwd(dout.contiguous(), q, k, v, out, lse, **named, **ctx.options)
        return *gradients, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, window: int) -> Tensor:
    """(N, H, D_V) of sequences; `window`: keys before a query that it sees, -1: all."""
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return Varlen.apply(q, k, v, lengths, window)
