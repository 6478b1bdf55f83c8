"""The peers of `gpu_attention.py`: each makes, for one tree, a function of (q, k, v) that returns the attention
output in (N, H, D) (or of its own inputs).

    peer(tree) -> (attention, inputs or None, bytes of metadata)

`inputs` are the leaves that the peer runs on where they are not the packed q, k, v (each sample alone runs on all
raw tokens). Peers of `NO_SINKS` are measured without the sinks of a shape, which the table says.
A peer that cannot run raises `Unavailable` with the reason, which the table prints.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from pathlib import Path
from typing import NamedTuple

import flash3
import numpy as np
import torch
from head_shapes import Shape
from torch import Tensor


class Unavailable(Exception):
    """Why a peer does not run here."""


class Case(NamedTuple):
    """One tree on the GPU with its leaves."""

    name: str
    end: Tensor  # (N,) int32
    depth: np.ndarray  # (N,)
    paths: list[np.ndarray]
    q: Tensor  # (1, H, N, D) view of (1, N, H, D)
    k: Tensor
    v: Tensor  # (1, H_kv, N, D_V)
    sinks: Tensor | None  # (H,), constant
    shape: Shape
    options: object  # the command line

    def extras(self) -> dict:
        """The options of `tree_attention` that the shape asks for."""
        return {"sliding_window": self.shape.window, "sinks": self.sinks}


def flat(x: Tensor) -> Tensor:
    """(1, H, N, D) -> (N, H, D), a view."""
    return x.squeeze(0).transpose(0, 1)


def triton_kernels(case: Case, impl: str = "triton"):
    from treepack.attention import tree_attention, tree_tiles
    from treepack.attention.rule import on_hopper

    tiles = tree_tiles(case.end)
    nbytes = 4 * len(case.end)
    if impl in ("triton", "gluon") and on_hopper(case.end):
        nbytes += 4 * (tiles.schedule().numel() + tiles.dkv_items(case.q.shape[1], case.k.shape[1]).numel())
    for block in (128, 64):
        rows, _ = tiles.lists(block)
        nbytes += 4 * (
            rows.numel() + int(2 * rows[:, 1].sum() + rows[:, 3].sum())
        )  # the compact lists, as the host writes them
    return lambda q, k, v: flat(tree_attention(q, k, v, tiles, impl=impl, **case.extras())), None, nbytes


def triton_plain(case: Case):
    return triton_kernels(case, "triton_plain")


def gluon(case: Case):
    return triton_kernels(case, "gluon")


def flex(case: Case):
    from treepack.attention import tree_attention, tree_tiles
    from treepack.attention.flex import block_mask

    # The timing runs one backward pass again and again, which donated buffers do not survive.
    torch._functorch.config.donated_buffer = False
    tiles = tree_tiles(case.end)
    mask = block_mask(case.end, tiles.depth() if case.shape.window else None, case.shape.window)
    tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    nbytes = sum(x.numel() * x.element_size() for x in tensors) * 2 + 4 * len(
        case.end
    )  # the same again, transposed, for the backward pass
    return lambda q, k, v: flat(tree_attention(q, k, v, tiles, impl="flex", **case.extras())), None, nbytes


def fa4(case: Case):
    from treepack.attention import tree_attention, tree_tiles
    from treepack.attention.fa4 import launch as module

    try:
        module.require(case.q, case.v, case.shape.window, None)
    except (ImportError, RuntimeError, ValueError) as error:
        raise Unavailable(str(error)) from error
    tiles = tree_tiles(case.end)
    lists = [*module.block_lists(case.end, 128), *module.block_lists(case.end, 64, transpose=True)]
    return (
        lambda q, k, v: flat(tree_attention(q, k, v, tiles, impl="fa4", **case.extras())),
        None,
        sum(4 * x.numel() for x in lists) + 4 * len(case.end),
    )


def _varlen(window: int | None = None):
    """FlashAttention-2 of sequences one after another."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch.nn.attention.varlen: {error}") from error
    names = inspect.signature(varlen_attn).parameters
    if window and "window_size" not in names:
        raise Unavailable("this torch.nn.attention.varlen has no window")
    options = {"window_size": (window - 1 if window else -1, 0)} if "window_size" in names else {"is_causal": True}
    options |= {"enable_gqa": True} if "enable_gqa" in names else {}
    return lambda *call: varlen_attn(*call, **options)


def _varlen2(case: Case):
    """The same for a case; values that are smaller than keys are padded, as Hugging Face's models do for it."""
    size, value_size = case.shape.sizes
    if value_size > size:
        raise Unavailable("FlashAttention-2 takes one head size")
    attend = _varlen(case.shape.window)
    if value_size == size:
        return attend

    def padded(q, k, v, *lengths):
        return attend(q, k, torch.nn.functional.pad(v, (0, size - value_size)), *lengths)[..., :value_size]

    return padded


def _varlen3(case: Case):
    """The same by FlashAttention-3."""
    if not case.options.fa3:
        raise Unavailable("no --fa3 FOLDER")
    try:
        flash3.load(case.options.fa3)
    except OSError as error:
        raise Unavailable(str(error)) from error
    left = case.shape.window - 1 if case.shape.window else -1
    return lambda *call: flash3.attend(*call, left)


def _offsets(lengths, device) -> tuple[Tensor, int]:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device), int(max(lengths))


def gathered(case: Case, varlen=_varlen2):
    """TRL's method: the keys and values of every path gathered, each packed token once as a query."""
    attend, device = varlen(case), case.end.device
    queries, seen = [], 0
    for path in case.paths:  # the tokens that this path is the first to pass are its last ones, in packed order
        queries.append(int((path >= seen).sum()))
        seen = int(path[-1]) + 1
    index = torch.from_numpy(np.concatenate(case.paths)).to(device)
    (cu_q, max_q), (cu_k, max_k) = _offsets(queries, device), _offsets([len(path) for path in case.paths], device)
    assert cu_q[-1] == len(case.end)
    nbytes = index.numel() * 4 + 2 * 4 * len(cu_q)
    return lambda q, k, v: attend(flat(q), flat(k)[index], flat(v)[index], cu_q, cu_k, max_q, max_k), None, nbytes


def gathered_fa3(case: Case):
    return gathered(case, _varlen3)


def alone(case: Case, varlen=_varlen2):
    """Every sample alone, prefixes repeated, on all raw tokens."""
    attend, device = varlen(case), case.end.device
    index = torch.from_numpy(np.concatenate(case.paths)).to(device)
    cu, longest = _offsets([len(path) for path in case.paths], device)
    inputs = [flat(x.detach())[index].contiguous().requires_grad_() for x in (case.q, case.k, case.v)]
    return lambda q, k, v: attend(q, k, v, cu, cu, longest, longest), inputs, 4 * len(cu)


def alone_fa3(case: Case):
    return alone(case, _varlen3)


def cudnn(case: Case):
    """Dense causal attention by cuDNN: one sample only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(case.paths) > 1 or case.shape.window:
        raise Unavailable("dense causal: a chain without a window only")

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return flat(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    return attend, None, 0


def _plain(case: Case) -> None:
    if case.shape.window or case.shape.sinks or case.shape.sizes.head != case.shape.sizes.value:
        raise Unavailable("it has one head size, no window and no sinks")


def areal(case: Case):
    """AReaL 1.0.4's Triton kernel, loaded from `areal/models/tree_attn/triton_kernel.py` alone; its bit mask made
    here on the GPU."""
    if not case.options.areal:
        raise Unavailable("no --areal FILE")
    _plain(case)
    n = len(case.end)
    if n > 30_000:
        raise Unavailable(f"its bit mask needs {n * n // 8 >> 20} MiB")
    spec = importlib.util.spec_from_file_location("areal_tree_kernel", case.options.areal)
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, "TreeAttentionFunction"):
        spec.loader.exec_module(module)
    words = -(-n // 64)
    ends = torch.zeros(words * 64, dtype=torch.int32, device="cuda")
    ends[:n] = case.end
    query = torch.arange(n, device="cuda", dtype=torch.int32)[:, None]
    mask = torch.zeros(n, words, dtype=torch.int64, device="cuda")
    for bit in range(64):
        key = torch.arange(words, device="cuda", dtype=torch.int32)[None] * 64 + bit
        mask |= ((key <= query) & (query < ends[bit::64][None])).long() << bit
    rows = torch.nn.functional.pad(mask != 0, (0, 0, 0, -n % 128)).view(-1, 128, words).any(1)

    def lists(block: Tensor):
        offsets = torch.zeros(1, len(block) + 1, dtype=torch.int32, device="cuda")
        offsets[0, 1:] = block.sum(1).cumsum(0)
        return block.nonzero()[:, 1].to(torch.int32).contiguous(), offsets

    (kv, kv_offsets), (qi, q_offsets) = lists(rows), lists(rows.T)
    arguments = (mask[None], kv, kv_offsets, qi, q_offsets)
    scale = 1 / math.sqrt(case.q.shape[-1])
    nbytes = sum(x.numel() * x.element_size() for x in arguments)
    return lambda q, k, v: flat(module.TreeAttentionFunction.apply(q, k, v, *arguments, scale)), None, nbytes


def study(case: Case):
    """The plain Triton study (`kernels.py` in --study), at the tile sizes that its table names best."""
    if not case.options.study:
        raise Unavailable("no --study FOLDER")
    _plain(case)
    if case.options.study not in sys.path:
        sys.path.insert(0, case.options.study)
    import kernels

    end_host = case.end.cpu().numpy()
    n = len(end_host)
    lists = {block: kernels.block_lists(end_host, n, *block) for block in ((128, 128), (64, 64))}

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = kernels.fwd(q, k, v, case.end, lists[128, 128], 128, 128, 8, 2)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            small = lists[64, 64]
            return kernels.bwd(q, k, v, out, lse, dout.contiguous(), case.end, 64, 64, 4, 2, 64, 64, 4, 2, small, small)

    nbytes = 4 * n + sum(x.numel() * 4 for block in lists.values() for x in block.values() if isinstance(x, Tensor))
    return lambda q, k, v: Function.apply(flat(q), flat(k), flat(v)), None, nbytes


PEERS = {
    "triton": triton_kernels, "gluon": gluon, "triton_plain": triton_plain, "study": study, "fa4": fa4, "flex": flex,
    "areal": areal, "gathered": gathered, "gathered_fa3": gathered_fa3, "alone": alone, "alone_fa3": alone_fa3,
    "cudnn": cudnn,
}  # fmt: skip
NO_SINKS = ("gathered", "gathered_fa3", "alone", "alone_fa3", "cudnn")


def real_trees(folder: str | None) -> dict[str, Path]:
    """Rows packed from real rollouts: every .npz in a folder with `subtree_end`, and `position_ids` for nothing but
    a check."""
    return {path.stem: path for path in sorted(Path(folder).glob("*.npz"))} if folder else {}


def paths_of(end: np.ndarray) -> list[np.ndarray]:
    """The packed indices of every root-to-leaf path, from subtree_end alone (leaves: tokens whose subtree ends right
    after them)."""
    paths, stack = [], []
    for i, last in enumerate(end.tolist()):
        while stack and end[stack[-1]] <= i:
            stack.pop()
        if last <= i:
            continue  # padding
        stack.append(i)
        if last == i + 1:
            paths.append(np.array(stack))
    return paths
