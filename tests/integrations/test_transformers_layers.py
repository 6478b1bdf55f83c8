"""What layers, adapters and heads must be: refused by what they do, with the reason, and run where it makes no
difference."""

import peft
import pytest
import torch
from tiny_models import (
    KeepDouble,
    alone_log_probs,
    gradients,
    largest_difference,
    packed_log_probs,
    shared_samples,
    tiny,
)

import treepack
from treepack import term_log_probs
from treepack.integrations.transformers import model_inputs

OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0}
EXPERTS = {"num_local_experts": 2, "intermediate_size_mlp": 16}
FULL = ["full_attention", "full_attention"]


def one_tree():
    return treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")


def parity(model, wrapped=None):
    """Largest differences of log-probs and of gradients between packed and alone."""
    samples = shared_samples()
    with KeepDouble():
        packed = packed_log_probs(wrapped or model, samples)
        ours = gradients(model, packed)
        alone = alone_log_probs(model, samples)
        return largest_difference(packed, alone), largest_difference(ours, gradients(model, alone))


def test_a_decoder_that_is_called_past_its_model():
    """OPT calls `model.model.decoder`, not `model.model`: the hidden states are read there."""
    assert max(parity(tiny("opt", **OPT))) < 1e-12


@pytest.mark.parametrize("family", ["bart", "marian", "pegasus"])
def test_positions_along_the_row(family):
    more = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=r"Decoder\.forward takes no position_ids.*along the row"):
        term_log_probs(tiny(family, is_decoder=True, **more, **sizes), one_tree())


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_layers_that_drop_the_tree(family):
    model, tree = tiny(family), one_tree()
    message = r"DecoderLayer\.forward \(at model\.layers\.0\.self_attn\) does not hand on"
    for call in (lambda: term_log_probs(model, tree), lambda: model_inputs(tree, model=model)):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"got no subtree_end: call the model with model_inputs"):
        term_log_probs(model, tree, model_check=False)


def test_masks_of_their_own():
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn is DogeAttention: it chooses the keys"):
        term_log_probs(tiny("doge"), one_tree())


def test_queries_scaled_along_the_row():
    """Llama 4 scales by the index in the row, Ministral 3 by `position_ids`."""
    more = EXPERTS | {"layer_types": FULL, "num_experts_per_tok": 1, "floor_scale": 4}
    model = tiny("llama4_text", no_rope_layers=[1, 0], **more)
    message = r"ayer (layers\.1\.self_attn|1\)) scales its queries by their place in the row"
    with pytest.raises(ValueError, match=message):
        term_log_probs(model, one_tree())
    with pytest.raises(ValueError, match=message):
        model(**model_inputs(one_tree()))
    assert max(parity(tiny("llama4_text", no_rope_layers=[1, 1], **more))) < 1e-12
    assert max(parity(tiny("llama4_text", no_rope_layers=[1, 0], attn_temperature_tuning=False, **more))) < 1e-12
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4}
    assert max(parity(tiny("ministral3", rope_parameters=rope | {"llama_4_scaling_beta": 0.5}))) < 1e-12


def lora(**more):
    return peft.LoraConfig(r=4, init_lora_weights=False, **({"target_modules": ["q_proj", "v_proj"]} | more))


def test_adapters_that_start_in_the_row():
    """An activated LoRA starts at the last of its tokens in the row."""
    alora = lora(alora_invocation_tokens=[3], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("qwen2"), alora, "late")
    with pytest.raises(ValueError, match=r"adapter 'late' is an activated LoRA \(alora_invocation_tokens = \[3\]\)"):
        term_log_probs(model, one_tree())
    model.add_adapter("whole", lora(task_type="CAUSAL_LM"))
    model.set_adapter("whole")
    assert max(parity(model.get_base_model().double(), model)) < 1e-12


def test_adapters_of_several_kinds():
    inner = tiny("qwen2")
    mixed = peft.get_peft_model(inner, lora(), mixed=True)
    mixed.add_adapter("other", peft.LoHaConfig(r=4, init_weights=False, target_modules=["k_proj"]))
    mixed.set_adapter(["default", "other"])
    values, gradient = parity(inner.double(), mixed)
    assert values < 1e-12
    assert gradient < 1e-6


@pytest.mark.parametrize("tokens", [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [1, 2, 3]}])
def test_adapters_of_the_embedding(tokens):
    """They are wrappers of another make than the layers of PEFT."""
    model = peft.get_peft_model(tiny("qwen2"), lora(**tokens)).train()
    assert max(parity(model.get_base_model().double(), model)) < 1e-6


def test_adapters_of_the_head():
    model = peft.get_peft_model(tiny("qwen2"), lora(target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ValueError, match=r"the LM head is peft\.tuners\.lora\.layer\.Linear; only a plain torch\.nn"):
        term_log_probs(model, one_tree())
    assert torch.isfinite(term_log_probs(peft.get_peft_model(tiny("qwen2"), lora()), one_tree())).all()


def test_one_logit_that_is_changed():
    """A model that bars one id of many, after its head."""
    model = tiny("qwen2", vocab_size=9001)

    def bar(module, arguments, output):
        output.logits[..., 4321] = -1e4
        return output

    hook = model.register_forward_hook(bar)
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        term_log_probs(model, one_tree())
    hook.remove()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    term_log_probs(model, one_tree())  # tells nothing of the head
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    model.register_forward_hook(bar)
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        term_log_probs(model, one_tree())


def test_a_head_of_the_user():
    """Whatever the model's own head is, it is not used."""
    model = tiny("qwen2")
    tree = treepack.pack(shared_samples(), max_tokens=256, branching="label")[0].to("cpu")
    weight = model.lm_head.weight

    def head(hidden, labels):
        return (hidden @ weight.T).log_softmax(-1)[0].gather(1, labels[0].clamp(min=0)[:, None])[:, 0]

    expected = term_log_probs(model, tree)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    assert torch.allclose(term_log_probs(wrapped, tree, head=head), expected)
    with pytest.raises(ValueError, match=r"the LM head is peft\.tuners\.lora"):
        term_log_probs(wrapped, tree)


def test_a_head_elsewhere():
    model = tiny("qwen2")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    with pytest.raises(ValueError, match="offloaded"):
        term_log_probs(model, one_tree())
