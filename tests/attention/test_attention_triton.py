"""The Triton kernels on the CPU, in Triton's interpreter, against the reference (float32).

The interpreter has to be chosen before triton is imported, so the cases run in one process of their own
(`interpreted_attention.py`).
The GPU decides about bfloat16, float16, tensor cores and speed: tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def results() -> dict:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted_attention.py")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def names() -> list[str]:
    import interpreted_attention

    return list(interpreted_attention.CASES)


@pytest.mark.parametrize("name", names())
def test_close_to_the_reference(results, name):
    """Largest differences of output, lse, dq, dk, dv (and dsinks), relative to the largest value of each."""
    assert max(results[name].values()) < 2e-5, results[name]


def test_padding_is_exactly_zero(results):
    assert results["padding zeros"] == {"nonzero": 0}


def test_operators(results):
    """opcheck passes; `torch.compile` (one graph, not one a length) and checkpointing change no bit."""
    assert results["operators"]["different"] == 0
    assert results["operators"]["failed"] == 0
    assert results["operators"]["graphs"] <= 2


def test_autograd(results):
    """A tree first used under inference_mode trains; gradients of some inputs only; vmap; the second derivative
    raises instead of leaving a part out."""
    assert results["autograd"]["different"] == 0
    assert not results["autograd"]["inference"]
    assert "differentiate twice" in results["autograd"]["twice"]


def test_bit_equal_from_run_to_run(results):
    assert results["repeat"] == {"different": 0}
