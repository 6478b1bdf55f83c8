"""Runs the Hopper kernels on the CPU, where Gluon has no interpreter: their own source, with torch in Gluon's place.

    import gluon_interpreter        # before anything of treepack.attention.hopper
    gluon_interpreter.install()     # from then on a launch of a Hopper kernel runs here, on float64 tensors

A program is its producer and its consumers, as threads of which one runs at a time; a thread that waits for a barrier
hands over to the next. What is asynchronous on the GPU happens here as late as it may, so that what does not wait for
it fails:

    a copy into shared memory      when a barrier is waited for that has everything else it counts
    a product of wgmma             when it is waited for, from what its operands hold then
    a copy out of shared memory    when it is waited for

Memory that nothing was written into is NaN. All threads waiting, bytes that a barrier did not expect, a product read
before its wait and an operand overwritten before it are errors or wrong numbers. Layouts mean nothing here, and 16-bit
pairs are no pairs: P keeps its precision, so that results compare with float64.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Dtype:
    """One of Gluon's: its torch dtype, and the bits that the kernels count bytes with."""

    def __init__(self, real: torch.dtype):
        self.real, self.primitive_bitwidth = real, 8 * real.itemsize


class Values(torch.Tensor):
    """Registers, and scalars."""

    products = 0

    def to(self, dtype, bitcast=False):
        return super().to(dtype.real if isinstance(dtype, Dtype) else dtype)

    def __mul__(self, other):
        """Twice the same product of large numbers is not the same number: on the GPU one is rounded, and the other goes
        exact into a subtraction."""
        found = super().__mul__(other)
        if found.is_floating_point():
            Values.products += 1
            rounding = 1e-8 * (Values.products * 7 % 13 - 6)
            found = torch.where(found.abs() > 1e20, found.as_subclass(torch.Tensor).mul(1 + rounding), found)
        return found


def values(x) -> Values:
    return (x if isinstance(x, torch.Tensor) else torch.tensor(x)).as_subclass(Values)


DTYPES = {name: Dtype(getattr(torch, name)) for name in ("int16", "int32", "int64", "float32", "float16", "bfloat16")}
DTYPES["float32"] = Dtype(torch.float64)  # what adds up
HALF = Dtype(torch.float64)  # of q, k, v and what is made of them


class Pointer:
    def __init__(self, base: torch.Tensor, offset=0):
        self.base, self.offset = base, offset

    def __add__(self, offset):
        return Pointer(self.base, self.offset + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return Pointer(self.base, self.offset - offset)

    @property
    def flat(self) -> torch.Tensor:
        """The memory behind the tensor, whatever its strides."""
        size = self.base.untyped_storage().nbytes() // self.base.element_size()
        return self.base.detach().as_strided((size - self.base.storage_offset(),), (1,))


def load(pointer: Pointer, mask=None, other=0) -> Values:
    offset = torch.as_tensor(pointer.offset).long().as_subclass(torch.Tensor)
    if mask is None:
        return values(pointer.flat[offset].clone())
    mask = mask.as_subclass(torch.Tensor)
    found = pointer.flat[torch.where(mask, offset, 0)]
    return values(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, x, mask=None) -> None:
    offset, x = torch.broadcast_tensors(torch.as_tensor(pointer.offset).long(), x)
    keep = ... if mask is None else mask.expand(offset.shape)
    pointer.flat[offset[keep].as_subclass(torch.Tensor)] = x[keep].as_subclass(torch.Tensor).to(pointer.base.dtype)


def atomic_add(pointer: Pointer, amount: int, sem: str) -> Values:
    before = load(pointer)
    store(pointer, before + amount)
    return before


class Shared:
    """Shared memory: a view of a tensor; for barriers the name of one."""

    def __init__(self, memory: torch.Tensor, dtype: Dtype, barriers: dict | None = None, place: tuple = ()):
        self.memory, self.dtype, self.barriers, self.place = memory, dtype, barriers, place

    @property
    def shape(self):
        return self.memory.shape

    def index(self, i) -> Shared:
        assert 0 <= int(i) < self.memory.shape[0]
        return Shared(self.memory[int(i)], self.dtype, self.barriers, (*self.place, int(i)))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, start, length), self.dtype)

    def reshape(self, shape) -> Shared:
        assert self.memory.is_contiguous()
        return Shared(self.memory.view(shape), self.dtype)

    def permute(self, order) -> Shared:
        return Shared(self.memory.permute(order), self.dtype)

    def load(self, layout) -> Values:
        return values(self.memory.clone())

    def store(self, x) -> None:
        assert x.shape == self.memory.shape
        self.memory.copy_(x)

    @property
    def barrier(self) -> Barrier:
        return self.barriers[self.place[0] if self.place else 0]


class Barrier:
    def __init__(self, count: int):
        self.count, self.arrived, self.phase, self.expected = count, 0, 0, 0
        self.copies: deque = deque()  # (bytes, function)

    def settle(self) -> None:
        """Copies land once all arrivals are there; then the phase is over."""
        if self.arrived < self.count:
            return
        assert self.arrived == self.count, "more arrivals than the barrier counts"
        assert sum(size for size, _ in self.copies) == self.expected, "bytes other than those expected"
        while self.copies:
            self.copies.popleft()[1]()
        self.arrived, self.expected, self.phase = 0, 0, self.phase ^ 1


def init(bar: Shared, count: int) -> None:
    bar.barriers[bar.place[0] if bar.place else 0] = Barrier(count)


def expect(bar: Shared, size, pred=True) -> None:
    if pred:
        bar.barrier.arrived += 1
        bar.barrier.expected += int(size)


def arrive(bar: Shared, count: int = 1) -> None:
    bar.barrier.arrived += count


def wait(bar: Shared, phase) -> None:
    """Until the phase of that parity is over."""

    def over() -> bool:
        bar.barrier.settle()
        return bar.barrier.phase != int(phase)

    Program.now.wait(over)


def _part(x: torch.Tensor, first: list[int], block) -> torch.Tensor:
    """What of a block from `first` on lies within a tensor; none of its axes begins before it."""
    return x[tuple(slice(start, start + size) for start, size in zip(first, block, strict=True))]


def copy_to_shared(desc, place, bar: Shared, buffer: Shared, pred=True) -> None:
    if not pred:
        return
    block = desc.block_shape
    assert tuple(buffer.shape) == tuple(block), "a copy must fill its buffer"
    buffer.memory.fill_(float("nan") if buffer.memory.is_floating_point() else -(1 << 31))
    # From before the first row on there are fewer.
    first = [int(x) for x in place]
    skip = [max(-x, 0) for x in first]

    def land() -> None:
        inside = _part(desc.view, [max(x, 0) for x in first], [max(x - y, 0) for x, y in zip(block, skip, strict=True)])
        buffer.memory.zero_()
        _part(buffer.memory, skip, inside.shape).copy_(inside)

    bar.barrier.copies.append((math.prod(block) * desc.dtype.primitive_bitwidth // 8, land))


def copy_to_global(desc, place, buffer: Shared) -> None:
    first = [int(x) for x in place]

    def land() -> None:
        inside = _part(desc.view, first, desc.block_shape)
        inside.copy_(_part(buffer.memory, [0] * len(first), inside.shape))

    Program.now.here.stores.append(land)


def store_wait(pendings: int) -> None:
    stores = Program.now.here.stores
    while len(stores) > pendings:
        stores.popleft()()


class Product:
    """What wgmma will give: no numbers before the wait."""

    def __init__(self, a, b: Shared, acc, use_acc: bool):
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None

    def finish(self) -> Values:
        if self.value is None:
            acc = self.acc.finish() if isinstance(self.acc, Product) else self.acc
            a = self.a.memory if isinstance(self.a, Shared) else self.a
            self.value = values(a @ self.b.memory) + (acc if self.use_acc else 0)
            assert self.value.shape == acc.shape
        return self.value


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    assert is_async
    made = Product(a, b, acc, use_acc)
    Program.now.here.products.append(made)
    return made


def warpgroup_mma_wait(pendings: int, deps):
    products = Program.now.here.products
    while len(products) > pendings:
        products.popleft().finish()
    found = [x.value if isinstance(x, Product) and x.value is not None else x for x in deps]
    return found[0] if len(found) == 1 else found


class Program:
    """The threads of one program; one runs at a time."""

    now: Program

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.turn = threading.Condition()
        self.running, self.ready, self.error = 0, [], None
        self.local = threading.local()

    @property
    def here(self):
        return self.local.state

    def wait(self, over) -> None:
        """Returns in this thread's turn, once `over()`."""
        with self.turn:
            while not over():
                self.ready[self.local.number] = over
                self._hand_over()
                self.turn.wait_for(lambda: self.running == self.local.number or self.error)
                if self.error:
                    raise RuntimeError("another thread failed")
            self.ready[self.local.number] = None

    def _hand_over(self) -> None:
        """To the next thread that can go on: one that waits for nothing, or no more."""
        numbers = range(len(self.ready))
        order = [(self.running + 1 + i) % len(self.ready) for i in numbers]
        for number in order:
            over = self.ready[number]
            if over is not False and (over is None or over()):
                self.running = number
                self.turn.notify_all()
                return
        if any(over is not False for over in self.ready):
            self.error = self.error or RuntimeError("all threads of the program wait for each other")
            self.turn.notify_all()
            raise self.error

    def run(self, partitions) -> None:
        self.ready = [None] * len(partitions)

        def work(number, function, arguments):
            self.local.number = number
            self.local.state = SimpleNamespace(products=deque(), stores=deque())
            try:
                with self.turn:
                    self.turn.wait_for(lambda: self.running == number or self.error)
                if not self.error:
                    function(*arguments)
                    assert not self.here.products, "products that nobody waited for"
                    assert not self.here.stores, "stores that nobody waited for"
            except BaseException as error:
                self.error = self.error or error
            with self.turn:
                self.ready[number] = False
                try:
                    if not self.error:
                        self._hand_over()
                except BaseException as error:
                    self.error = error
                self.turn.notify_all()

        threads = [threading.Thread(target=work, args=(i, *part)) for i, part in enumerate(partitions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error


def allocate_shared_memory(dtype: Dtype, shape, layout) -> Shared:
    if layout == "barrier":
        return Shared(torch.zeros(shape), dtype, {})
    fill = float("nan") if dtype.real.is_floating_point else -(1 << 31)
    return Shared(torch.full(shape, fill, dtype=dtype.real), dtype)


def warp_specialize(partitions, warps, registers) -> None:
    Program.now.run(partitions)


def _asm(text, constraints, arguments, dtype, is_pure, pack):
    assert text.startswith("mov.b32"), text
    return arguments[0]


def _where(condition, a, b):
    if isinstance(a, Pointer):
        return Pointer(a.base, _where(condition, a.offset, b.offset))
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b)).as_subclass(Values)


def _either(function):
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b)).as_subclass(Values)


def _language() -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    layout = lambda *arguments, **options: "layout"  # noqa: E731
    layout.get_default_for = layout
    for name in ("NVMMADistributedLayout", "NVMMASharedLayout", "BlockedLayout", "SwizzledSharedLayout", "SliceLayout",
                 "DotOperandLayout"):  # fmt: skip
        setattr(gl, name, layout)
    vars(gl).update(
        **DTYPES, constexpr=lambda x: x, shared_memory_descriptor=Shared, static_range=range,
        load=load, store=store, atomic_add=atomic_add, allocate_shared_memory=allocate_shared_memory,
        warp_specialize=warp_specialize, inline_asm_elementwise=_asm, where=_where, barrier=lambda: None,
        maximum=_either(torch.maximum), minimum=_either(torch.minimum), exp2=torch.exp2, log2=torch.log2,
        arange=lambda a, b, layout=None: values(torch.arange(a, b)),
        zeros=lambda shape, dtype, layout=None: values(torch.zeros(shape, dtype=dtype.real)),
        full=lambda shape, x, dtype, layout=None: values(torch.full(shape, x, dtype=dtype.real)),
        expand_dims=lambda x, axis: x.unsqueeze(axis), convert_layout=lambda x, layout: x,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        program_id=lambda axis: values(Program.now.index), num_programs=lambda axis: Program.now.count,
    )  # fmt: skip
    return gl


@dataclass
class TensorDescriptor:
    """A matrix in global memory, or one for each head, and the block of a copy."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def view(self) -> torch.Tensor:
        return self.base.detach().as_strided(self.shape, self.strides)

    @property
    def dtype(self) -> Dtype:
        return HALF if self.base.dtype == torch.float64 else Dtype(self.base.dtype)


def _launch(kernel, programs, like, arguments, constants) -> None:
    """In place of `_Kernel.launch`."""
    if not hasattr(kernel.function, "interpreted"):  # `sum_kernel`, which Triton's own interpreter runs
        kernel.function[(programs,)](*arguments, **constants)
        return
    given = [
        x.checked() if hasattr(x, "checked") else Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments
    ]
    for index in range(programs):
        Program.now = Program(index, programs)
        kernel.function(*given, **constants)


def install() -> None:
    """Puts torch in Gluon's place, imports the Hopper kernels and takes over their launches."""

    def jit(function=None, **options):
        if function is None:
            return jit
        function.interpreted = True
        return function

    gl, hopper = _language(), ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.mbarrier = SimpleNamespace(
        init=init, expect=expect, wait=wait, arrive=arrive, MBarrierLayout=lambda: "barrier"
    )
    hopper.tma = ModuleType("tma")
    vars(hopper.tma).update(async_load=copy_to_shared, async_store=copy_to_global, store_wait=store_wait)
    vars(hopper).update(
        fence_async_shared=lambda: None, warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait
    )
    import triton.experimental
    import triton.language.core

    gluon = ModuleType("triton.experimental.gluon")
    vars(gluon).update(jit=jit, constexpr_function=lambda function: function, language=gl)
    descriptors = ModuleType("triton.experimental.gluon.nvidia.hopper")
    descriptors.TensorDescriptor = TensorDescriptor
    there, before = dict(sys.modules), (vars(triton.experimental).get("gluon"), triton.language.core._aggregate)
    triton.experimental.gluon = gluon
    triton.language.core._aggregate = lambda cls: cls
    sys.modules |= {
        gluon.__name__: gluon, gl.__name__: gl, hopper.__name__: hopper, descriptors.__name__: descriptors,
        "triton.experimental.gluon.language.nvidia": ModuleType("nvidia"),
        "triton.experimental.gluon.nvidia": ModuleType("nvidia"),
    }  # fmt: skip
    from treepack.attention.hopper import common

    common.pack = lambda x, dtype: x
    common.unpack = lambda x, dtype, layout: x
    from treepack.attention.hopper import launch

    launch._Kernel.launch = _launch
    # What the kernels took is theirs; Triton's own interpreter, which runs `sum_kernel`, wants the real modules.
    replaced = [name for name in sys.modules if name.startswith("triton.experimental.gluon")]
    sys.modules |= {name: there[name] for name in replaced if name in there}
    for name in set(replaced) - set(there):
        del sys.modules[name]
    triton.experimental.gluon, triton.language.core._aggregate = before
    if before[0] is None:
        del triton.experimental.gluon
