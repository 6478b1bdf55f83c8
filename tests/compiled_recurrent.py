"""The walk compiled for sm_90, as `test_recurrent_triton.py` runs it: prints one line of JSON. Needs no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).resolve().parents[1] / "benches"))
from ptxas_report import compile_for

from treepack.recurrent.triton import walk as kernels

KINDS = {
    "G": "*fp32", "GK": "*fp32", "HT": "*fp32", "DHT": "*fp32", "CHUNKS": "*i32", "PATHS": "*i32", "FLAGS": "*i32",
    "scale": "fp32", "paths": "i32",
}  # fmt: skip


def report(name: str, block: int, use_gk: bool) -> dict[str, int]:
    """Of a head of 128 x 128 with the delta rule, in the tile sizes of `triton/launch.py`."""
    kernel = getattr(kernels, name)
    constants = {"H": 16, "HV": 32, "K": 128, "V": 128, "BT": 64, "BK": 128, "BV": block}
    constants |= {"USE_W": True, "USE_GK": use_gk}
    names = kernel.arg_names
    signature = {key: "constexpr" if key in constants else KINDS.get(key, "*bf16") for key in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if signature[key].startswith("*")}
    values = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    compiled, found = compile_for(source, 90, {"num_warps": 4, "num_stages": 2})
    return {"copied ahead": compiled.asm["ptx"].count("cp.async.c"), "spills": found["spills"]}


def main() -> None:
    cases = [("walk_forward", 32), ("walk_forward", 64), ("walk_backward", 32)]
    made = {f"{name}, {block}, {gk}": report(name, block, gk) for name, block in cases for gk in (False, True)}
    json.dump({"triton " + triton.__version__ + ": " + name: x for name, x in made.items()}, sys.stdout)


if __name__ == "__main__":
    main()
