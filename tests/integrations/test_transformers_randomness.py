"""Whatever draws at random in training is refused by its name: a shared token would draw once (CASES 19).

Every model here runs as well with the amount at 0, and in evaluation.
"""

import peft
import pytest
import torch
from tiny_models import FAMILIES, shared_samples, tiny
from torch import nn
from transformers.integrations import neftune

import treepack
from treepack import term_log_probs

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Family, setting, and what it stays without.
SETTINGS = {
    "starcoder2 residual": ("starcoder2", "residual_dropout", {"embedding_dropout": 0.0}),
    "starcoder2 embedding": ("starcoder2", "embedding_dropout", {"residual_dropout": 0.0}),
    "seed_oss": ("seed_oss", "residual_dropout", {"attention_dropout": 0.0}),
    "biogpt": ("biogpt", "hidden_dropout_prob", {"attention_probs_dropout_prob": 0.0}),
    "biogpt layers": ("biogpt", "layerdrop", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "phimoe input": ("phimoe", "input_jitter_noise", {"router_jitter_noise": 0.0, **EXPERTS}),
    "phimoe router": ("phimoe", "router_jitter_noise", EXPERTS),
    "minimax_m2": ("minimax_m2", "router_jitter_noise", EXPERTS),
    "gpt_neox": ("gpt_neox", "hidden_dropout", {}),
    "opt": ("opt", "dropout", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "granite": ("granite", "attention_dropout", {}),
}


def one_tree():
    return treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")


def runs(model):
    """Twice the same, whatever was drawn in between."""
    with torch.no_grad():
        first = term_log_probs(model, one_tree())
        torch.manual_seed(7)
        return torch.equal(first, term_log_probs(model, one_tree()))


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    family, setting, others = SETTINGS[case]
    model = tiny(family, **others, **{setting: 0.1})
    assert runs(model)
    with pytest.raises(ValueError, match=r"trains with [\w.]+( \(dropout\))? = 0\.1: a shared token would draw once"):
        term_log_probs(model.train(), one_tree())
    assert runs(tiny(family, **others, **{setting: 0.0}).train())


@pytest.mark.parametrize("family", FAMILIES)
def test_families_without(family):
    """No family that runs is refused for a name."""
    assert runs(tiny(family).train())


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_modules(kind):
    model = tiny("qwen2").train()
    model.model.norm = nn.Sequential(model.model.norm, kind(0.25))
    with pytest.raises(ValueError, match=r"norm\.1 \(dropout\) = 0\.25"):
        term_log_probs(model, one_tree())
    model.model.norm[1].p = 0.0
    assert runs(model)
    model.model.norm[1].p = 0.25
    model.model.norm[1].eval()
    assert runs(model)


TARGET = {"target_modules": ["q_proj"]}
ADAPTERS = {
    "lora_dropout": lambda amount: peft.LoraConfig(r=4, lora_dropout=amount, init_lora_weights=False, **TARGET),
    "module_dropout": lambda amount: peft.LoHaConfig(r=4, module_dropout=amount, init_weights=False, **TARGET),
    "rank_dropout": lambda amount: peft.LoKrConfig(r=4, rank_dropout=amount, init_weights=False, **TARGET),
    "boft_dropout": lambda amount: peft.BOFTConfig(
        boft_block_size=4, boft_dropout=amount, init_weights=False, **TARGET
    ),
    "oft_dropout": lambda amount: peft.OFTConfig(
        oft_block_size=8, r=0, module_dropout=amount, init_weights=False, **TARGET
    ),
    "vera_dropout": lambda amount: peft.VeraConfig(r=4, vera_dropout=amount, init_weights=False, **TARGET),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("setting", ADAPTERS)
def test_adapters(setting):
    model = peft.get_peft_model(tiny("qwen2", torch.float32), ADAPTERS[setting](0.5))
    assert runs(model.eval())
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.q_proj\.{setting}\W+default.* = 0\.5: a shared"):
        term_log_probs(model.train(), one_tree())
    with model.disable_adapter():
        assert runs(model)
    assert runs(peft.get_peft_model(tiny("qwen2", torch.float32), ADAPTERS[setting](0.0)).train())


@pytest.mark.parametrize("setting", ["lora_dropout", "rank_dropout"])
def test_adapters_that_do_not_run(setting):
    """Of several, those that are active draw."""
    model = peft.get_peft_model(tiny("qwen2", torch.float32), ADAPTERS[setting](0.5), "noisy")
    model.add_adapter("quiet", ADAPTERS[setting](0.0))
    model.set_adapter("quiet")
    assert runs(model.train())
    model.set_adapter("noisy")
    with pytest.raises(ValueError, match=rf"{setting}\W+noisy.* = 0\.5"):
        term_log_probs(model.train(), one_tree())


def test_noise_on_the_embedding():
    """What Trainer's `neftune_noise_alpha` does."""
    model = tiny("qwen2").train()
    hook = neftune.activate_neftune(model, 5.0)
    with pytest.raises(ValueError, match=r"embed_tokens\.neftune_noise_alpha = 5\.0"):
        term_log_probs(model, one_tree())
    assert runs(model.eval())
    neftune.deactivate_neftune(model.train(), hook)
    assert runs(model)
