"""What would be wrong on a packed tree is refused, with a message that says what was found and why (CASES 15 to 17)."""

import pytest
import torch
from tiny_models import COMMON, config, shared_samples, tiny
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import treepack
from treepack import term_log_probs
from treepack.integrations.transformers import model_inputs, router_aux_loss


def one_tree(**options):
    return treepack.pack(shared_samples(), max_tokens=256, **options)[0].to("cpu")


def both(model, tree=None):
    """The two ways in: the log-probs of a tree, and a plain call of the model."""
    tree = tree or one_tree()
    return (lambda: term_log_probs(model, tree)), (lambda: model(**model_inputs(tree)))


@pytest.mark.parametrize("stock", ["eager", "sdpa"])
def test_stock_attention(stock):
    """CASES 15 and 16: stock implementations are silently wrong on a tree."""
    with pytest.raises(ValueError, match=f"attn_implementation='{stock}', which does not know the tree"):
        term_log_probs(tiny("llama", attention=stock), one_tree())


def test_another_attention_in_one_layer():
    model = tiny("qwen2")
    layer = model.model.layers[1].self_attn
    layer.config = config("qwen2")
    layer.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn uses attn_implementation='sdpa'"):
        term_log_probs(model, one_tree())


def test_layers_that_bypass_the_interface():
    """A layer that computes attention itself leaves no trace in the config: it is found by what it does, and the layers
    that ran are counted."""
    model = tiny("qwen2")
    inner = model.model.layers[0].self_attn

    class OwnAttention(nn.Module):
        layer_idx = 0

        def forward(self, hidden_states, **kwargs):
            return hidden_states.cumsum(1) if self.leaks else hidden_states, None

    model.model.layers[0].self_attn = OwnAttention()
    model.model.layers[0].self_attn.leaks = True
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.self_attn \(OwnAttention\) leaks between samples"):
        term_log_probs(model, one_tree())
    model = tiny("qwen2")
    model.model.layers[0].self_attn = OwnAttention()
    model.model.layers[0].self_attn.leaks = False
    with pytest.raises(ValueError, match="1 of 2 layers in which tokens meet"):
        term_log_probs(model, one_tree())
    model.model.layers[0].self_attn = inner
    assert term_log_probs(model, one_tree()).shape == one_tree().term_row.shape


OTHERS = {
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
        r"layers\.0\.mamba is JambaMambaMixer, which carries a state: it scans by mamba_selective_scan \(Mamba-1",
    ),
    "falcon_mamba": ({"state_size": 4}, "FalconMambaMixer, which carries a state: it scans by .*Mamba-1|own code"),
    "mamba2": ({"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2}, "no position_ids"),
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
        r"layers\.0\.self_attn is MiniMaxLightningAttention.*tokens meet in its own code",
    ),
    "llama4_text": (
        {"layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2, "intermediate_size_mlp": 16},
        "chunked_attention",
    ),
    "bloom": ({"n_layer": 2, "n_head": 4}, "own code"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_that_have_no_form_for_trees(kind):
    """CASES 17: layers that run straight across the samples, by name and with the reason."""
    more, message = OTHERS[kind]
    sizes = {name: value for name, value in COMMON.items() if kind not in ("bloom", "mamba2") or "num" not in name}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(sizes | more)), attn_implementation="treepack")
    with pytest.raises(ValueError, match=message):
        term_log_probs(model.eval(), one_tree())


def test_hybrid_models_through_a_plain_call():
    """Without term_log_probs in between, the first attention layer that runs refuses."""
    for kind, message in (("linear_attention", "it would carry state"), ("indexed_attention", "an indexer chooses")):
        model = tiny("qwen2")
        model.config.layer_types = ["full_attention", kind]
        with pytest.raises(ValueError, match=f"layer 1 is of type '{kind}'; .*{message}"):
            model(**model_inputs(one_tree()))


def test_padding_masks():
    """A 2-D padding mask would be dropped by transformers without a word; also where nothing is masked."""
    model, tree = tiny("qwen2"), one_tree()
    inputs = model_inputs(tree)
    for mask in (torch.ones(1, tree.num_tokens, dtype=torch.long), torch.zeros(1, 1, tree.num_tokens, tree.num_tokens)):
        with pytest.raises(ValueError, match="a packed tree has no padding mask"):
            model(**inputs | {"attention_mask": mask})


def test_what_is_not_one_tree():
    packed = treepack.pack(shared_samples(), max_tokens=256)
    for wrong, message in (
        (packed, "not a Packed of 1: loop over it"),
        (shared_samples(), "not a list of 8: loop over it"),
        ({"tree": packed[0]}, "not a dict"),
    ):
        for call in both(tiny("qwen2"), wrong):
            with pytest.raises(TypeError, match=message):
                call()


def test_model_of_the_inputs():
    """A model that is named is checked before its inputs are made."""
    tree = one_tree()
    model = tiny("mistral")
    assert torch.equal(model(**model_inputs(tree, model=model)).logits, model(**model_inputs(tree)).logits)
    with pytest.raises(ValueError, match="attn_implementation='sdpa', which does not know the tree"):
        model_inputs(tree, model=tiny("qwen2", attention="sdpa"))


def test_ids_that_the_model_does_not_have():
    samples = shared_samples()
    samples[4]["input_ids"] = samples[4]["input_ids"].copy()
    samples[4]["input_ids"][-1] = 70
    tree = treepack.pack(samples, max_tokens=256)[0].to("cpu")
    with pytest.raises(ValueError, match=r"sample 4: token id 70 \(packed position \d+\).* has 64 embeddings"):
        term_log_probs(tiny("qwen2"), tree)


def test_temperature():
    for wrong, message in (
        (0.0, "positive number"),
        (float("nan"), "positive number"),
        (torch.ones(3), r"shape \(3,\); allowed is one number, or \(8,\): one for each sample"),
        ([1.0] * 7 + [-2.0], r"^sample 7: temperature must be a positive number, not -2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            term_log_probs(tiny("qwen2"), one_tree(), temperature=wrong)
    for wrong in (None, "1"):
        with pytest.raises(TypeError, match=f"temperature must be a number, not {wrong!r}"):
            term_log_probs(tiny("qwen2"), one_tree(), temperature=wrong)


def test_unpacked_rows():
    """Also what Trainer leaves of a tree when it removes the columns it does not know."""
    with pytest.raises(ValueError, match=r"got no subtree_end.*remove_unused_columns=False"):
        tiny("qwen2")(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)


def test_cache():
    model, tree = tiny("qwen2"), one_tree()
    with pytest.raises(ValueError, match="cache of keys and values"):
        model(**model_inputs(tree) | {"use_cache": True})
    with pytest.raises(ValueError, match="cache of keys and values"):
        model(**{k: v for k, v in model_inputs(tree).items() if k != "use_cache"})
    with pytest.raises(ValueError, match=r"no padding mask|cache|to generate"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)


@pytest.mark.parametrize("setting", ["attention_dropout", "resid_pdrop"])
def test_dropout_in_training(setting):
    model = tiny("phi3", **{setting: 0.1}).train()
    with pytest.raises(ValueError, match=r"= 0.1: a shared token would draw once"):
        term_log_probs(model, one_tree())
    if setting == "attention_dropout":
        with pytest.raises(ValueError, match=r"attention dropout 0\.1"):
            model(**model_inputs(one_tree()))
    assert torch.isfinite(term_log_probs(model.eval(), one_tree())).all()


def test_router_loss():
    """A non-zero auxiliary loss counts a shared token once, unless it is weighted by position_samples."""
    model = tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.01)
    for run in both(model):
        with pytest.raises(ValueError, match=r"router_aux_loss_coef = 0.01.*weighted by position_samples"):
            run()
    assert term_log_probs(model, one_tree(), aux_loss=True).aux_loss > 0
    for more in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        changed = tiny("mixtral", **({"output_router_logits": True, "router_aux_loss_coef": 0.01} | more))
        assert torch.isfinite(term_log_probs(changed, one_tree())).all()
    with pytest.raises(ValueError, match="returned no router logits"):
        term_log_probs(tiny("llama"), one_tree(), aux_loss=True)
    asked = {"output_router_logits": True}
    for family, more in (("mixtral", {}), ("qwen3_moe", {"router_aux_loss_coef": 0.0}), ("gpt_oss", {})):
        model = tiny(family, **more)
        inputs = model_inputs(one_tree(), model=model)
        del inputs["attention_mask"]  # which the router's loss would take for a padding mask
        with pytest.raises(ValueError, match=r"was called with output_router_logits=True.*weighted_aux_loss=True"):
            model(**inputs, **asked)
        assert len(model(**inputs, **asked, weighted_aux_loss=True).router_logits) == 2
    logits = (torch.randn(one_tree().num_tokens, 4),)
    assert router_aux_loss(logits, one_tree(), num_experts=4, top_k=2).shape == ()


def test_a_window_that_never_arrives():
    """Models that put their window into the mask alone would lose it (CASES 18)."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    windows = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    model = tiny("qwen2_moe", shared_expert_intermediate_size=16, **experts, **windows)
    with pytest.raises(ValueError, match=r"sliding window in its config \(4\)"):
        term_log_probs(model, one_tree())


def test_scores_that_tree_attention_does_not_compute():
    model, tree = tiny("llama"), one_tree()
    for name in ("position_bias", "cu_seq_lens_q"):
        with pytest.raises(ValueError, match=f"got {name}"):
            model(**model_inputs(tree), **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="is not causal"):
        model(**model_inputs(tree), is_causal=False)


def test_lengths_and_devices():
    """CASES 20: metadata of another tree; two rows at once; a tree still on the host."""
    model, tree, other = tiny("llama"), one_tree(), one_tree(pad_to_multiple_of=64)
    with pytest.raises(ValueError, match="made for another packed tree"):
        model(**model_inputs(tree) | {"tree_tiles": model_inputs(other)["tree_tiles"]})
    two = {k: v.expand(2, -1) for k, v in model_inputs(tree).items() if k in ("input_ids", "position_ids")}
    with pytest.raises(ValueError, match="batch size must be 1"):
        model(**model_inputs(tree) | two)
    with pytest.raises(TypeError, match=r"tree.to\(device\)"):
        term_log_probs(model, treepack.pack(shared_samples(), max_tokens=256)[0])


def test_models_that_make_all_logits():
    model = tiny("llama")

    class Whole(type(model)):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids, **kwargs)

    model.__class__ = Whole
    with pytest.raises(ValueError, match=r"Whole\.forward has no logits_to_keep"):
        term_log_probs(model, one_tree())


def test_heads_that_are_not_known():
    """Logits are checked once against the model's own; a head that is more than a linear layer is refused."""
    model = tiny("granite")
    model.config.logits_scaling = 1.0

    class Scaled(type(model)):
        def forward(self, logits_to_keep=0, **kwargs):
            out = super().forward(logits_to_keep=logits_to_keep, **kwargs)
            out.logits = out.logits * 2
            return out

    model.__class__ = Scaled
    with pytest.raises(ValueError, match=r"changes its logits after the LM head.*head_log_probs"):
        term_log_probs(model, one_tree())
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"the LM head is torch\.nn\.modules\.container\.Sequential;"):
        term_log_probs(model, one_tree())
    with pytest.raises(ValueError, match=r"Linear is no Hugging Face model.*treepack\.tree_attention"):
        term_log_probs(nn.Linear(2, 2), one_tree())
    assert "treepack" in AttentionInterface().valid_keys()
