"""`treepack doctor`: what it says about this machine, and that its self-test can fail."""

import json
import sys

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command line needs treepack[cli]")
pytest.importorskip("rich", reason="the command line needs treepack[cli]")

import treepack
from treepack.cli import doctor
from treepack.cli.commands import run


def found(capsys, code=0):
    assert run(["doctor", "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_this_machine(capsys):
    torch = pytest.importorskip("torch")
    report = found(capsys)
    assert report["ok"] is True
    assert report["versions"]["treepack"] == treepack.__version__
    assert report["versions"]["numpy"] == np.__version__
    kernels = {kernel["impl"]: kernel for kernel in report["kernels"]}
    assert list(kernels) == list(treepack.attention.IMPLEMENTATIONS)
    assert kernels["reference"]["runs"]
    assert kernels["triton"]["runs"] == torch.cuda.is_available()
    assert all(check["passed"] for check in report["self_test"])
    packing = "8 samples, 4 ways, trees of at most 96 tokens: every array as the samples say"
    assert report["self_test"][0]["detail"] == packing
    if not torch.cuda.is_available():
        assert report["devices"] == []
        assert report["no_device"].startswith("torch ")
        assert kernels["triton"]["reason"] == "it needs a GPU, and torch finds none here"
        assert kernels["fa4"]["reason"] == "it needs a Hopper GPU, and torch finds none here"
        names = ["packing", "attention, reference on the CPU", "states, reference on the CPU"]
        assert [check["name"] for check in report["self_test"]] == names
    scans = {kernel["impl"]: kernel for kernel in report["scans"]}
    assert list(scans) == ["triton", "levels", "reference"]
    assert scans["reference"]["runs"]
    if not torch.cuda.is_available():
        assert scans["triton"]["reason"] == "it needs a GPU, and torch finds none here"


def test_without_torch(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = found(capsys)
    assert report["ok"] is True
    assert report["kernels"] == report["scans"] == []
    assert report["no_torch"] == "torch is not installed: pip install 'treepack[torch]'"
    assert [check["name"] for check in report["self_test"]] == ["packing"]
    assert run(["doctor"]) == 0
    assert "all no torch is not installed: pip install 'treepack[torch]'" in " ".join(capsys.readouterr().out.split())


def test_no_torch_and_no_gpu_in_one_line(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        assert run(["doctor", "--impl", "triton"]) == 2
        expected = "treepack: --impl triton cannot run here: it needs a GPU, and torch finds none here\n"
        assert capsys.readouterr() == ("", expected)
    assert run(["doctor", "--impl", "reference"]) == 0
    capsys.readouterr()
    assert run(["doctor", "--impl", "best"]) == 2
    assert "--impl best is unknown; allowed is triton" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(["doctor", "--impl", "reference"]) == 2
    expected = "treepack: --impl reference cannot run here: torch is not installed: pip install 'treepack[torch]'\n"
    assert capsys.readouterr() == ("", expected)


def test_the_table(capsys):
    assert run(["doctor"]) == 0
    out, _ = capsys.readouterr()
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "self-test" in out
    assert "passed" in out
    assert "FAILED" not in out


def test_wrong_attention_is_noticed(capsys, monkeypatch):
    pytest.importorskip("torch")
    from treepack.attention import reference

    real = reference.tree_attention

    def sees_too_much(q, k, v, subtree_end, **options):
        return real(q, k, v, subtree_end * 0 + len(subtree_end), **options)

    monkeypatch.setattr(reference, "tree_attention", sees_too_much)
    report = found(capsys, code=1)
    assert [check["passed"] for check in report["self_test"]] == [True, False, True]
    assert "largest relative error" in report["self_test"][1]["detail"]


def test_wrong_gradients_are_noticed(monkeypatch):
    torch = pytest.importorskip("torch")
    from treepack.attention import reference

    real = reference.tree_attention
    monkeypatch.setattr(
        reference, "tree_attention", lambda q, *rest, **options: real(q.detach() * 0 + q, *rest, **options)
    )
    assert all(check.passed for check in doctor.self_test(torch))
    monkeypatch.setattr(
        reference,
        "tree_attention",
        lambda q, k, v, *rest, **options: real(q, (k + k.detach()) / 2, v, *rest, **options),
    )
    assert not all(check.passed for check in doctor.self_test(torch))


@pytest.mark.parametrize("wrong", ["runs on", "no gradient"])
def test_wrong_states_are_noticed(capsys, monkeypatch, wrong):
    """A convolution that runs on from one sample into the next, and one that loses a gradient."""
    torch = pytest.importorskip("torch")
    from treepack.recurrent import reference

    real = reference.tree_conv1d

    def runs_on(x, weight, *rest, **options):
        y = real(x, weight, *rest, **options)
        return y + 0.1 * y.roll(1, 0) if wrong == "runs on" else y + 0 * x.sum() - (x - x.detach())

    monkeypatch.setattr(reference, "tree_conv1d", runs_on)
    checks = {check.name: check for check in doctor.self_test(torch)}
    assert not checks["states, reference on the CPU"].passed
    assert "largest relative error" in checks["states, reference on the CPU"].detail


def test_wrong_packing_is_noticed(capsys, monkeypatch):
    real = doctor.pack

    def loses_a_sample(samples, **options):
        return real(samples[:-1], **options)

    monkeypatch.setattr(doctor, "pack", loses_a_sample)
    report = found(capsys, code=1)
    assert report["self_test"][0]["passed"] is False
    assert "PackError" in report["self_test"][0]["detail"]
