"""The check at the first use of a set of kernels, on the GPU: it passes what is right, finds what is wrong, is short,
and leaves nothing behind. Every other test here runs without it."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from compare import leaves, random_tree
from torch.utils.checkpoint import checkpoint

from treepack.attention import operator as triton_op
from treepack.attention import rule as triton_rule
from treepack.attention import self_check, tree_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _checks(monkeypatch, _defaults):
    monkeypatch.setenv("TREEPACK_SELF_CHECK", "1")
    monkeypatch.setattr(self_check, "_verdicts", {})


def attend(*tensors, n=200, impl=None, **options):
    return tree_attention(*tensors, subtree_end=random_tree(n), impl=impl, **options)


@pytest.mark.parametrize("impl", ["triton", "triton_plain"])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (12, 2), (32, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_right_kernels_pass(impl, size, heads, kv_heads, dtype):
    attend(*leaves(200, heads, kv_heads, size, dtype), impl=impl, return_lse=True)
    (verdict,) = self_check.verdicts()
    assert verdict.wrong == ""
    assert verdict.features == ("forward and backward",)


@pytest.mark.parametrize("layout", ["rows", "fused", "strided", "misaligned"])
@pytest.mark.parametrize("size", [64, 128])
def test_layouts(layout, size):
    attend(*leaves(200, 8, 2, size, layout=layout))
    assert [x.wrong for x in self_check.verdicts()] == [""]


@pytest.mark.parametrize("size", [64, 128, 192])
def test_features(size):
    tensors = leaves(200, 8, 2, size)
    sinks = torch.randn(8, device="cuda").requires_grad_()
    for options in ({"sliding_window": 30}, {"softcap": 3.0}, {"sinks": sinks},
                    {"sliding_window": 9, "softcap": 5.0, "sinks": sinks}):  # fmt: skip
        attend(*tensors, **options)
    assert [x.wrong for x in self_check.verdicts()] == [""] * 4


@pytest.mark.parametrize("layout", ["columns", "latent"])
def test_two_head_sizes(layout):
    attend(*leaves(200, 8, 8, 192, layout=layout, values=128))
    assert [(x.sizes(), x.wrong) for x in self_check.verdicts()] == [("192 / 128", "")]


def test_float32():
    attend(*leaves(200, 4, 2, 64, torch.float32))
    assert [(x.dtype, x.wrong) for x in self_check.verdicts()] == [("float32", "")]


@pytest.mark.parametrize("impl", ["triton", "triton_plain"])
def test_wrong_kernels_are_found(impl, monkeypatch):
    backward = triton_op.backward_pass

    def wrong(*inputs):
        dq, dk, dv, delta = backward(*inputs)
        dv[5:7] *= 1.3
        return dq, dk, dv, delta

    tensors = leaves(200, 8, 2, 64)
    attend(*(x.detach() for x in tensors), impl=impl)  # scoring needs no backward pass
    monkeypatch.setattr(triton_op, "backward_pass", wrong)
    for _ in range(2):
        with pytest.raises(self_check.KernelCheckError, match=r"wrong results here, with bfloat16, .*dv: largest"):
            attend(*tensors, impl=impl)


@pytest.mark.parametrize("impl", ["triton", "triton_plain"])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("training", [False, True])
def test_it_takes_less_than_20_ms(impl, size, training, record_property):
    """After compilation: the whole check of 32 query heads and 8 K/V heads, with its wait for the device."""
    tensors = [x.squeeze(0).transpose(0, 1) for x in leaves(200, 32, 8, size)]
    kernels = triton_rule.choose(impl, tensors[0], tensors[2], 0, 0.0, 0.1)
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        started = time.perf_counter()
        verdict = self_check._check(kernels, *tensors, False, False, False, training, False)
        times.append(1e3 * (time.perf_counter() - started))
        assert verdict.wrong == ""
    print(f"self-check, {verdict.kernels} kernels, head size {size}, {training=}: {statistics.median(times):.1f} ms")
    assert statistics.median(times[1:]) < 20


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    """A checkpoint counts the tensors that its region saves, the first time and again when it recomputes."""
    tensors = leaves(200, 4, 2, 64)
    checkpoint(attend, *tensors, use_reentrant=reentrant).sum().backward()
    assert self_check.verdicts()
    want = torch.autograd.grad(attend(*tensors).sum(), tensors)
    assert all(torch.equal(x.grad, y) for x, y in zip(tensors, want, strict=True))


def test_under_autocast_inference_mode_and_strict_determinism():
    tensors = leaves(200, 4, 2, 64)
    with torch.autocast("cuda", dtype=torch.float16):
        attend(*tensors)
    with torch.inference_mode():
        attend(*(x.detach() for x in tensors))
    torch.use_deterministic_algorithms(True)
    try:
        attend(*tensors, sliding_window=20)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [x.wrong for x in self_check.verdicts()] == [""] * 3


def test_random_numbers_stay_as_they_are():
    torch.manual_seed(3)
    want = torch.rand(3, device="cuda"), torch.rand(3)
    torch.manual_seed(3)
    attend(*leaves(200, 4, 2, 64))
    assert self_check.verdicts()
    assert torch.equal(torch.rand(3, device="cuda"), want[0])
    assert torch.equal(torch.rand(3), want[1])


def test_not_in_a_graph_and_not_compiled():
    tensors = [x.detach() for x in leaves(200, 4, 2, 64)]
    end = random_tree(200)
    torch.compile(lambda q, k, v: tree_attention(q, k, v, subtree_end=end) + 1, fullgraph=True)(*tensors)
    assert self_check.verdicts() == []
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        tree_attention(*tensors, subtree_end=end)
    assert self_check.verdicts() == []
    tree_attention(*tensors, subtree_end=end)
    assert len(self_check.verdicts()) == 1
