"""The portable kernels without a GPU: compiled for every architecture that they are meant for, with the tiles that it
gets, within the shared memory of its blocks.

What they compute is decided on a GPU: tests/gpu.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tritons

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# A process for each group of GPUs, and what it compiles: the widest tiles, which come closest to the limits, in 45
# seconds of one core with two Tritons; in the long runs everything, in half an hour.
PROCESSES = ((80,), (89,), (90,), (100,), (120,)) if tritons.LONG else ((80, 100, 120),)
QUICK = "--size 256 --kernel forward dkv dq --feature plain --dtype bf16"
ARGUMENTS = [] if tritons.LONG else QUICK.split()
COMPILED = 4 * 2 * (7 + 1) if tritons.LONG else 3  # kernels; features; head sizes in bfloat16 and float16
MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@pytest.fixture
def gpu_compile(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    import gpu_compile

    return gpu_compile


@functools.cache
def start(version):
    """The running processes of one Triton."""
    command = [sys.executable, str(ROOT / "benches" / "gpu_compile.py"), "--json", *ARGUMENTS, "--arch"]
    given = {"env": tritons.environment(version), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, *map(str, gpus)], **given) for gpus in PROCESSES]


@pytest.mark.parametrize("version", tritons.VERSIONS)
def test_compiled_within_shared_memory(version):
    for other in () if tritons.LONG else filter(tritons.present, tritons.VERSIONS):
        start(other)  # both Tritons side by side; in the long runs the GPUs are enough
    for process, gpus in zip(start(version), PROCESSES, strict=True):
        out, errors = process.communicate()
        assert process.returncode == 0, out + errors
        report = json.loads(out.splitlines()[-1])
        assert report["triton"] == version
        assert [row["arch"] for row in report["kernels"]] == [gpu for gpu in gpus for _ in range(COMPILED)]
        for row in report["kernels"]:
            assert 0 < row["registers"] <= 255, row
            assert 0 < row["shared"] <= MEMORY[row["arch"]], row


@pytest.mark.parametrize(
    ("shared", "tensor_memory", "said"),
    [
        (101_376, 0, None),
        (101_377, 0, "does not fit"),
        (1_024, 512, None),
        (1_024, 513, "does not fit"),
        (None, 0, "does not compile: RuntimeError: ptxas"),
    ],
)
def test_what_does_not_fit_fails(gpu_compile, monkeypatch, capsys, shared, tensor_memory, said):
    """The exit code is 1 and the line of the kernel says why."""

    def compile_for(source, arch, options):
        assert (arch, options["enable_fp_fusion"]) == (120, True)
        if shared is None:
            raise RuntimeError("ptxas")
        usage = {"registers": 99, "spills": 0, "shared": shared, "tensor_memory": tensor_memory, "warnings": []}
        return SimpleNamespace(asm={}), usage

    monkeypatch.setattr(gpu_compile, "compile_for", compile_for)
    command = ["gpu_compile.py", "--arch", "120", "--size", "64", "--kernel", "dq", "--feature", "plain"]
    monkeypatch.setattr(sys, "argv", [*command, "--dtype", "bf16"])
    assert gpu_compile.main() == (0 if said is None else 1)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("sm_120  dq            64 bf16  plain")
    assert said is None or line.endswith(said)


def launches(gpu_compile, monkeypatch, sizes, options):
    """{kernel: its arguments by name}, of the launches for one layer of Hugging Face's views."""
    from treepack.attention.triton import launch as triton_launch

    class Recorder:
        def __init__(self, name, kernel):
            self.name, self.names = name, kernel.arg_names

        def __getitem__(self, grid):
            def launch(*given, **named):
                seen[self.name] = {**dict(zip(self.names, given, strict=False)), **named}

            return launch

    seen = {}
    for name, kernel in gpu_compile.KERNELS.items():
        monkeypatch.setattr(triton_launch, f"{name}_kernel", Recorder(name, kernel))
    n, heads, kv_heads = 256, 4, 2

    def make(count, size):
        return torch.zeros(1, n, count, size, dtype=torch.bfloat16)[0]

    (q, dq), (out, dout) = ([make(heads, size) for _ in range(2)] for size in sizes)
    (k, dk), (v, dv) = ([make(kv_heads, size) for _ in range(2)] for size in sizes)
    lse, delta, dlse = (torch.zeros(heads, n) for _ in range(3))
    integers = torch.zeros(n, dtype=torch.int32)
    window, softcap = (5, True) if options else (0, False)
    lists, numbers = [integers] * 4, (0.5, 1.0, window, softcap)
    sinks = torch.zeros(heads) if options else None
    triton_launch.forward(q, k, v, out, lse, sinks, integers, integers, *lists[:2], *numbers)
    triton_launch.delta(out, dout, dlse if options else None, delta)
    triton_launch.dq(q, k, v, dout, dq, lse, delta, integers, integers, lists, *numbers, 0.5)
    triton_launch.dkv(q, k, v, dout, dk, dv, lse, delta, integers, integers, *lists[:2], *numbers, 0.5, False)
    return seen


@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("size", ["64", "80", "128", "192", "192/128", "64/80"])
def test_what_is_compiled_is_what_is_launched(gpu_compile, monkeypatch, size, feature):
    """Constants, descriptors, dtypes and options of a launch, as the compilation without a GPU has them."""
    kinds = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    sizes = gpu_compile.Sizes.read(size)
    for name, given in launches(gpu_compile, monkeypatch, sizes, feature == "all").items():
        tile = gpu_compile.choose_tile(name, sizes, "bf16", 90)  # the tiles that the CPU gets, too
        source = gpu_compile.source(name, tile, sizes, "bf16", gpu_compile.FEATURES[feature], split=False)
        kernel = gpu_compile.KERNELS[name]
        assert given["num_warps"] == tile.warps
        assert given.get("num_stages", 3) == tile.stages
        for index, (argument, kind) in enumerate(source.signature.items()):
            value = given[argument]
            if kernel.params[index].is_constexpr:
                assert source.constants[(index,)] == value, (name, argument)
            elif hasattr(value, "block_shape"):
                assert kind == f"tensordesc<{kinds[value.base.dtype]}{value.block_shape}>", (name, argument)
            elif isinstance(value, torch.Tensor):
                unread = argument == "SINKS" and feature == "plain"  # another tensor stands there
                assert kind == f"*{kinds[value.dtype]}" or unread, (name, argument)
            elif kind == "constexpr":  # an innermost stride, unless a descriptor has the strides
                assert value == source.constants[(index,)] or (argument.endswith("_d") and value == 0), (name, argument)
            else:
                assert kind == {int: "i32", float: "fp32"}[type(value)], (name, argument)


def test_the_tiles_of_each_gpu():
    """One stage where two do not fit on Blackwell; on Hopper, where they were measured, and on small GPUs as before."""
    from treepack.attention.triton.common import Tile, select_tiles

    def tiles(size, *gpu):
        return select_tiles(size, size, 2, *gpu)

    assert tiles(256, 232_448, 9).dkv == tiles(192, 232_448, 9).dkv == Tile(64, 64, 8, 2)
    assert tiles(256, 232_448, 10).dkv == tiles(192, 232_448, 10).dkv == Tile(64, 64, 8, 1)
    assert tiles(128, 232_448, 10) == tiles(128, 232_448, 9)
    assert tiles(256, 101_376, 12) == tiles(256, 166_912, 8)
    assert tiles(256, 101_376, 12).dkv == Tile(32, 32, 4, 1)
    for other, wider in (((192, 128), 256), ((64, 128), 128), ((96, 64), 128), ((16, 24), 32)):
        for sizes in (other, other[::-1]):
            assert select_tiles(*sizes, 2, 232_448, 9) == tiles(wider, 232_448, 9)


def test_a_launch_asks_the_device_for_its_tiles(monkeypatch):
    from treepack.attention.triton import common as triton_common
    from treepack.attention.triton import launch as triton_launch

    q = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=7), shape=(10, 4, 192), element_size=lambda: 2)
    v = SimpleNamespace(shape=(10, 4, 128))
    monkeypatch.setattr(triton_launch, "device_limits", lambda index: (232_448, 148))
    for capability, table in (((10, 0), triton_common.BLACKWELL), ((9, 0), triton_common.LARGE)):
        triton_launch._device_tiles.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
        assert triton_launch.choose_tiles(q, v) == table[256]
    triton_launch._device_tiles.cache_clear()
