"""Models with layers that carry a state on the GPU: packed as each sample alone, checkpointed, by kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("treepack._core")
pytest.importorskip("fla", reason="needs treepack[recurrent]")

from tiny_hybrids import RUN  # noqa: E402
from tiny_models import shared_samples, tiny  # noqa: E402

import treepack  # noqa: E402
from treepack import term_log_probs  # noqa: E402
from treepack.integrations.transformers import model_inputs  # noqa: E402
from treepack.testing import check_parity  # noqa: E402

WIDE = {"hidden_size": 64, "head_dim": 16}
# Few sizes: flash-linear-attention tunes for minutes for each.
SIZES = {
    "qwen3_5_text": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "kimi_linear": {
        "linear_num_heads": 2,
        "linear_head_dim": 64,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 99,  # no experts: which of them a token gets can change with its last bits
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 64},
    "lfm2": {},
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind in RUN])
def test_parity_in_bfloat16(kind, reentrant):
    """Both kinds of checkpointing; alone is transformers' own code."""
    model = tiny(kind, torch.bfloat16, **WIDE, **SIZES[kind]).cuda()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    check_parity(model.train(), shared_samples(count=12), max_tokens=64, alone="sdpa")


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind in RUN])
def test_same_bits(kind):
    """The same log-probs and gradients at every run, with padding."""
    model = tiny(kind, torch.bfloat16, **WIDE, **SIZES[kind]).cuda()
    tree = treepack.pack(shared_samples(count=12), max_tokens=256, pad_to_multiple_of=64)[0].to("cuda")
    found = []
    for _ in range(2):
        model.zero_grad()
        values = term_log_probs(model, tree)
        values.sum().backward()
        found.append([values.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(found[0]) > 10


def test_kernels_agree_with_the_reference():
    model = tiny("qwen3_5_text", torch.float32, **WIDE, **SIZES["qwen3_5_text"]).cuda()
    tree = treepack.pack(shared_samples(count=12), max_tokens=256)[0].to("cuda")
    with torch.no_grad():
        kernels, reference = (
            model(**model_inputs(tree, model=model, impl=impl)).logits for impl in (None, "reference")
        )
    assert float((kernels - reference).abs().max()) < 2e-2 * float(reference.abs().max())
