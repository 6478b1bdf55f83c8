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
    """A layer that computes attention itself leaves no trace in the config: the layers that ran are counted."""
    model = tiny("qwen2")
    inner = model.model.layers[0].self_attn

    class OwnAttention(nn.Module):
        layer_idx = 0

        def forward(self, hidden_states, **kwargs):
            return hidden_states.cumsum(1), None

    model.model.layers[0].self_attn = OwnAttention()
    with pytest.raises(ValueError, match="1 of 2 attention layers ran tree attention"):
        term_log_probs(model, one_tree())
    model.model.layers[0].self_attn = inner
    assert term_log_probs(model, one_tree()).shape == one_tree().term_row.shape


HYBRIDS = {
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 2,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "linear_attention",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "linear_attention|conv"),
    "llama4_text": (
        {"layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2, "intermediate_size_mlp": 16},
        "chunked_attention",
    ),
    "falcon_h1": ({"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8}, "hybrid|Mamba|mamba"),
    "mamba": ({"state_size": 4}, "Mamba|own code|linear_attention"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "own code"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_and_hybrid_models(kind):
    """CASES 17: layers that run straight across the samples, by the name of the layer type."""
    more, message = HYBRIDS[kind]
    sizes = {name: value for name, value in COMMON.items() if kind not in ("bloom", "mamba") or "num" not in name}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(sizes | more)), attn_implementation="treepack")
    with pytest.raises(ValueError, match=message):
        term_log_probs(model.eval(), one_tree())


def test_hybrid_models_through_a_plain_call():
    """Without term_log_probs in between, the first attention layer that runs refuses."""
    model = tiny("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layer 1 is of type 'linear_attention'"):
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
        (torch.ones(3), r"one number for the whole tree, not tensor"),
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
