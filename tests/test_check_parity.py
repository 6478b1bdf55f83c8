"""`treepack.testing.check_parity`: what it accepts, and that it sees a leak (CASES 19)."""

import pytest
import torch
from tiny_models import COMMON, shared_samples, tiny
from transformers import Qwen2Config, Qwen2ForCausalLM

import treepack
from treepack.testing import check_parity


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_passes(family, dtype):
    model = tiny(family, dtype=dtype)
    found = check_parity(model, shared_samples(sets=True), max_tokens=40, temperature=0.9)
    assert found.trees > 1
    assert found.packed_tokens < found.raw_tokens
    if dtype == torch.float64:
        assert found.log_probs < 1e-9
        assert found.gradients < 1e-6
    assert found.worst in dict(model.named_parameters())


def test_against_another_attention():
    """The other side on transformers' own attention, in float64 through sdpa."""
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**COMMON), attn_implementation="treepack").double()
    found = check_parity(model, shared_samples(), alone="sdpa", impl="reference", branching="label")
    assert found.log_probs < 1e-9
    assert model.config._attn_implementation == "treepack"


def test_leaves_gradients_alone():
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    model.train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    check_parity(model, shared_samples(), max_tokens=64)
    check_parity(model, shared_samples(), alone="dense64")  # recomputes under the attention it was computed with
    assert model.config._attn_implementation == "treepack"
    assert float(model.lm_head.weight.grad.min()) == 1
    assert model.model.norm.weight.grad is None


def test_padded_batches():
    batch = {"input_ids": [[0, 0, 7, 8, 9], [5, 7, 8, 9, 1]], "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]}
    assert check_parity(tiny("llama"), batch).samples == 2


class Leaky(Qwen2ForCausalLM):
    """A model whose layers shift the row, as a convolution would."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + self.leak * args[0].roll(1, 1),))
        self.leak = 0.0


def test_sees_a_leak():
    model = Leaky._from_config(Qwen2Config(**COMMON), attn_implementation="treepack").double().eval()
    check_parity(model, shared_samples())
    model.leak = 1e-3
    with pytest.raises(
        treepack.PackError, match=r"log-probs: sample \d+, term \d+: packed .*, alone .*1e-09 is allowed"
    ):
        check_parity(model, shared_samples())
    half = model.to(torch.bfloat16)
    half.leak = 0.5
    with pytest.raises(treepack.PackError, match="error against float32: packed"):
        check_parity(half, shared_samples())


def test_sees_a_gradient():
    model = tiny("qwen2")
    calls = []

    def scale(gradient):
        calls.append(1)
        return gradient * (1.01 if len(calls) == 1 else 1.0)

    model.model.layers[0].mlp.up_proj.weight.register_hook(scale)
    with pytest.raises(treepack.PackError, match=r"gradient of model.layers.0.mlp.up_proj.weight: packed and alone"):
        check_parity(model, shared_samples())


def test_refuses():
    with pytest.raises(ValueError, match="nothing to compare"):
        check_parity(tiny("llama"), [{"input_ids": [1, 2], "completion_mask": [1, 0]}])
    with pytest.raises(ValueError, match="does not know the tree"):
        check_parity(tiny("llama", attention="sdpa"), shared_samples())
