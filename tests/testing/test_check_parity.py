"""`treepack.testing.check_parity`: what it accepts, and that it sees a leak (CASES 19)."""

import pytest
import torch
from tiny_models import COMMON, shared_samples, tiny
from torch import nn
from transformers import AutoModelForImageTextToText, LlavaConfig, Qwen2Config, Qwen2ForCausalLM

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


def spoil(parameter, factor=1.01, calls=1):
    """The gradients of the packed side, which runs first, come out wrong."""
    seen = []
    parameter.register_hook(lambda gradient: seen.append(1) or gradient * (factor if len(seen) <= calls else 1.0))


def test_sees_a_gradient():
    model = tiny("qwen2")
    spoil(model.model.layers[0].mlp.up_proj.weight)
    with pytest.raises(treepack.PackError, match=r"gradient of model.layers.0.mlp.up_proj.weight: packed and alone"):
        check_parity(model, shared_samples())


class Wrapper(nn.Module):
    """What adds a `module.` to the names: offloading around layers, DDP around models."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("layer", [0, 1])
def test_sees_a_gradient_below_a_submodule_called_module(layer):
    """Cut at `module.`, the names of all layers are one name, and the last layer's gradient stood for all."""
    model = tiny("qwen2")
    for each in model.model.layers:
        each.mlp = Wrapper(each.mlp)
    check_parity(model, shared_samples())
    spoil(model.model.layers[layer].mlp.module.up_proj.weight)
    what = rf"gradient of model.layers.{layer}.mlp.module.up_proj.weight: packed and alone"
    with pytest.raises(treepack.PackError, match=what):
        check_parity(Wrapper(model), shared_samples())  # the name is that in the model, without the wrapper around it


def test_sees_a_gradient_of_the_wrapper():
    model = tiny("qwen2")
    wrapper = Wrapper(model)
    wrapper.shift = nn.Parameter(torch.ones(32, dtype=torch.float64))
    model.model.norm.register_forward_hook(lambda _, args, out: out + wrapper.shift)
    check_parity(wrapper, shared_samples())
    spoil(wrapper.shift)
    with pytest.raises(treepack.PackError, match=r"gradient of shift \(of the wrapper\): packed and alone"):
        check_parity(wrapper, shared_samples())
    assert wrapper.shift.grad is None


def test_sees_a_gradient_of_an_adapter_in_half_precision():
    """There both sides are compared with a float32 copy of the model inside the wrapper: by the same names."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny("qwen2", dtype=torch.bfloat16), config, autocast_adapter_dtype=False)
    found = check_parity(model, shared_samples())
    assert found.worst in dict(model.get_base_model().named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            spoil(parameter, factor=4)
    with pytest.raises(treepack.PackError, match="gradients, largest error against float32: packed"):
        check_parity(model, shared_samples())


def test_frozen():
    """Nothing requires a gradient: the log-probs are compared, and the result says that they alone were."""
    model = Leaky._from_config(Qwen2Config(**COMMON), attn_implementation="treepack").double().eval()
    model.requires_grad_(False)
    found = check_parity(model, shared_samples())
    assert found.gradients is None
    assert found.worst == ""
    assert found.log_probs < 1e-9
    with pytest.raises(ValueError, match=r"gradient_tolerance is 0.1, but .* leave gradient_tolerance out"):
        check_parity(model, shared_samples(), gradient_tolerance=0.1)
    model.leak = 1e-3
    with pytest.raises(treepack.PackError, match="log-probs: sample"):
        check_parity(model, shared_samples())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compares_gradients_where_they_are_off(mode):
    model = tiny("qwen2")
    with mode():
        found = check_parity(model, shared_samples())
        assert not torch.is_grad_enabled()
    assert found.gradients == check_parity(model, shared_samples()).gradients
    spoil(model.model.norm.weight, factor=2)
    with mode(), pytest.raises(treepack.PackError, match=r"gradient of model\.norm\.weight"):
        check_parity(model, shared_samples())


def test_leaves_attention_alone():
    """The vision tower of a model keeps its own implementation, also where the other side's run ends in an error."""
    text = COMMON | {"model_type": "llama"}
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=63, vision_feature_layer=-1)
    chosen = {"text_config": "treepack", "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=chosen).double().eval()
    samples = shared_samples(vocab_size=60)

    def implementations():
        return [c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)]

    before = implementations()
    assert before[1:] == ["treepack", "sdpa"]
    for alone in (None, "sdpa", "eager"):
        check_parity(model, samples, alone=alone, log_prob_tolerance=1e-3, gradient_tolerance=1e-3)
        assert implementations() == before

    def broken(*_):
        if model.config.text_config._attn_implementation == "eager":
            raise RuntimeError("no memory")

    model.model.language_model.norm.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no memory"):
        check_parity(model, samples, alone="eager")
    assert implementations() == before
    with pytest.raises(ValueError, match="is not supported"):
        check_parity(model, samples, alone="no such attention")
    assert implementations() == before
    model.set_attn_implementation("eager")  # nothing is left that would keep transformers from setting them
    assert implementations() == ["eager"] * 3


def test_refuses():
    with pytest.raises(ValueError, match="nothing to compare"):
        check_parity(tiny("llama"), [{"input_ids": [1, 2], "completion_mask": [1, 0]}])
    with pytest.raises(ValueError, match="does not know the tree"):
        check_parity(tiny("llama", attention="sdpa"), shared_samples())
