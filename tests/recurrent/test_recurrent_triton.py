"""The kernels of recurrent layers without a GPU: in Triton's interpreter in float32, and compiled for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import interpreted_recurrent

HERE = Path(__file__).resolve().parents[1]
CASES = [f"{kind}: {name}" for kind in ("delta", "kda", "linear") for name in interpreted_recurrent.WALKS]
CASES += [f"conv: {name}" for name in interpreted_recurrent.CONVS]
CASES += [f"norm: {name}" for name in interpreted_recurrent.NORMS]


def run(script, **environment):
    """What a script of tests/ prints, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **environment}
    done = subprocess.run([sys.executable, str(HERE / script)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found():
    return run("interpreted_recurrent.py", TRITON_INTERPRET="1")


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(found, case):
    """The chunk form in float64 is the reference; every array that a kernel writes is that of the chunk form."""
    exact = found[case].pop("the chunk form itself", 0.0)
    assert exact < 1e-12
    assert max(found[case].values()) < 3e-6, found[case]


def test_scans_with_the_kernels_of_flash_linear_attention():
    """Output and all gradients, with the version that is tested."""
    pytest.importorskip("fla", reason="needs flash-linear-attention: treepack[recurrent]")
    results = run("interpreted_chunked.py", TRITON_INTERPRET="1", FLA_CACHE_RESULTS="0")
    assert set(results) == {"delta", "kda", "linear"}
    for case, differences in results.items():
        assert max(differences.values()) < 3e-6, (case, differences)


def test_the_walk_is_pipelined():
    """Compiled for sm_90: what a chunk reads is copied ahead, past the waits at forks, and nothing that matters
    spills."""
    for name, report in run("compiled_recurrent.py").items():
        assert report["copied ahead"] > 0, (name, report)
        assert report["spills"] <= 16, (name, report)
