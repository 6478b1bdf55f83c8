# mypy: ignore-errors
"""Tree attention on a GPU as two operators of torch, `treepack::tree_attention` and its backward, on one of two sets of
kernels: the portable Triton ones (`triton/launch.py`) or the Gluon ones for Hopper (`hopper/launch.py`).

Operators, so that `torch.compile`, both kinds of activation checkpointing and CUDA graphs see one opaque call whose
metadata are plain int32 tensors. Nothing here waits for the device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .rule import AUTO, GLUON, LOOPED, SPLIT
from .triton import launch as portable
from .triton.launch import device_limits

LN2 = 0.6931471805599453
# Set by tests and benches to force both forms of dK/dV: None = the rules in `_split_heads` and, on Hopper,
# `tiles.backward_items`.
split_heads_override: bool | None = None


def _processors(x: Tensor) -> int:
    """Multiprocessors of the device of x; 1 on the CPU."""
    return device_limits(x.device.index)[1] if x.is_cuda else 1


def _hopper_views(kernels: int, *tensors: Tensor) -> list[Any] | None:
    """The tensors as the Hopper kernels read them, or None: the portable kernels run."""
    if kernels not in (AUTO, GLUON):
        return None
    from .hopper import launch as hopper_launch

    views = hopper_launch.views(*tensors)
    if views is None and kernels == GLUON:
        strides = ", ".join(str(tuple(x.stride())) for x in tensors)
        raise ValueError(
            f'impl="gluon" reads (N, H, D) tensors whose rows start on 16 bytes and whose heads lie side by side or '
            f'below each other, not strides {strides}; impl="triton" takes any'
        )
    return views


def _split_heads(n: int, block: int, heads: int, kv_heads: int, slots: int) -> bool:
    """Whether the portable dK/dV runs one program per query head (float32 parts, then a sum over the group) instead of
    looping over the group.

    The programs of the looped form are `key tiles x kv_heads`, and the one of the shared prompt, which every query
    sees, is far longer than the mean: it decides the time when there are few rounds of programs on the chip, which
    runs `slots` at once. The number of rounds below which splitting pays grows with the number of tiles.
    """
    if heads == kv_heads:
        return False
    if split_heads_override is not None:
        return split_heads_override
    tiles = -(-n // block)
    return tiles * kv_heads < slots * (1.5 + tiles / 64)


def _scales(scale: float, softcap: float) -> tuple[float, float]:
    """(factor on q.k, factor on its tanh) that give base-2 logits; the second is unused without a cap."""
    return (scale / softcap, softcap / LN2) if softcap > 0 else (scale / LN2, 1.0)


def _row_width(n: int) -> int:
    """Floats from one head's row of `lse` or `delta` to the next: whole 16 bytes, as descriptors want."""
    return max(4, -(-n // 4) * 4)


def _padded_rows(x: Tensor) -> Tensor:
    """A float32 (H, N) tensor with rows `_row_width` apart; a copy only where autograd or a compiler made another."""
    heads, n = x.shape
    width = _row_width(n)
    if x.stride(1) == 1 and x.stride(0) == width and x.data_ptr() % 16 == 0:
        return x
    padded = x.new_zeros(heads, width)
    padded[:, :n] = x
    return padded[:, :n]


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that a kernel fills. Every buffer comes from here, so that a test can put guards around it."""
    return like.new_empty(shape, dtype=dtype or like.dtype)


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, subtree_end: Tensor, depth: Tensor | None,
    rows128: Tensor, items128: Tensor, rows64: Tensor, items64: Tensor, rows_window: Tensor | None,
    items_window: Tensor | None, schedule: Tensor | None, dkv_items: Tensor | None,
    scale: float, window: int, softcap: float, kernels: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (N - P, H, D_V), lse2 (H, N) float32) for q (N - P, H, D), k (N, H_kv, D) and v (N, H_kv, D_V) of any
    strides.

    The queries are the last rows; P, the rows before them, is a multiple of 128. lse2 is 0 there.
    `window` and `softcap` are 0 where unset. `*_window` are the transposed 64-lists, read by the portable backward pass
    when a window is set; `schedule` and `dkv_items`, of the window, are read by the Hopper kernels. `kernels`: of
    `rule`.
    """
    queries, heads, _ = q.shape
    n = k.shape[0]
    out = _empty(q, queries, heads, v.shape[-1])
    lse = _empty(q, heads, _row_width(n), dtype=torch.float32)[:, :n]
    if n > queries:
        lse[:, : n - queries].zero_()
    if queries == 0:
        return out, lse
    factor, cap = _scales(scale, softcap)
    with on(q):
        views = _hopper_views(kernels, q, k, v)
        if views is not None:
            from .hopper import launch as hopper_launch

            hopper_launch.forward(
                views, out, lse, sinks, subtree_end, depth, rows128, items128, schedule, factor, cap, window,
                softcap > 0, _processors(q)
            )  # fmt: skip
        else:
            portable.forward(
                q, k, v, out, lse, sinks, subtree_end, depth, rows128, items128, factor, cap, window, softcap > 0
            )
    return out, lse


tree_attention_forward = torch.library.custom_op("treepack::tree_attention", forward_pass, mutates_args=())


@tree_attention_forward.register_fake
def _(q, k, v, *inputs):
    n, heads = k.shape[0], q.shape[1]
    out = q.new_empty(q.shape[0], heads, v.shape[2])
    return out, q.new_empty(heads, (n + 3) // 4 * 4, dtype=torch.float32)[:, :n]


def backward_pass(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, subtree_end: Tensor,
    depth: Tensor | None,
    rows128: Tensor, items128: Tensor, rows64: Tensor, items64: Tensor, rows_window: Tensor | None,
    items_window: Tensor | None, schedule: Tensor | None, dkv_items: Tensor | None,
    scale: float, window: int, softcap: float, kernels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, delta): contiguous, of the shapes of q, k and v, and the float32 (H, N) row sums that a gradient of
    sinks needs."""
    queries, heads, _ = q.shape
    n, kv_heads, _ = k.shape
    dq, dk, dv = (_empty(x, *x.shape) for x in (q, k, v))
    delta = _empty(lse, heads, _row_width(n))[:, :n]
    if queries == 0:
        return dq, dk.zero_(), dv.zero_(), delta
    factor, cap = _scales(scale, softcap)
    if portable.is_scattered(dout):  # an expanded scalar, off 16 bytes, ...; q, k and v are never copied
        dout = dout.clone(memory_format=torch.contiguous_format)
    dlse = None if dlse is None else dlse.contiguous()
    lse = _padded_rows(lse)
    views = _hopper_views(kernels, q, k, v, dout)
    with on(q):
        if views is not None:
            from .hopper import launch as hopper_launch

            slots = hopper_launch.split_tiles(dkv_items, n, heads, kv_heads)
            parts = tuple(_empty(lse, slots, heads, 128, width) for width in hopper_launch.widths(views))
            options = (depth, factor, cap, window, softcap > 0, scale)
            hopper_launch.dq(views, out, dq, lse, delta, dlse, subtree_end, rows128, items128, schedule, *options)
            hopper_launch.dkv(views, dk, dv, parts, lse, delta, subtree_end, schedule, dkv_items, *options)
            return dq, dk, dv, delta
        split = kernels == SPLIT
        if kernels not in (LOOPED, SPLIT):
            split = _split_heads(n, portable.dkv_tile(q, v, window).block_n, heads, kv_heads, 2 * _processors(q))
        parts = [_empty(lse, n, heads, x.shape[-1]) for x in (k, v)] if split else [dk, dv]
        options = (factor, cap, window, softcap > 0, scale)
        above = n - queries
        portable.delta(out, dout, None if dlse is None else dlse[:, above:].contiguous(), delta[:, above:])
        portable.dkv(
            q, k, v, dout, *parts, lse, delta, subtree_end, depth, rows_window if window else rows64,
            items_window if window else items64, *options, split)  # fmt: skip
        portable.dq(q, k, v, dout, dq, lse, delta, subtree_end, depth, (rows128, items128, rows64, items64), *options)
        if split:  # in a fixed order
            for part, total in zip(parts, (dk, dv), strict=True):
                total.copy_(part.view(n, kv_heads, heads // kv_heads, -1).sum(2))
    return dq, dk, dv, delta


tree_attention_backward = torch.library.custom_op("treepack::tree_attention_backward", backward_pass, mutates_args=())


@tree_attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, *inputs):
    heads, n = lse.shape
    delta = lse.new_empty(heads, (n + 3) // 4 * 4)[:, :n]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), delta


OPTIONS = 4  # the last inputs of both operators are numbers


def _save(ctx, inputs, output) -> None:
    ctx.options = inputs[-OPTIONS:]
    ctx.save_for_backward(*inputs[:-OPTIONS], *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, sinks, *metadata, out, lse = ctx.saved_tensors
    nothing = (None,) * (len(metadata) + OPTIONS)
    if dout is None and dlse is None:
        return (None, None, None, None, *nothing)
    dout = torch.zeros_like(out) if dout is None else dout
    run = backward_pass if is_plain(q) else tree_attention_backward
    dq, dk, dv, delta = run(dout, dlse, q, k, v, out, lse, *metadata, *ctx.options)
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        # A sink is a key of value 0: dS = P_sink * (0 - delta), at the rows that see anything.
        subtree_end = metadata[0]
        n, above = k.shape[0], k.shape[0] - q.shape[0]
        p = torch.exp2(sinks.float()[:, None] / LN2 - lse[:, above:])
        real = torch.arange(above, n, device=subtree_end.device) < subtree_end[above:]
        dsinks = -torch.where(real, p * delta[:, above:], 0.0).sum(1).to(sinks.dtype)
    return (dq, dk, dv, dsinks, *nothing)


tree_attention_forward.register_autograd(_backward, setup_context=_save)


class _Direct(torch.autograd.Function):
    """The operator without the dispatcher, which costs as much as a short kernel. Without `setup_context`: with it,
    torch inspects the signature of `forward` at every call, for 25 us."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward_pass(*inputs)
        _save(ctx, inputs, output)
        return output

    # Second derivatives raise instead of leaving a part out.
    backward = staticmethod(once_differentiable(_backward))


def is_plain(x: Tensor) -> bool:
    """Whether nothing looks at operators: no compiler, no dispatch mode, no transform of torch.func, no tensor
    subclass."""
    if type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._are_functorch_transforms_active()


def attend(training: bool, q: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """`tree_attention_forward`, by the shortest way; `training`: gradients will be asked for."""
    if not is_plain(q):
        return tree_attention_forward(q, *inputs)
    return _Direct.apply(q, *inputs) if training else forward_pass(q, *inputs)


def on(x: Tensor):
    """Makes the device of x the current one for a launch (Triton launches on the current device)."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _nowhere
    return torch.cuda.device(x.device)


class _Nowhere:
    def __enter__(self): ...

    def __exit__(self, *error): ...


_nowhere = _Nowhere()


@torch.library.custom_op("treepack::tile_lists", mutates_args=())
def tile_lists(
    subtree_end: Tensor, depth: Tensor | None, block: int, window: int, transpose: bool, above: int = 0
) -> tuple[Tensor, Tensor]:
    """`tiles.tile_lists` as one operator; window 0 = none."""
    from . import tiles

    # Kept with the tree: a pass under torch.inference_mode() must not leave tensors that training cannot save.
    with torch.inference_mode(False):
        options = {"window": window or None, "transpose": transpose, "above": above}
        return tiles.tile_lists(subtree_end, block, depth=depth, **options)


@tile_lists.register_fake
def _(subtree_end, depth, block, window, transpose, above=0):
    count = (subtree_end.shape[0] + block - 1) // block
    return subtree_end.new_empty(count, 4, dtype=torch.int32), subtree_end.new_empty(
        count * (count + 1) // 2 + 3, dtype=torch.int32
    )


@torch.library.custom_op("treepack::tile_schedule", mutates_args=())
def tile_schedule(subtree_end: Tensor, rows: Tensor, above: int = 0) -> Tensor:
    """`tiles.tile_schedule` as one operator."""
    from . import tiles

    with torch.inference_mode(False):
        return tiles.tile_schedule(subtree_end, rows, above)


@tile_schedule.register_fake
def _(subtree_end, rows, above=0):
    return rows.new_empty(rows.shape[0], 4)


@torch.library.custom_op("treepack::window_schedule", mutates_args=())
def window_schedule(subtree_end: Tensor, depth: Tensor, window: int, rows: Tensor, above: int = 0) -> Tensor:
    """`tiles.window_schedule` as one operator."""
    from . import tiles

    with torch.inference_mode(False):
        return tiles.window_schedule(subtree_end, depth, window, rows, above)


@window_schedule.register_fake
def _(subtree_end, depth, window, rows, above=0):
    from . import tiles

    return rows.new_empty(tiles.schedule_capacity(rows.shape[0], (subtree_end.shape[0] + 63) // 64))


@torch.library.custom_op("treepack::backward_items", mutates_args=())
def backward_items(schedule: Tensor, heads: int, kv_heads: int, above: int = 0) -> Tensor:
    """`tiles.backward_items` as one operator, for the device of the schedule."""
    from . import tiles

    with torch.inference_mode(False):
        return tiles.backward_items(schedule, heads, kv_heads, _processors(schedule), split_heads_override, above)


@backward_items.register_fake
def _(schedule, heads, kv_heads, above=0):
    from . import tiles

    count = schedule.shape[0]
    most = tiles.most_split(count, heads, kv_heads, _processors(schedule), split_heads_override)
    return schedule.new_empty(1 + count * kv_heads + most * (heads - kv_heads))
