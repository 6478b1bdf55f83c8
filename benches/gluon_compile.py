"""Registers, spills, shared memory and serialised products of the Hopper kernels, by compiling for sm_90 without a GPU.

    python benches/gluon_compile.py [--kernel forward dkv dq] [--size 64 96 192/128] [--dtype bf16 fp16]
    [--variant plain] [--json]

Needs Triton alone, of a version that `TESTED` in `treepack.attention.versions` names. One line per kernel; exit
code 1 where one spills more than a few loop-invariant words, needs more shared memory than a block has, or holds
products that ptxas serialises.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import triton
from head_shapes import Sizes
from ptxas_report import SHARED_MEMORY, compile_for
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
import source_tree  # noqa: F401

from treepack.attention.hopper import table as gluon_table

SIZES = [Sizes.read(text) for text in ("64", "96", "128", "192/128", "256")]
SPILLS = 64  # bytes of loop-invariant words, stored before the loops and read once a step: seen to cost nothing
# A soft cap beside two accumulators of 64 registers each, and D = 256. Only the plain forward kernel of the
# last was looked at (3.6): its words are stored and read outside the loops over tiles.
FORMS = ("plain", "sinks", "dlse", "rows", "window", "options")
MORE_SPILLS = {("dkv", 128, "options"): 192}
MORE_SPILLS |= {(kernel, 256, form): 192 for kernel in ("forward", "dq") for form in FORMS}
POINTERS = {
    "LSE": "*fp32", "DELTA": "*fp32", "DLSE": "*fp32", "SINKS": "*fp32", "END": "*i32", "LIST_ROWS": "*i32",
    "LIST_ITEMS": "*i32", "SCHEDULE": "*i32", "QUEUE": "*i32", "ITEMS": "*i32", "DK_PARTS": "*fp32",
    "DV_PARTS": "*fp32", "DEPTH": "*i32",
}  # fmt: skip
FLOATS = ("scale", "grad_scale", "cap")
# What a launch leaves out (None) unless a constant of the kernel says otherwise.
OPTIONAL = {"depth_desc": "WINDOW", "DEPTH": "WINDOW", "window": "WINDOW", "cap": "SOFTCAP"}


def source(kernel, constants: dict, descriptors: dict, dtype: str) -> GluonASTSource:
    """What a launch would compile: host descriptors with their layouts, pointers of 16 bytes, plain integers."""
    signature, attributes, constexprs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if kernel.params[index].is_constexpr:
            signature[name], constexprs[name] = "constexpr", constants[name]
        elif name in OPTIONAL and not constants[OPTIONAL[name]]:
            signature[name], constexprs[name] = "constexpr", None
        elif name in descriptors:
            kind, shape, layout = descriptors[name]
            signature[name] = f"tensordesc<{dtype if kind is None else kind}{list(shape)},{layout!r}>"
        elif name in POINTERS:
            signature[name] = POINTERS[name]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    return GluonASTSource(kernel, signature, constexprs, attributes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="*", default=["forward", "dkv", "dq"])
    parser.add_argument("--size", nargs="*", type=Sizes.read, default=SIZES, help="of q and k, or 192/128: and of v")
    parser.add_argument("--dtype", nargs="*", default=["bf16", "fp16"])
    parser.add_argument("--variant", nargs="*", help="default: all")
    parser.add_argument("--ptx", type=Path, help="folder to write the PTX into")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, green = [], True
    for name, sizes, dtype, variant in gluon_table.variants(options.kernel, options.size, options.dtype):
        if options.variant and variant not in options.variant:
            continue
        kernel, constants, descriptors = gluon_table.describe(name, sizes, dtype, variant)
        started = time.time()
        compiled, usage = compile_for(source(kernel, constants, descriptors, dtype), 90, gluon_table.OPTIONS)
        row = {"kernel": name, "size": str(sizes), "dtype": dtype, "variant": variant, **usage}
        row["green"] = (
            row["spills"] <= MORE_SPILLS.get((name, gluon_table.width(sizes.head), variant), SPILLS)
            and row["shared"] <= SHARED_MEMORY[90]
            and not row["warnings"]
        )
        green &= row["green"]
        rows.append(row)
        if options.ptx:
            file = f"{name}{row['size'].replace('/', '-')}{dtype}-{variant}"
            (options.ptx / f"{file}.ptx").write_text(compiled.asm["ptx"])
            (options.ptx / f"{file}.ttgir").write_text(compiled.asm["ttgir"])
        if not options.json:
            print({**row, "seconds": round(time.time() - started, 1)}, flush=True)
    if options.json:
        print(json.dumps({"triton": triton.__version__, "kernels": rows}))
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
