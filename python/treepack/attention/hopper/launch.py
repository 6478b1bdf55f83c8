# mypy: ignore-errors
"""Launches of the Hopper kernels: descriptors, grids, and a launch path of their own, as Triton's takes longer than a
short kernel runs: with five descriptors, whose layouts it prints at every call, 0.45 ms a forward pass instead of 0.16.

Nothing but what is in `_Kernel`'s key can differ here (integers and the alignment of pointers are not specialised on),
so a compilation is kept under that key and launched directly.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.common import COLUMNS, ROWS, matrix_view
from . import table
from .dkv import dkv_kernel, sum_kernel
from .dkv_wide import wide_dkv_kernel
from .dq import dq_kernel
from .forward import forward_kernel

# Bytes of K and V that forward programs read side by side at most: they come from the L2 cache, of 50 MB.
SECTION_BYTES = 20 << 20


_FIELDS = ("base", "shape", "strides", "block_shape", "layout")


class _Descriptor(TensorDescriptor):
    """A `TensorDescriptor` without its checks. What newer versions add has a default, which lies with the class."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any):
        self.base, self.shape, self.strides, self.block_shape, self.layout = base, shape, strides, block_shape, layout

    def checked(self) -> TensorDescriptor:
        return TensorDescriptor(*(getattr(self, name) for name in _FIELDS))


def launch_is_known(descriptor: type = TensorDescriptor, compiled: type = CompiledKernel) -> bool:
    """Whether the installed Triton launches what it compiled as this file does: by `compiled[grid](...)`, and reading
    nothing of a descriptor that must be given, but for `_FIELDS`. Else its own launch runs, slower."""
    given = [x.name for x in dataclasses.fields(descriptor) if x.default is x.default_factory is dataclasses.MISSING]
    return tuple(given) == _FIELDS and hasattr(compiled, "__getitem__")


KNOWN = launch_is_known()


class _Kernel:
    """A Gluon kernel and its compilations, one for each device, dtype, head size, axes of the descriptors and set of
    constants."""

    def __init__(self, function: Any):
        self.function = function
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.first = threading.Lock()

    def launch(self, programs: int, like: Tensor, arguments: list[Any], constants: dict[str, Any]) -> None:
        key = (like.device.index, like.dtype, len(arguments[0].shape), *constants.values())
        compiled = self.compiled.get(key)
        if compiled is not None and KNOWN:
            compiled[programs, 1, 1](*arguments, *constants.values())
            return
        arguments = [x.checked() if isinstance(x, _Descriptor) else x for x in arguments]
        with self.first:  # one thread at a time: Triton lets others see a kernel before it is loaded
            self.compiled[key] = self.function[(programs,)](*arguments, **constants, **table.OPTIONS)


forward_launch, dq_launch, dkv_launch, wide_dkv_launch, sum_launch = map(
    _Kernel, (forward_kernel, dq_kernel, dkv_kernel, wide_dkv_kernel, sum_kernel)
)


class View(NamedTuple):
    """A (N, H, D) tensor as descriptors read it: as one matrix, or by heads, (H, N, D)."""

    tensor: Tensor
    shape: list[int]
    strides: list[int]
    layout: int

    def tiles(self, rows: int) -> _Descriptor:
        """In tiles of `rows` rows and the next power of two of columns; those that are not there are 0."""
        block = [1] * (len(self.shape) - 2) + [rows, table.width(self.tensor.shape[-1])]
        layout = table.matrix(block[-1], self.tensor.dtype, len(block))
        return _Descriptor(self.tensor, self.shape, self.strides, block, layout)


def views(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[View] | None:
    """The tensors as descriptors read them where they lie, or None where one of them cannot be read so."""
    heads = table.by_heads(q.shape[-1], v.shape[-1])
    found = [_by_heads(x) if heads else _as_matrix(x) for x in (q, k, v, *more)]
    return None if None in found else found  # type: ignore[return-value]


def _as_matrix(x: Tensor) -> View | None:
    found = matrix_view(x)
    if found is None:
        return None
    shape, stride, layout = found
    return View(x, shape, [stride, 1], layout)


def _by_heads(x: Tensor) -> View | None:
    n, heads, size = x.shape
    # The stride of an axis of one is anything.
    of_row, of_head = (heads * size if n == 1 else x.stride(0)), (size if heads == 1 else x.stride(1))
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in (of_row, of_head))
    if not aligned or x.stride(2) != 1 or x.data_ptr() % 16:
        return None
    return View(x, [heads, n, size], [of_head, of_row, 1], COLUMNS)


def _target(x: Tensor, like: View) -> _Descriptor:
    """What a consumer writes: tiles of 64 rows of a contiguous (N, H, D) tensor, as the sources are read."""
    n, heads, size = x.shape
    if len(like.shape) == 3:
        return View(x, [heads, n, size], [size, heads * size, 1], COLUMNS).tiles(64)
    return View(x, [n, heads * size], [heads * size, 1], COLUMNS).tiles(64)


def _rows(x: Tensor, heads: int, n: int, stride: int, block: int) -> _Descriptor:
    """Rows of 4-byte values in tiles of (1, block), 0 past the end; rows lie a multiple of 16 bytes apart."""
    return _Descriptor(x, [heads, n], [stride, 1], [1, block], table.VECTOR)


def _tokens(x: Tensor, n: int, block: int) -> _Descriptor:
    """An int32 for each token, in tiles of (1, block)."""
    if x.data_ptr() % 16:
        x = x.clone()
    return _rows(x, 1, n, -(-n // 4) * 4, block)


def _options(depth: Tensor | None, n: int, block: int, window: int, cap: float, softcap: bool) -> list[Any]:
    """`depth_desc`, DEPTH, `window` and `cap` of a kernel: None where they are not read."""
    found: list[Any] = [None, None, None]
    if window:
        found = [_tokens(depth, n, block), depth, window]
    return [*found, cap if softcap else None]


def widths(sources: list[View]) -> tuple[int, int]:
    """Columns of a tile of q and k, and of v."""
    size, v_size = (table.width(sources[i].tensor.shape[-1]) for i in (0, 2))
    return size, v_size


def _layouts(sources: list[View]) -> dict[str, bool]:
    return dict(zip(("Q_ROWS", "K_ROWS", "V_ROWS", "DO_ROWS"), (x.layout == ROWS for x in sources), strict=False))


def forward(
    sources: list[View], out: Tensor, lse: Tensor, sinks: Tensor | None, subtree_end: Tensor, depth: Tensor | None,
    list_rows: Tensor, list_items: Tensor, schedule: Tensor, scale: float, cap: float, window: int, softcap: bool,
    processors: int,
) -> None:  # fmt: skip
    """Fills out, as q, and lse (H, N) from q (the last rows of N), k and v (N, H_kv, D); `scale` gives base-2 logits,
    with `softcap` the argument of tanh, which `cap` turns into them; `depth` is read with a window (0: none)."""
    q, k, v = sources
    n, kv_heads, _ = k.tensor.shape
    size, v_size = widths(sources)
    heads, above = out.shape[1], n - out.shape[0]
    group = heads // kv_heads
    tiles = -(-out.shape[0] // 128)
    # Two groups of heads side by side fill the chip more evenly where both find their K and V in the cache.
    pairs = heads % (2 * group) == 0 and 2 * n * (size + v_size) * out.element_size() <= SECTION_BYTES
    keys = table.forward_keys(size)
    queue = torch.zeros(1, dtype=torch.int32, device=out.device)
    forward_launch.launch(
        min(processors, tiles * heads), out,
        [q.tiles(64), k.tiles(keys), v.tiles(keys), _target(out, q), _tokens(subtree_end, n, keys), lse, subtree_end,
         subtree_end if sinks is None else sinks.float().contiguous(), list_rows, list_items, schedule, queue,
         scale, lse.stride(0), n, above, tiles, tiles * heads, group, (2 if pairs else 1) * group,
         *_options(depth, n, keys, window, cap, softcap)],
        {"D": size, "DV": v_size, "BN": keys, "STAGES": table.STAGES, **_layouts(sources),
         "HAS_SINKS": sinks is not None, "WINDOW": window > 0, "SOFTCAP": softcap},
    )  # fmt: skip


def dq(
    sources: list[View], out: Tensor, dq: Tensor, lse: Tensor, delta: Tensor, dlse: Tensor | None, subtree_end: Tensor,
    list_rows: Tensor, list_items: Tensor, schedule: Tensor, depth: Tensor | None, scale: float, cap: float,
    window: int, softcap: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Fills dq, as q, and delta (H, N) from q, k, v and dout."""
    q, k, v, dout = sources
    n, kv_heads, _ = k.tensor.shape
    size, v_size = widths(sources)
    heads, above = out.shape[1], n - out.shape[0]
    group = heads // kv_heads
    tiles = -(-out.shape[0] // 128)
    keys = table.dq_keys(size, window > 0 or softcap)
    dq_launch.launch(
        tiles * heads, out,
        [q.tiles(64), k.tiles(keys), v.tiles(keys), dout.tiles(64), _target(out, q), _target(dq, q),
         _tokens(subtree_end, n, keys), lse, delta, lse if dlse is None else dlse, list_rows, list_items, schedule,
         scale, grad_scale, lse.stride(0), n, above, tiles, group, group,
         *_options(depth, n, keys, window, cap, softcap)],
        {"D": size, "DV": v_size, "BN": keys, "STAGES": table.STAGES, **_layouts(sources), "HAS_DLSE": dlse is not None,
         "WINDOW": window > 0, "SOFTCAP": softcap},
    )  # fmt: skip


def split_tiles(items: Tensor, n: int, heads: int, kv_heads: int) -> int:
    """How many key tiles `tiles.backward_items` may have split, by the room that it left for them."""
    return 0 if heads == kv_heads else (len(items) - 1 - -(-n // 128) * kv_heads) // (heads - kv_heads)


def dkv(
    sources: list[View], dk: Tensor, dv: Tensor, parts: tuple[Tensor, Tensor], lse: Tensor, delta: Tensor,
    subtree_end: Tensor, schedule: Tensor, items: Tensor, depth: Tensor | None, scale: float, cap: float, window: int,
    softcap: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Fills dk and dv (N, H_kv, D); `parts`: two times (split tiles, H, 128, columns of a
    tile) float32 for the query heads alone."""
    q, k, v, dout = sources
    n, kv_heads, _ = dk.shape
    size, v_size = widths(sources)
    heads, above = q.tensor.shape[1], n - q.tensor.shape[0]
    group = heads // kv_heads
    wide = size > table.WIDE  # then two programs an item
    (wide_dkv_launch if wide else dkv_launch).launch(
        (len(items) - 1) * (2 if wide else 1), q.tensor,
        [q.tiles(table.QUERIES), k.tiles(64), v.tiles(64), dout.tiles(table.QUERIES), _target(dk, q), _target(dv, q),
         *parts, *(_rows(x, heads, n, x.stride(0), table.QUERIES) for x in (lse, delta)), subtree_end, schedule, items,
         scale, grad_scale, n, above, heads, group, *_options(depth, n, table.QUERIES, window, cap, softcap)],
        {"D": size, "DV": v_size, "BM": table.QUERIES, "STAGES": table.query_stages(size), **_layouts(sources),
         "WINDOW": window > 0, "SOFTCAP": softcap},
    )  # fmt: skip
    slots = parts[0].shape[0]
    if slots:
        blocks = 128 // table.SUM_ROWS * kv_heads
        sum_launch.launch(
            slots * blocks, dk, [*parts, dk, dv, schedule, items, n, heads, blocks],
            {"G": group, "WIDTH": size, "V_WIDTH": v_size, "SIZE": dk.shape[2], "V_SIZE": dv.shape[2],
             "ROWS": table.SUM_ROWS},
        )  # fmt: skip
