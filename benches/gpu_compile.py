"""Registers, spills and shared memory of every kernel, by compiling for a GPU that need not be here.

    python benches/gpu_compile.py [--arch 90] [--size 128] [--kernel forward] [--feature plain] [--tile 128,128,8,2]

One line per kernel and configuration. Needs triton and torch, no GPU. Compile times are not kernel times.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
import source_tree  # noqa: F401

from treepack.attention.triton import backward as triton_backward
from treepack.attention.triton import common as triton_common
from treepack.attention.triton import forward as triton_forward

FEATURES = {
    "plain": {},
    "window": {"WINDOW": True},
    "softcap": {"SOFTCAP": True},
    "sinks": {"HAS_SINKS": True},
    "all": {"WINDOW": True, "SOFTCAP": True, "HAS_SINKS": True},
    "pointers": {"LAYOUT": triton_common.POINTERS},
}
FLOATS = {"scale", "cap", "grad_scale"}
POINTERS = {
    "LSE": "*fp32", "DELTA": "*fp32", "SINKS": "*fp32", "END": "*i32", "DEPTH": "*i32", "LIST_ROWS": "*i32",
    "LIST_ITEMS": "*i32",
}  # fmt: skip


def source(kernel, tile, size: int, dtype: str, feature: dict, split: bool):
    """The `ASTSource` that a launch from `triton_op` on Hugging Face's views would compile."""
    width = triton_common.padded_size(size)
    streamed = feature.get("LAYOUT", triton_common.COLUMNS)
    resident = streamed if width == size else triton_common.POINTERS
    names = kernel.arg_names
    roles = {"Q": "m", "K": "n", "V": "n", "DOUT": "m", "OUT": "m", "DQ": "m", "DK": "n", "DV": "n"}
    residents = {"dkv_kernel": "n", "dq_kernel": "m", "forward_kernel": "m"}[kernel.fn.__name__]
    layouts = {name: resident if role == residents else streamed for name, role in roles.items()}
    constants = {
        "BM": tile.block_m, "BN": tile.block_n, "D": size, "DP": width,
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
        "LIST": 128 if kernel.fn.__name__ == "forward_kernel" or tile.block_m > 64 else 64,
        "Q_LAYOUT": layouts["Q"], "K_LAYOUT": layouts["K"], "V_LAYOUT": layouts["V"], "DO_LAYOUT": layouts["DOUT"],
        "OUT_LAYOUT": resident, "DQ_LAYOUT": resident, "DKV_LAYOUT": resident,
        "WINDOW": False, "SOFTCAP": False, "HAS_SINKS": False,
    }  # fmt: skip
    constants.update({k: v for k, v in feature.items() if k != "LAYOUT"})
    signature, attributes, constexprs = {}, {}, {}
    for index, name in enumerate(names):
        if name in constants and kernel.params[index].is_constexpr:
            signature[name], constexprs[name] = "constexpr", constants[name]
        elif name in roles:
            kind = "fp32" if split and name in ("DK", "DV") else dtype
            rows = tile.block_m if roles[name] == "m" else tile.block_n
            signature[name] = (
                f"*{kind}" if layouts[name] == triton_common.POINTERS else f"tensordesc<{kind}[{rows}, {width}]>"
            )
            if layouts[name] == triton_common.POINTERS:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in ("LSE", "DELTA") and kernel.fn.__name__ == "dkv_kernel":
            signature[name] = f"tensordesc<fp32[1, {tile.block_m}]>"
        elif name == "ENDS":
            signature[name] = f"tensordesc<i32[1, {tile.block_n}]>"
        elif name in POINTERS:
            signature[name] = POINTERS[name]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif re.fullmatch(r"(q|k|v|do)_d", name):
            signature[name], constexprs[name] = "constexpr", 1
        elif re.fullmatch(r"(q|k|v|do)_[nh]", name):
            signature[name] = "i32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    return ASTSource(kernel, signature, constexprs, attributes)


def usage(compiled, arch: int) -> tuple[int, int, int]:
    """(registers a thread, spilled bytes stored, shared memory bytes): by assembling the PTX once more, verbosely."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        flags = [f"-arch=sm_{arch}{'a' if arch >= 90 else ''}", "-v", "-o", str(Path(folder, "out"))]
        report = subprocess.run([str(ptxas), *flags, str(ptx)], capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    spills = int(re.search(r"(\d+) bytes spill stores", report).group(1))
    return registers, spills, compiled.metadata.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--size", type=int, nargs="*", default=[64, 80, 96, 128, 192, 256])
    parser.add_argument("--kernel", nargs="*", default=["forward", "dkv", "dq"])
    parser.add_argument("--feature", nargs="*", default=["plain"], choices=list(FEATURES))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--split", action="store_true", help="dK/dV as float32 parts per query head")
    parser.add_argument("--tile", help="block_m,block_n,warps,stages instead of the table's")
    options = parser.parse_args()
    memory = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[options.arch] * 1024
    print(f"triton {triton.__version__}, torch {torch.__version__}, sm_{options.arch}, {options.dtype}")
    header = f"{'kernel':8} {'size':>4} {'feature':9} {'tile':>15}"
    print(f"{header} {'registers':>9} {'spill B':>8} {'shared B':>9} {'seconds':>8}")
    kernels = {
        "forward": triton_forward.forward_kernel,
        "dkv": triton_backward.dkv_kernel,
        "dq": triton_backward.dq_kernel,
    }
    for size in options.size:
        table = triton_common.select_tiles(size, 4 if options.dtype == "fp32" else 2, memory)
        for name in options.kernel:
            tile = triton_common.Tile(*map(int, options.tile.split(","))) if options.tile else getattr(table, name)
            for feature in options.feature:
                started = time.time()
                target = GPUTarget("cuda", options.arch, 32)
                src = source(kernels[name], tile, size, options.dtype, FEATURES[feature], options.split)
                try:
                    compiled = triton.compile(
                        src, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages}
                    )
                    figures = "{:9} {:8} {:9}".format(*usage(compiled, options.arch))
                except Exception as error:  # a configuration that does not compile is a result too
                    figures = f"{type(error).__name__}: {str(error)[:80]}"
                text = ",".join(map(str, tile))
                print(f"{name:8} {size:4} {feature:9} {text:>15} {figures} {time.time() - started:8.1f}", flush=True)


if __name__ == "__main__":
    main()
