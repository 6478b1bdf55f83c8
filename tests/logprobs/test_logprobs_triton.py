"""The Triton passes of the LM head in Triton's interpreter against the same steps in torch (float32).

The interpreter has to be chosen before triton is imported: the cases run in a process of their own. The GPU decides
about bfloat16 and speed: tests/gpu.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_fused_passes():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run([sys.executable, str(HERE / "interpreted_head.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for name, (gaps, sizes) in found.items():
        for gap, size in zip(gaps, sizes, strict=True):
            assert gap < 1e-5 * max(size, 1), (name, gaps)
            assert size > 1e-3, name
