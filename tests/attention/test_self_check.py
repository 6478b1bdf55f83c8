"""The check at the first use of a set of kernels: that it passes right kernels and finds wrong ones (in Triton's
interpreter), when it runs, that it leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from treepack.attention import operator as triton_op  # noqa: E402
from treepack.attention import rule as triton_rule  # noqa: E402
from treepack.attention import self_check, tiles  # noqa: E402

HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def results() -> dict:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / "interpreted_self_check.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "features"),
    [
        ("scoring", []),
        ("grouped, lse", ["forward and backward"]),
        ("everything", ["sliding_window", "softcap", "sinks", "forward and backward"]),
        ("two sizes, latent", ["forward and backward"]),
    ],
)
def test_right_kernels_pass(results, case, features):
    assert results[case] == [*features, ""]


def test_what_a_verdict_says(results):
    assert results["facts"] == ["portable", "cpu", "float32", 16, 16]
    assert results["sizes"] == ["16", "16 / 24"]


def test_a_wrong_row_is_found(results):
    assert results["a wrong row"].startswith("out: largest error")


def test_a_wrong_gradient_is_found_and_named(results):
    assert "dq: mean error" in results["a wrong gradient"]
    assert "dk: not finite" in results["a wrong gradient"]
    said = results["message"]
    assert said.startswith(
        "the portable kernels of tree attention give wrong results here, with float32, head size 16, forward and "
        "backward: "
    )
    for part in (torch.__version__, "Triton", 'impl="reference"', "TREEPACK_SELF_CHECK=0", "dk: not finite"):
        assert part in said


class OnGpu:
    """What `at_first_use` asks of q and k, as on a GPU."""

    def __init__(self, monkeypatch, wrong=""):
        self.ran: list[tuple] = []
        self.capturing = False
        monkeypatch.setattr(self_check, "_verdicts", {})
        monkeypatch.delenv("TREEPACK_SELF_CHECK", raising=False)
        monkeypatch.setattr(triton_rule, "INTERPRETED", False)
        monkeypatch.setattr(triton_op, "is_plain", lambda q: q.plain)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

        def check(*arguments):
            self.ran.append(arguments)
            return self_check.Verdict("portable", "a GPU", "bfloat16", 64, 64, (), 1.0, wrong)

        monkeypatch.setattr(self_check, "_check", check)

    def call(
        self, dtype=torch.bfloat16, size=64, values=64, index=0, kv_heads=4, plain=True, training=True, window=False,
        beside=0,
    ):  # fmt: skip
        def tensor(heads, size, beside=0):
            return SimpleNamespace(
                shape=(9, heads, size), dtype=dtype, plain=plain, device=SimpleNamespace(index=index),
                stride=lambda axis: (heads * (size + beside), size + beside, 1)[axis],
            )  # fmt: skip

        q, k, v = tensor(4, size), tensor(kv_heads, size), tensor(kv_heads, values, beside)
        self_check.at_first_use(triton_rule.PLAIN, q, k, v, window, False, False, training, False)


def test_once_for_each_kind_of_call(monkeypatch):
    gpu = OnGpu(monkeypatch)
    kinds = [{}, {"dtype": torch.float16}, {"size": 128}, {"values": 128}, {"index": 1}, {"kv_heads": 2},
             {"training": False}, {"window": True}, {"beside": 8}]  # fmt: skip
    for _ in range(3):
        for kind in kinds:
            gpu.call(**kind)
    assert len(gpu.ran) == len(kinds) == len(self_check.verdicts())


def test_wrong_kernels_raise_at_every_call(monkeypatch):
    gpu = OnGpu(monkeypatch, wrong="dq: largest error 1 > 0.1")
    for _ in range(3):
        with pytest.raises(self_check.KernelCheckError, match=r"dq: largest error 1 > 0\.1"):
            gpu.call()
    assert len(gpu.ran) == 1


def test_left_out_where_asked(monkeypatch):
    gpu = OnGpu(monkeypatch, wrong="dq: largest error 1 > 0.1")
    monkeypatch.setenv("TREEPACK_SELF_CHECK", "0")
    gpu.call()
    assert gpu.ran == []
    assert self_check.verdicts() == []


def test_not_while_a_graph_is_captured_or_compiled(monkeypatch):
    gpu = OnGpu(monkeypatch)
    gpu.call(plain=False)
    gpu.capturing = True
    gpu.call()
    assert gpu.ran == []
    gpu.capturing = False
    gpu.call()
    assert len(gpu.ran) == 1


def test_the_tree_has_every_kind_of_tile():
    """Runs of full tiles, masked tiles, split and whole items, padding, a fork, more than one root."""
    for heads, kv_heads in ((4, 2), (8, 1), (4, 1)):
        end, depth, rows128, _, rows64, *_, schedule, items = self_check._metadata(heads, kv_heads, None)
        n = len(end)
        assert depth is None
        assert n == 460
        assert int((end == torch.arange(n)).sum()) == 6
        for rows in (rows128, rows64):
            assert rows[:, 1].sum() > 0  # runs
            assert rows[:, 3].sum() > 0  # masked tiles
        real = items[1:][items[1:] != tiles.NO_ITEM]
        assert (real < 0).any()
        assert (real >= 0).any()
        assert 0 < int(items[0]) < len(schedule)
    assert self_check._metadata(2, 2, 40)[1] is not None
