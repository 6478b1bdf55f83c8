"""`treepack doctor` shows what the kernels said of themselves at their first use."""

import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("torch")
pytest.importorskip("triton")

from treepack.attention import self_check
from treepack.cli import doctor


def test_verdicts_are_checks(monkeypatch):
    monkeypatch.delenv("TREEPACK_SELF_CHECK", raising=False)
    right = self_check.Verdict("Hopper", "a GPU", "bfloat16", 64, 64, ("sinks", "forward and backward"), 5.5, "")
    wrong = self_check.Verdict("portable", "a GPU", "float16", 192, 128, (), 3.0, "out: not finite")
    monkeypatch.setattr(self_check, "_verdicts", {1: right, 2: wrong, 3: None})
    assert doctor.first_uses() == [
        doctor.Check("first use, Hopper kernels", True, "bfloat16, head size 64: sinks, forward and backward", 5.5),
        doctor.Check("first use, portable kernels", False, "out: not finite", 3.0),
    ]


def test_left_out(monkeypatch):
    monkeypatch.setenv("TREEPACK_SELF_CHECK", "0")
    (check,) = doctor.first_uses()
    assert check.passed
    assert check.detail == "left out: TREEPACK_SELF_CHECK=0"
