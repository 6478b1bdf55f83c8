"""Seconds until the first results: a new process on an empty Triton cache, then another on the cache it left.

    python benches/gpu_first_call.py [--size 128 64 256] [--impl triton triton_plain]

In each process: one training step of tree attention (forward and backward, bf16, 32 / 8 heads, 2,000 tokens), with the
check of the kernels' first use and its own time after compilation; then a second step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "gpu")]
import source_tree  # noqa: E402, F401

STEP = "--one-process"


def one_process(size: int, impl: str) -> dict:
    """Seconds of one process."""
    started = time.perf_counter()
    import torch
    from compare import leaves, random_tree

    from treepack.attention import rule as triton_rule
    from treepack.attention import self_check, tree_attention

    tensors = leaves(2000, 32, 8, size)
    end = random_tree(2000)
    torch.cuda.synchronize()
    imported = time.perf_counter()

    def step() -> float:
        began = time.perf_counter()
        torch.autograd.grad(tree_attention(*tensors, subtree_end=end, impl=impl).sum(), tensors)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    first, second = step(), step()
    flat = [x.squeeze(0).transpose(0, 1) for x in tensors]
    kernels = triton_rule.choose(impl, flat[0], flat[2], 0, 0.0, 0.1)
    checks = sorted(self_check._check(kernels, *flat, False, False, False, True, False).milliseconds for _ in range(5))
    return {
        "import": imported - started, "first": first, "second": second, "check_ms": checks[2],
        "wrong": [x.wrong for x in self_check.verdicts()],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", type=int, default=[128, 64, 256])
    parser.add_argument("--impl", nargs="*", default=["triton", "triton_plain"])
    parser.add_argument(STEP, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_process:
        print(json.dumps(one_process(options.size[0], options.impl[0])))
        return
    import torch
    import triton

    print(f"{torch.cuda.get_device_name()} | torch {torch.__version__}, triton {triton.__version__}")
    head = f"{'kernels':14} {'head size':>9} {'cache':>6} {'first step s':>13} {'second step ms':>15} {'check ms':>9}"
    print(head, flush=True)
    for impl in options.impl:
        for size in options.size:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "warm"):
                    command = [sys.executable, __file__, STEP, "--size", str(size), "--impl", impl]
                    env = {**os.environ, "TRITON_CACHE_DIR": cache}
                    done = subprocess.run(command, env=env, capture_output=True, text=True)
                    if done.returncode:
                        sys.exit(done.stderr)
                    found = json.loads(done.stdout.splitlines()[-1])
                    assert found["wrong"] == [""], found
                    times = f"{found['first']:13.2f} {1e3 * found['second']:15.2f} {found['check_ms']:9.1f}"
                    print(f"{impl:14} {size:9} {state:>6} {times}", flush=True)


if __name__ == "__main__":
    main()
