"""Models and the LM head on the GPU: bfloat16 within the tolerance of the model run one by one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("treepack._core")

from tiny_models import FAMILIES, shared_samples, tiny  # noqa: E402

import treepack  # noqa: E402
from treepack import term_log_probs  # noqa: E402
from treepack.logprobs import dense as lm_head_dense  # noqa: E402
from treepack.logprobs import head_log_probs  # noqa: E402
from treepack.testing import check_parity  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES)
def test_families_in_float32(family):
    check_parity(tiny(family, dtype=torch.float32).cuda(), shared_samples(sets=True), impl="triton", alone="dense64")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_families_in_bfloat16(family):
    model = tiny(family, dtype=torch.bfloat16, head_dim=16, hidden_size=64).cuda()
    model.gradient_checkpointing_enable()
    check_parity(model.train(), shared_samples(count=12), impl="triton")


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": 0.5, "temperature": 0.7, "entropy": True}])
@pytest.mark.parametrize("sets", [False, True])
def test_head(options, sets, monkeypatch):
    """The Triton passes against torch in float64; the same bits at every run; M = 0."""
    monkeypatch.setattr(lm_head_dense, "CHUNK_LOGITS", 20_000)
    tree = treepack.pack(shared_samples(sets=sets), max_tokens=256)[0].to("cuda")
    hidden = torch.randn(tree.num_tokens, 96, device="cuda")
    weight = torch.randn(1000, 96, device="cuda") / 8

    def run(dtype):
        leaves = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (hidden, weight)]
        values = head_log_probs(leaves[0], leaves[1], tree, **options)
        values = values[:2] if options.get("entropy") else (values,)
        loss = sum((x * torch.cos(torch.arange(len(x), device="cuda"))).sum() for x in values)
        return [*values, *torch.autograd.grad(loss, leaves)]

    exact, got, again = run(torch.float64), run(torch.bfloat16), run(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    for a, b in zip(got, exact, strict=True):
        tolerance = 2**-6 if a.dtype == torch.bfloat16 else 1e-4
        assert float((a.double() - b).abs().max()) < tolerance * float(b.abs().max())
    for a, b in zip(run(torch.float32), exact, strict=True):
        assert float((a.double() - b).abs().max()) < 1e-4 * float(b.abs().max())


def test_compile():
    """One graph with the Triton kernels inside, for trees of several lengths."""
    model = tiny("llama", dtype=torch.float32).cuda()
    trees = [tree.to("cuda") for tree in treepack.pack(shared_samples(), max_tokens=30)]
    expected = [term_log_probs(model, tree) for tree in trees]
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tree, values in zip(trees, expected, strict=True):
        got = term_log_probs(compiled, tree)
        got.sum().backward()
        assert float((got - values).abs().max()) < 1e-4


def test_no_terms_and_a_dummy():
    from treepack.distributed import dummy_tree

    model = tiny("qwen2", dtype=torch.bfloat16).cuda()
    term_log_probs(model, dummy_tree({}).to("cuda")).sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) == 0 for p in model.parameters())
