"""What ptxas says of a kernel when Triton compiles it for a GPU that need not be here: for `gluon_compile.py` and
`gpu_compile.py`."""

from __future__ import annotations

import contextlib
import io
import re

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

# Bytes of shared memory a block may use, by compute capability: A100; L40S and RTX 40; H100; B200; RTX 50.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def compile_for(source, arch: int, options: dict):
    """`(compiled, {registers, spills, shared, warnings})` of a kernel compiled for sm_`arch`.

    registers: of a thread; spills: bytes stored; shared: bytes; warnings: the numbers of ptxas' messages about wgmma
    (C75xx). All from Triton's own call of ptxas, whose flags and program differ between versions; past its cache, which
    keeps no messages.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    report = said.getvalue()
    return compiled, {
        "registers": int(re.search(r"Used (\d+) registers", report).group(1)),
        "spills": int(re.search(r"(\d+) bytes spill stores", report).group(1)),
        "shared": compiled.metadata.shared,
        "warnings": sorted(set(re.findall(r"C7\d\d\d", report))),
    }
