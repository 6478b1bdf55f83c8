"""Registers, spills and shared memory of the portable kernels, by compiling for GPUs that need not be here.

    python benches/gpu_compile.py [--arch 80 90] [--size 64 192/128] [--kernel forward dkv dq delta]
                                  [--feature plain all] [--dtype bf16] [--tile 128,128,8,2] [--split] [--json]

A size is that of q, k and v, or of q and k / of v. Each kernel with the tile that a GPU of that architecture gets from
the fixed table, and with the options of a launch. One line per kernel; exit code 1 where one does not compile, or needs
more shared memory than a block has. Needs Triton and torch, no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path

import triton
from head_shapes import Sizes
from ptxas_report import SHARED_MEMORY, TENSOR_MEMORY, compile_for
from triton import knobs
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
import source_tree  # noqa: F401

from treepack.attention.triton import backward as triton_backward
from treepack.attention.triton import common as triton_common
from treepack.attention.triton import forward as triton_forward
from treepack.attention.triton.common import COLUMNS, POINTERS, Tile
from treepack.attention.versions import COMPILE

ARCHITECTURES = (80, 89, 90, 100, 120)  # A100; L40S and RTX 40; H100; B200; RTX 50
SIZES = tuple(map(Sizes.read, ("64", "80", "96", "128", "192/128", "192", "256")))
KERNELS = {
    "forward": triton_forward.forward_kernel,
    "dkv": triton_backward.dkv_kernel,
    "dq": triton_backward.dq_kernel,
    "delta": triton_backward.delta_kernel,
}
FEATURES = {
    "plain": {},
    "window": {"WINDOW": True},
    "softcap": {"SOFTCAP": True},
    "sinks": {"HAS_SINKS": True},
    "all": {"WINDOW": True, "SOFTCAP": True, "HAS_SINKS": True, "HAS_DLSE": True},
    "pointers": {"LAYOUT": POINTERS},
}
OFF = {"WINDOW": False, "SOFTCAP": False, "HAS_SINKS": False, "HAS_DLSE": False}
# The rows of each matrix: of the query tile or of the key tile.
MATRICES = {"Q": "m", "OUT": "m", "DOUT": "m", "DQ": "m", "K": "n", "V": "n", "DK": "n", "DV": "n"}
VALUES = ("V", "OUT", "DOUT", "DV")  # have the head size of v
RESIDENT = {"forward": "Q", "dkv": "K V", "dq": "Q DOUT"}  # loaded once for a program
RESULTS = ("OUT", "DQ", "DK", "DV")
NUMBERS = dict.fromkeys(("LSE", "DELTA", "DLSE", "SINKS"), "fp32")
NUMBERS |= dict.fromkeys(("END", "DEPTH", "LIST_ROWS", "LIST_ITEMS"), "i32")
FLOATS = ("scale", "cap", "grad_scale")


def layouts(name: str, sizes: Sizes, feature: dict) -> dict[str, int]:
    """How each matrix reaches the kernel, as the host chooses for Hugging Face's views (`triton/common.py`)."""
    if name == "delta":
        return dict.fromkeys(MATRICES, POINTERS)
    streamed = feature.get("LAYOUT", COLUMNS)
    chosen = dict.fromkeys(MATRICES, streamed)
    for matrix in MATRICES:
        size = sizes.value if matrix in VALUES else sizes.head
        whole = triton_common.padded_size(size) == size
        if matrix in RESULTS:
            chosen[matrix] = COLUMNS if whole else POINTERS
        elif matrix in RESIDENT[name].split() and not whole:
            chosen[matrix] = POINTERS
    return chosen


def constants(name: str, tile: Tile, sizes: Sizes, dtype: str, feature: dict, layout: dict[str, int]) -> dict:
    """The compile-time arguments of a launch (`triton/launch.py`)."""
    return {
        **OFF,
        **feature,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "D": sizes.head,
        "DP": triton_common.padded_size(sizes.head),
        "D_V": sizes.value,
        "DP_V": triton_common.padded_size(sizes.value),
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
        "LIST": 128 if name == "forward" or (name == "dq" and tile.block_m > 64) else 64,
        "DO_LAYOUT": layout["DOUT"],
        **{f"{matrix}_LAYOUT": layout[matrix] for matrix in ("Q", "K", "V", "OUT", "DQ", "DK", "DV")},
    }


def source(name: str, tile: Tile, sizes: Sizes, dtype: str, feature: dict, split: bool) -> ASTSource:
    """What a launch of `triton/launch.py` compiles: descriptors, pointers of 16 bytes, strides that 16 divides."""
    kernel, layout = KERNELS[name], layouts(name, sizes, feature)
    given = constants(name, tile, sizes, dtype, feature, layout)
    rows = {"m": tile.block_m, "n": tile.block_n}
    signature, attributes, constexprs = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        aligned = False
        if kernel.params[index].is_constexpr:
            signature[argument], constexprs[argument] = "constexpr", given[argument]
        elif argument in MATRICES:
            kind = "fp32" if split and argument in ("DK", "DV") else dtype
            aligned = layout[argument] == POINTERS
            shape = [rows[MATRICES[argument]], given["DP_V" if argument in VALUES else "DP"]]
            signature[argument] = f"*{kind}" if aligned else f"tensordesc<{kind}{shape}>"
        elif name == "dkv" and argument in ("LSE", "DELTA"):
            signature[argument] = f"tensordesc<fp32{[1, tile.block_m]}>"
        elif argument == "ENDS":
            signature[argument] = f"tensordesc<i32{[1, tile.block_n]}>"
        elif argument in NUMBERS:
            signature[argument], aligned = f"*{NUMBERS[argument]}", True
        elif re.fullmatch(r"(q|k|v|do)_d", argument):
            signature[argument], constexprs[argument] = "constexpr", 1
        elif re.fullmatch(r"(q|k|v|do)_[nh]", argument):
            signature[argument], aligned = "i32", True
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attributes)


def choose_tile(name: str, sizes: Sizes, dtype: str, arch: int) -> Tile:
    """The tile that a launch on this architecture takes; delta has rows alone, and Triton's own number of stages."""
    if name == "delta":
        return Tile(triton_common.delta_rows(sizes.value), 1, 4, 3)
    itemsize = 4 if dtype == "fp32" else 2
    return getattr(triton_common.select_tiles(*sizes, itemsize, SHARED_MEMORY[arch], arch // 10), name)


def report(arch: int, dtype: str, sizes: Sizes, name: str, feature: str, options: argparse.Namespace) -> dict:
    """One kernel: what it needs, or the error with which it did not compile."""
    tile = Tile(*map(int, options.tile.split(","))) if options.tile else choose_tile(name, sizes, dtype, arch)
    row = {"arch": arch, "kernel": name, "size": str(sizes), "dtype": dtype, "feature": feature, "tile": tile}
    program = source(name, tile, sizes, dtype, FEATURES[feature], options.split)
    try:
        compiled, usage = compile_for(program, arch, {"num_warps": tile.warps, "num_stages": tile.stages, **COMPILE})
    except Exception as error:  # whatever Triton or ptxas raises: the other kernels are still looked at
        return {**row, "green": False, "error": f"{type(error).__name__}: {error}"}
    if options.ptx:
        file = f"sm{arch}-{name}{sizes.head}-{sizes.value}{dtype}-{feature}.ptx"
        (options.ptx / file).write_text(compiled.asm["ptx"])
    fits = usage["shared"] <= SHARED_MEMORY[arch] and usage["tensor_memory"] <= TENSOR_MEMORY
    return {**row, **usage, "green": fits}


def line(row: dict) -> str:
    tile = ",".join(map(str, row["tile"]))
    name = f"{row['kernel']:8} {row['size']:>7} {row['dtype']:5} {row['feature']:9} {tile:>12}"
    if "error" in row:
        return f"sm_{row['arch']:<4} {name}  does not compile: {row['error']}"
    figures = f"{row['registers']:9} {row['spills']:8} {row['shared']:9} {SHARED_MEMORY[row['arch']]:9}"
    return f"sm_{row['arch']:<4} {name} {figures}{'' if row['green'] else '  does not fit'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES, choices=list(SHARED_MEMORY))
    parser.add_argument("--size", type=Sizes.read, nargs="*", default=SIZES)
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--feature", nargs="*", default=["plain", "all"], choices=list(FEATURES))
    parser.add_argument(
        "--dtype", nargs="*", choices=["bf16", "fp16", "fp32"], help="without: bf16, and fp16 at head size 128"
    )
    parser.add_argument("--split", action="store_true", help="dK/dV as float32 parts per query head")
    parser.add_argument("--tile", help="block_m,block_n,warps,stages instead of the table's")
    parser.add_argument("--ptx", type=Path, help="folder to write the PTX into")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        ptxas = f"ptxas {knobs.nvidia.ptxas.version}, for sm_100 and sm_120 {knobs.nvidia.ptxas_blackwell.version}"
        print(f"triton {triton.__version__}, {ptxas}")
        heads = f"{'kernel':8} {'D':>7} {'dtype':5} {'feature':9} {'tile':>12} {'registers':>9} {'spill B':>8}"
        print(f"{'GPU':7} {heads} {'shared B':>9} {'of':>9}", flush=True)
    rows = []
    for arch, sizes, dtype in itertools.product(options.arch, options.size, options.dtype or ("bf16", "fp16")):
        if not options.dtype and dtype == "fp16" and sizes != (128, 128):
            continue
        for name, feature in itertools.product(options.kernel, options.feature):
            rows.append(report(arch, dtype, sizes, name, feature, options))
            if not options.json:
                print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"triton": triton.__version__, "kernels": rows}))
    return 0 if all(row["green"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
