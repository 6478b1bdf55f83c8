"""The benches of attention without a GPU: what they read from a command line, what they compare with, what they print.
FlashAttention's functions are played by plain torch, times by ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import forests
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from treepack.attention import reference  # noqa: E402

BENCHES = Path(__file__).resolve().parents[2] / "benches"
SIX = ["256:16/2", "64:64/8:window=128:sinks", "64:64/8:sinks", "192/128:32/32", "96:32/8", "128:32/8"]
TREE = [(20, [(9, []), (7, [(3, []), (4, [])])]), (6, [])]
SHAPES = ["24/16:4/2", "16:4/4", "24/16:4/4:window=5:sinks", "16/24:4/2:sinks"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import gpu_attention

    monkeypatch.setattr(forests, "gpu_trees", lambda: {"tiny": TREE})
    return gpu_attention


def make(bench, shape, *more):
    options = bench.parsed(["--shape", shape, *more])
    return bench.make_case("tiny", options.shape[0], options, "cpu"), options


def ours(case):
    """The reference as a peer."""
    end, flat = case.end, lambda x: x.squeeze(0).transpose(0, 1)
    return lambda q, k, v: flat(reference.tree_attention(q, k, v, end, **case.extras())), None, 0


def one_by_one(q, k, v, cu_q, cu_k, window):
    """Causal attention of sequences one after another; queries are the last rows of each."""
    outs = []
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        end = torch.full((int(d - c),), int(d - c))
        outs.append(reference.tree_attention(q[a:b], k[c:d], v[c:d], end, sliding_window=window))
    return torch.cat(outs)


@pytest.fixture
def flash(bench, monkeypatch):
    """FlashAttention 2 and 3, as the peers call them."""

    def varlen(window=None):
        return lambda q, k, v, cu_q, cu_k, max_q, max_k: one_by_one(q, k, v, cu_q, cu_k, window)

    def window(options):
        assert (options["is_causal"], options["window_size_right"]) == (True, 0)
        return options["window_size_left"] + 1 or None

    def fwd(q, k, v, **options):
        return one_by_one(q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"], window(options)), None, None, None

    def bwd(dout, q, k, v, out, lse, dq, dk, dv, **options):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = fwd(*leaves, **options)[0]
        for found, x in zip((dq, dk, dv), torch.autograd.grad(again, leaves, dout), strict=True):
            found.copy_(x)

    monkeypatch.setattr(bench.gpu_peers, "_varlen", varlen)
    monkeypatch.setattr(bench.gpu_peers.flash3, "load", lambda folder: None)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)


def test_all_shapes_in_one_command(bench):
    options = bench.parsed(["--shape", *SIX, "--impl", "triton", "gathered_fa3", "--fa3", "folder"])
    assert [str(shape) for shape in options.shape] == [
        "D 256  heads 16/2",
        "D 64  heads 64/8  window 128  sinks",
        "D 64  heads 64/8  sinks",
        "D 192/128  heads 32/32",
        "D 96  heads 32/8",
        "D 128  heads 32/8",
    ]
    assert [str(x) for x in bench.parsed(["--size", "128", "192/128", "--heads", "12", "--kv", "2"]).shape] == [
        "D 128  heads 12/2",
        "D 192/128  heads 12/2",
    ]
    assert str(bench.parsed([]).shape[0]) == "D 128  heads 32/8"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--shape", "192-128:32/32"], "'192-128:32/32' is no shape: give SIZE:HEADS/KV"),
        (["--shape", "64:8"], "'64:8' is no shape"),
        (["--size", "192x128"], "'192x128' is no head size"),
    ],
)
def test_what_is_no_shape(bench, capsys, wrong, message):
    with pytest.raises(SystemExit):
        bench.parsed(wrong)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", SHAPES)
def test_the_truth_is_every_path_alone(bench, shape):
    """Two heads of it, against the whole tree in float64."""
    case, _ = make(bench, shape)
    dout = bench.upstream_of(case)
    leaves = [x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)]
    out = reference.tree_attention(*leaves, case.end, **case.extras())
    only = torch.zeros_like(out)
    only[:, [0, -1]] = dout[:, [0, -1]].double()
    want = [out, *torch.autograd.grad(out, leaves, only)]
    for found, wanted in zip(bench.truth(case, dout), want, strict=True):
        torch.testing.assert_close(found.double(), wanted[:, [0, -1]].detach(), rtol=1e-4, atol=1e-4)


def test_a_wrong_peer_is_named(bench):
    case, _ = make(bench, SHAPES[0])
    dout = bench.upstream_of(case)
    want, attention = bench.truth(case, dout), ours(case)[0]
    assert bench.gate(case, attention, dout, want) == ""
    assert bench.gate(case, lambda q, k, v: attention(q, k, 1.1 * v), dout, want).startswith("out off by")
    said = bench.gate(case, lambda q, k, v: attention(q, k, v + 0.2 * (v - v.detach())), dout, want)
    assert said == "dv off by 2.0e-01"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table(bench, flash, monkeypatch, capsys, shape):
    """Every peer that can run does, is right, and says so where it leaves the sinks out."""
    case, options = make(bench, shape, "--fa3", "folder", "--impl", "triton", "gathered", "gathered_fa3", "alone",
                         "alone_fa3", "areal", "fa4")  # fmt: skip
    monkeypatch.setitem(bench.gpu_peers.PEERS, "triton", ours)
    monkeypatch.setattr(bench, "timed", lambda function, options: (function(), (1.0, 1.0, 1.0))[1])
    bench.compare(case, options)
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert head == f"tiny  {case.shape}  N {len(case.end)}  raw {sum(map(len, case.paths))}"
    said = {line.split()[0]: line for line in lines[1:]}
    assert "no time: no --areal FILE" in said.pop("areal")
    assert "no time: impl=" in said.pop("fa4")
    size, value_size = case.shape.sizes
    for name in ("gathered", "alone"):
        line = said.pop(name) if value_size > size else ""
        assert not line or line.endswith("no time: FlashAttention-2 takes one head size")
    for name, line in said.items():
        assert "1.000 (1.000 1.000)" in line, line
        assert line.endswith("without the sinks") == (case.shape.sinks and name != "triton")


def test_alone_is_each_path(bench, flash):
    case, _ = make(bench, "24/16:4/2:window=5", "--fa3", "folder")
    for peer in (bench.gpu_peers.alone, bench.gpu_peers.alone_fa3):
        attention, inputs, _ = peer(case)
        whole = ours(case)[0](case.q, case.k, case.v)
        want = torch.cat([whole[torch.from_numpy(path)] for path in case.paths])
        torch.testing.assert_close(attention(*inputs).float(), want.float(), rtol=2e-2, atol=2e-2)


def test_flash_attention_3_that_is_not_there(bench, tmp_path):
    case, _ = make(bench, SHAPES[1], "--fa3", str(tmp_path))
    with pytest.raises(bench.gpu_peers.Unavailable, match=r"no flash_attn_3/_C\*\.so below"):
        bench.gpu_peers.gathered_fa3(case)
