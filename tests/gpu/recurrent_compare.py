"""Recurrent layers on the GPU: inputs of the shapes that models have, the calls on a tree, on its samples alone and on
one chain. For `test_gpu_recurrent.py` and `benches/gpu_recurrent.py`.

One shape for each kind: flash-linear-attention measures its kernels anew for every shape, for minutes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import forests
import torch
from torch import Tensor
from torch.nn import functional

from treepack import recurrent

# Qwen3.5 and Qwen3-Next (16 key and 32 value heads of 128), Kimi-Linear, Nemotron-H (128 heads of 64, 8 groups)
SHAPES = {
    "delta": {"heads": 16, "value_heads": 32, "size": 128, "value_size": 128},
    "kda": {"heads": 32, "value_heads": 32, "size": 128, "value_size": 128},
    "linear": {"heads": 8, "value_heads": 128, "size": 128, "value_size": 64},
}
CHANNELS, WIDTH = 8192, 4  # of Qwen3.5's convolution


def chunk_sizes(kind: str) -> Any:
    """The chunks that a scan can be walked in."""
    from treepack.recurrent import chunked

    return {"delta": chunked.DELTA_SIZES, "kda": chunked.KDA_SIZES, "linear": chunked.LINEAR_SIZES}[kind]


def tree_of(end: Any) -> SimpleNamespace:
    """What the operators read of a tree, from `subtree_end` on the host; what they derive is kept with it."""
    return SimpleNamespace(subtree_end=torch.as_tensor(end).cuda(), derived={})


def rows_of(paths: list[Any]) -> tuple[Tensor, Tensor]:
    """(index (sum of lengths,), cu_seqlens) of the samples end to end."""
    lengths = torch.tensor([0, *map(len, paths)])
    return torch.cat([torch.as_tensor(path) for path in paths]).cuda(), lengths.cumsum(0).cuda()


def paths_of(end: Any) -> list[Any]:
    """The packed indices of every root-to-leaf path."""
    starts = [i for i in range(len(end)) if end[i] > i and (i == 0 or end[i] != end[i - 1])]
    nests: list[Any] = []
    stack: list[tuple[int, list[Any]]] = []
    for i, start in enumerate(starts):
        stop = starts[i + 1] if i + 1 < len(starts) else int(end[start])
        while stack and stack[-1][0] <= start:
            stack.pop()
        node: tuple[int, list[Any]] = (min(stop, int(end[start])) - start, [])
        (stack[-1][1] if stack else nests).append(node)
        stack.append((int(end[start]), node[1]))
    return forests.layout(nests).paths


def inputs(kind: str, n: int, seed: int = 0, dtype=torch.bfloat16) -> dict[str, Tensor]:
    """Leaves by name, (1, N, ...): decays per token as models have them, gates in float32."""
    shape = SHAPES[kind]
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, n, *sizes, generator=generator, device="cuda")

    heads, value_heads, size = shape["heads"], shape["value_heads"], shape["size"]
    made = {
        "q": normal(heads, size).to(dtype),
        "k": normal(heads, size).to(dtype),
        "v": normal(value_heads, shape["value_size"]).to(dtype),
        "g": functional.logsigmoid(normal(value_heads, *([size] if kind == "kda" else [])) + 3),
    }
    if kind == "linear":
        made["k"] = made["k"] / size**0.5
    else:
        made["beta"] = torch.sigmoid(normal(value_heads)).to(dtype)
    return {name: x.requires_grad_() for name, x in made.items()}


def on_tree(kind: str, leaves: dict[str, Tensor], tree: Any, impl: str | None = None) -> Tensor:
    if kind == "linear":
        return recurrent.tree_linear_attention(**leaves, tree=tree, scale=1.0, impl=impl)
    operator = recurrent.tree_gated_delta_rule if kind == "delta" else recurrent.tree_kda
    return operator(**leaves, tree=tree, qk_l2norm=True, impl=impl)


def alone(kind: str, leaves: dict[str, Tensor], cu_seqlens: Tensor | None) -> Tensor:
    """Sequences end to end, or one without `cu_seqlens`, by flash-linear-attention's own function."""
    if kind == "linear":
        from fla.ops.simple_gla import chunk_simple_gla

        groups = leaves["v"].shape[2] // leaves["q"].shape[2]
        repeated = {name: leaves[name].repeat_interleave(groups, dim=2) for name in "qk"}
        return chunk_simple_gla(**{**leaves, **repeated}, scale=1.0, cu_seqlens=cu_seqlens)[0]
    if kind == "delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(**leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0]
    from fla.ops.kda import chunk_kda

    return chunk_kda(**leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0]


def signs(like: Tensor, seed: int = 1) -> Tensor:
    """Gradients of +1 and -1: sums over samples stay exact in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    draws = torch.randint(0, 2, like.shape, generator=generator, device="cuda", dtype=torch.int8)
    return (draws * 2 - 1).to(like.dtype)


def samples_through(paths: list[Any], n: int) -> Tensor:
    """(N,): how many samples pass through each token; 0 at padding."""
    index, _ = rows_of(paths)
    return torch.bincount(index, minlength=n)


def tree_results(kind: str, leaves: dict[str, Tensor], tree: Any, paths: list[Any], impl=None) -> dict[str, Tensor]:
    """Output and gradients on a tree, of a loss that is a sum over samples."""
    out = on_tree(kind, leaves, tree, impl)
    weight = signs(out) * samples_through(paths, out.shape[1])[None, :, None, None].to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), weight)
    return {"o": out.detach(), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}}


def alone_results(kind: str, leaves: dict[str, Tensor], paths: list[Any]) -> dict[str, Tensor]:
    """The same from every sample alone; gradients summed over samples in float32."""
    index, cu_seqlens = rows_of(paths)
    rows = {name: x.detach()[:, index].requires_grad_() for name, x in leaves.items()}
    out = alone(kind, rows, cu_seqlens)
    n = leaves["v"].shape[1]
    weight = signs(out.new_empty(1, n, *out.shape[2:]))[:, index]
    gradients = torch.autograd.grad(out, list(rows.values()), weight)
    whole = out.new_zeros(n, *out.shape[2:])
    whole[index] = out[0].detach()  # equal in every sample up to the last bits: any of them
    found = {"o": whole[None]}
    for name, x in zip(rows, gradients, strict=True):
        total = torch.zeros(n, *x.shape[2:], device="cuda")
        found[f"d{name}"] = total.index_add_(0, index, x[0].float())[None]
        del x
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in float32."""
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm().clamp(min=1e-20))
