"""What the Hopper kernels compute, without a GPU: their source run on the CPU (`gluon_interpreter`), every result
against the reference in float64. Proves the walks, masks, barriers and sums; not layouts, rounding or the hardware."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]
WINDOW, OPTIONS = {"window": 60, "sinks": True}, {"window": 60, "softcap": 2.0, "sinks": True}
# As lse is kept in float32, whatever it enters is good to 1e-7.
CASES = {
    "plain": {"tree": "agent", "size": 128, "heads": 2, "kv_heads": 1},
    "split": {"tree": "drawn", "size": 64, "heads": 4, "kv_heads": 2, "split": True, "dlse": False},
    "window": {"tree": "agent", "size": 128, "heads": 2, "kv_heads": 1, **WINDOW},
    "options, split": {"tree": "agent", "size": 64, "heads": 2, "kv_heads": 1, "split": True, **OPTIONS},
    "options": {"tree": "drawn", "size": 128, "heads": 2, "kv_heads": 2, **OPTIONS},
    "cap": {"tree": "drawn", "size": 64, "heads": 1, "kv_heads": 1, "softcap": 2.0},
    "a window with full tiles": {"tree": "chain", "size": 64, "heads": 1, "kv_heads": 1, "window": 300},
    "last rows": {"tree": "chain", "size": 64, "heads": 2, "kv_heads": 1, "above": 256},
    "last rows, window": {"tree": "chain", "size": 64, "heads": 2, "kv_heads": 1, "window": 300, "above": 256},
    "wide": {"tree": "agent", "size": 256, "heads": 2, "kv_heads": 1},
    "wide, window, split": {"tree": "agent", "size": 256, "heads": 2, "kv_heads": 1, "split": True, **WINDOW},
    "wide, options, last rows": {"tree": "chain", "size": 256, "heads": 1, "kv_heads": 1, "above": 256, **OPTIONS},
    "96": {"tree": "agent", "size": 96, "heads": 2, "kv_heads": 1},
    "96, options, split": {"tree": "drawn", "size": 96, "heads": 2, "kv_heads": 1, "split": True, **OPTIONS},
    "80, window, last rows": {"tree": "chain", "size": 80, "heads": 2, "kv_heads": 2, "above": 256, **WINDOW},
    "192 / 128": {"tree": "agent", "size": 192, "value_size": 128, "heads": 2, "kv_heads": 2, "apart": True},
    "192 / 128, options, split": {
        "tree": "drawn",
        "size": 192,
        "value_size": 128,
        "heads": 2,
        "kv_heads": 1,
        "split": True,
        **OPTIONS,
    },
    "192 / 128, last rows": {
        "tree": "chain",
        "size": 192,
        "value_size": 128,
        "heads": 1,
        "kv_heads": 1,
        "above": 256,
        **WINDOW,
    },
    "128 / 64": {"tree": "drawn", "size": 128, "value_size": 64, "heads": 2, "kv_heads": 1, "apart": True},
    "one token": {"tree": "one token", "size": 64, "heads": 2, "kv_heads": 1, **OPTIONS},
    "one token of 96": {"tree": "one token", "size": 96, "heads": 1, "kv_heads": 1},
}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "interpreted_hopper.py"), json.dumps(list(CASES.values()))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_agree_with_the_reference(errors, case):
    for label, error in zip(("out", "lse", "dq", "dk", "dv"), errors[case], strict=True):
        assert error < 1e-6, label


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("forward.py", "k_ring.release(c)", "pass"), "all threads of the program wait for each other"),
        (("dq.py", "v_ring.wait(i)", "pass"), None),
        (("dq.py", "seen = gl.expand_dims(rows_m, 1) < end_n", "seen = gl.expand_dims(rows_m, 1) >= 0"), None),
        (("dkv.py", "mbarrier.expect(kv_full, 2 * 64", "mbarrier.expect(kv_full, 64"), "bytes other than those"),
    ],
    ids=["a buffer never freed", "a product that does not wait", "a mask left out", "bytes miscounted"],
)
def test_a_fault_in_a_kernel_is_seen(tmp_path, change, said):
    """The interpreter itself: a copy of the package with one fault."""
    file, before, after = change
    package = tmp_path / "treepack"
    source = Path(__import__("treepack").__file__).parent
    for path in [*source.glob("*.py"), *source.glob("attention/**/*.py")]:
        target = package / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    broken = package / "attention" / "hopper" / file
    text = broken.read_text(encoding="utf-8")
    assert before in text
    broken.write_text(text.replace(before, after), encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(TESTS), *sys.path])
    case = {"tree": "agent", "size": 64, "heads": 1, "kv_heads": 1}
    command = [sys.executable, str(TESTS / "interpreted_hopper.py"), json.dumps([case])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if said:
        assert said in done.stderr
    else:
        found = json.loads(done.stdout.splitlines()[-1])[0]
        assert not max(found) < 1e-3 or any(x != x for x in found)
