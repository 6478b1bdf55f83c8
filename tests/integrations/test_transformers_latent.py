"""Models whose values have another head size than their queries and keys (multi-head latent attention, MiMo): packed
and alone give the same log-probs and gradients, under both kinds of checkpointing, with adapters, range by range."""

import peft
import pytest
import torch
from tiny_latent import DEEPSEEK, INDEXED, RUN, there
from tiny_models import (
    KeepDouble,
    alone_log_probs,
    gradients,
    largest_difference,
    packed_log_probs,
    shared_samples,
    tiny,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import treepack
from treepack import term_log_probs
from treepack.attention.triton import common
from treepack.integrations.transformers import attention, model_inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*falling back to its reference:UserWarning"),
    pytest.mark.skipif(not there("deepseek_v3"), reason="a transformers without DeepSeek-V3"),
]
A_KIND_EACH = [kind for kind in ("deepseek_v3", "mimo_v2_flash") if there(kind)]
PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def one_tree():
    return treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")


@pytest.mark.parametrize("kind", RUN)
def test_packed_is_alone(kind):
    """Several trees, and one with padding."""
    model, samples = tiny(kind), shared_samples()
    with KeepDouble():
        alone = alone_log_probs(model, samples)
        expected = gradients(model, alone)
        for pack in ({"max_tokens": 40}, {"max_tokens": 256, "pad_to_multiple_of": 64}):
            packed = packed_log_probs(model, samples, pack)
            assert largest_difference(alone, packed) < 1e-12
            assert largest_difference(expected, gradients(model, packed)) < 1e-12
    assert min(values.abs().max() for values in expected.values()) > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", A_KIND_EACH)
def test_gradient_checkpointing(kind, reentrant):
    """The tree reaches the recomputation; by then another tree may have run."""
    model, samples = tiny(kind).train(), shared_samples()
    plain = packed_log_probs(model, samples, {"max_tokens": 40})
    expected = gradients(model, plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    values = packed_log_probs(model, samples, {"max_tokens": 40})
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    assert largest_difference(gradients(model, values), expected) < 1e-12


def test_lora():
    """Adapters on what projects into the latents and out of them."""
    model, samples = tiny("deepseek_v3"), shared_samples()
    adapter = peft.LoraConfig(r=2, target_modules=PROJECTIONS, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, adapter).double()
    with KeepDouble():
        alone = alone_log_probs(model, samples)
        expected = gradients(wrapped, alone)
        packed = packed_log_probs(wrapped, samples)
        assert largest_difference(alone, packed) < 1e-12
        assert largest_difference(expected, gradients(wrapped, packed)) < 1e-12
    assert len(expected) == 2 * 2 * len(PROJECTIONS)


def test_a_vision_model_around_it():
    """Kimi K2.5: DeepSeek-V3's decoder in a class that also takes images."""
    if "kimi_k25" not in CONFIG_MAPPING:
        pytest.skip("a transformers without Kimi K2.5")
    from tiny_models import config
    from transformers import AutoModelForImageTextToText

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = CONFIG_MAPPING["kimi_k25"](
        text_config=config("deepseek_v3").to_dict(), vision_config=vision, image_token_id=60
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        settings, attn_implementation="treepack", experts_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    model, samples = model.double().eval(), shared_samples(vocab_size=60)
    with KeepDouble():
        alone, packed = alone_log_probs(model, samples), packed_log_probs(model, samples)
        assert largest_difference(alone, packed) < 1e-12
        assert largest_difference(gradients(model, alone), gradients(model, packed)) < 1e-12


def test_what_attention_is_given(monkeypatch):
    """Values are not padded to the size of the keys, and tiles of all three are read where they lie: with heads below
    each other, and for the values beside the keys that come from the same projection."""
    seen = []

    def spy(q, k, v, *rest, **options):
        seen.append((q, k, v))
        return original(q, k, v, *rest, **options)

    original = attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", spy)
    model = tiny("deepseek_v3", dtype=torch.float32, qk_nope_head_dim=12, v_head_dim=32)
    out = model(**model_inputs(one_tree()))
    assert torch.isfinite(out.logits).all()
    q, k, v = (x[0].transpose(0, 1) for x in seen[-1])
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (16, 16, 32)
    layouts = [common.matrix_view(x, apart=True)[2] for x in (q, k, v)]
    assert layouts == [common.ROWS, common.ROWS, common.APART]


def test_under_autocast():
    """Rotary embeddings leave float32, the values come in bfloat16."""
    model, tree = tiny("deepseek_v3", dtype=torch.float32), one_tree()
    exact = term_log_probs(model, tree)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = term_log_probs(model, tree)
    rounded.sum().backward()
    assert 0 < (rounded - exact).abs().mean() < 0.2
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("kind", [kind for kind in INDEXED if there(kind)])
def test_indexed_keys_stay_refused(kind):
    model = tiny(kind, **DEEPSEEK)
    for call in (lambda: term_log_probs(model, one_tree()), lambda: model_inputs(one_tree(), model=model)):
        with pytest.raises(ValueError, match=r"layer 0 is of type 'indexed_attention'; an indexer chooses the keys"):
            call()
