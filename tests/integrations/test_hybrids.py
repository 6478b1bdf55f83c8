"""Models with layers that carry a state: packed and alone give the same log-probs and gradients, alone by the code of
transformers, for every family, under both kinds of checkpointing, with adapters."""

import sys

import peft
import pytest
import torch
from tiny_hybrids import OLD_LFM2, RUN
from tiny_models import (
    KeepDouble,
    alone_log_probs,
    config,
    gradients,
    largest_difference,
    packed_log_probs,
    shared_samples,
    tiny,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import treepack
from treepack import term_log_probs
from treepack.distributed import dummy_tree, formats_of
from treepack.integrations.transformers import model_inputs
from treepack.integrations.transformers.mixers import MEETINGS
from treepack.testing import check_parity

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference:UserWarning")
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
A_KIND_EACH = [kind for kind in ("qwen3_5_text", "kimi_linear", "lfm2", "nemotron_h") if kind in RUN]


def one_tree(**options):
    return treepack.pack(shared_samples(), max_tokens=256, **options)[0].to("cpu")


@pytest.mark.parametrize("kind", RUN)
def test_packed_is_alone(kind):
    """Several trees, and one with padding."""
    model, samples = tiny(kind), shared_samples()
    with KeepDouble():
        alone = alone_log_probs(model, samples)
        expected = gradients(model, alone)
        for pack in ({"max_tokens": 40}, {"max_tokens": 256, "pad_to_multiple_of": 64}):
            packed = packed_log_probs(model, samples, pack)
            assert largest_difference(alone, packed) < 1e-10
            assert largest_difference(expected, gradients(model, packed)) < 1e-10
    assert min(values.abs().max() for values in expected.values()) > 0


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_text_of_a_multimodal_model(family):
    """The class that also takes images, on text: its positions have three axes, equal on text."""
    from transformers import AutoModelForImageTextToText

    kind = CONFIG_MAPPING[family]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = config(f"{family}_text").to_dict() | {"head_dim": 16, "rope_parameters": SECTIONS}
    places = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        kind(text_config=text, vision_config=vision, **places),
        attn_implementation="treepack",
        experts_implementation="eager",
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    model, samples = model.double().eval(), shared_samples(vocab_size=60)
    with KeepDouble():
        alone = alone_log_probs(model, samples)
        packed = packed_log_probs(model, samples)
        expected = gradients(model, alone)
        assert largest_difference(alone, packed) < 1e-10
        assert largest_difference(expected, gradients(model, packed)) < 1e-10
    tree = treepack.pack(samples, max_tokens=256)[0].to("cpu")
    inputs = model_inputs(tree, model=model)
    axes = inputs["position_ids"].expand(3, 1, -1)
    assert torch.equal(model(**inputs).logits, model(**inputs | {"position_ids": axes}).logits)
    samples[3]["input_ids"][-1] = 60
    with pytest.raises(ValueError, match=r"sample 3: token id 60 .* is image_token_id"):
        term_log_probs(model, treepack.pack(samples, max_tokens=256)[0].to("cpu"))


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


@pytest.mark.parametrize("kind", A_KIND_EACH)
def test_lora(kind):
    """Adapters on what projects into and out of the state."""
    model, samples = tiny(kind), shared_samples()
    names = {
        "nemotron_h": ["in_proj"],
        "qwen3_5_text": ["in_proj_qkv", "in_proj_a", "out_proj"],
        "kimi_linear": ["b_proj", "g_a_proj", "o_proj"],
    }
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=names.get(kind, ["in_proj", "out_proj"]), init_lora_weights=False)
    ).double()
    with KeepDouble():
        alone = alone_log_probs(model, samples)
        expected = gradients(wrapped, alone)
        packed = packed_log_probs(wrapped, samples)
        assert largest_difference(alone, packed) < 1e-10
        assert largest_difference(expected, gradients(wrapped, packed)) < 1e-10
    assert expected
    assert all("lora" in name for name in expected)


@pytest.mark.parametrize("kind", A_KIND_EACH)
def test_a_dummy_tree_takes_part(kind):
    """No sample: an empty result, connected to every parameter, with gradients of 0."""
    model = tiny(kind)
    dummy = dummy_tree(formats_of(treepack.pack(shared_samples(), max_tokens=256)[0])).to("cpu")
    values = term_log_probs(model, dummy)
    assert values.shape == (0,)
    values.sum().backward()
    used = [p for p in model.parameters() if p.grad is not None]
    assert len(used) >= 0.5 * len(list(model.parameters()))
    assert all(not p.grad.any() for p in used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", A_KIND_EACH)
def test_check_parity(kind, dtype):
    """Against treepack on each sample, and against transformers alone."""
    for alone in (None, "sdpa"):
        check_parity(tiny(kind, dtype), shared_samples(), max_tokens=40, alone=alone)


def test_autocast():
    """As `Trainer` runs a float32 model with bf16=True."""
    samples = shared_samples()
    exact = torch.cat(packed_log_probs(tiny("qwen3_5_text"), samples))
    model = tiny("qwen3_5_text", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        packed = torch.cat(packed_log_probs(model, samples))
        alone = torch.cat(alone_log_probs(tiny("qwen3_5_text", torch.float32), samples, "eager"))
    packed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    off, allowed = ((x.double() - exact).pow(2).mean().sqrt() for x in (packed, alone))
    assert 1e-4 < off < 1.5 * allowed


def test_without_a_tree_nothing_changes():
    """What is put in place stays; calls without a tree run what was there before, bit by bit."""
    model = tiny("qwen3_5_text", torch.float32, attention="sdpa")
    ids = torch.arange(12)[None]
    module = sys.modules[type(model).__module__]
    installed = {name: getattr(module, name) for name in MEETINGS if hasattr(module, name)}
    with torch.no_grad():
        after = model(input_ids=ids).logits
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
        try:
            for name, meeting in installed.items():
                setattr(module, name, getattr(meeting, "__wrapped__", meeting))
            assert torch.equal(model(input_ids=ids).logits, after)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
        finally:
            for name, meeting in installed.items():
                setattr(module, name, meeting)
    assert all(hasattr(meeting, "treepack_meeting") for meeting in installed.values())


@pytest.mark.parametrize("kind", A_KIND_EACH)
def test_what_a_tree_has_no_place_for(kind):
    model, tree = tiny(kind), one_tree()
    inputs = model_inputs(tree)
    sequences = torch.tensor([0, tree.num_tokens], dtype=torch.int32)
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(ValueError, match=f"got {name} beside a packed tree, sequences of a row by .* do not pass"):
            model(**inputs, **{name: sequences})
    if kind != "lfm2":  # its layers do not see that a new cache is filled, which changes nothing
        with pytest.raises(ValueError, match=r"pass use_cache=False"):
            model(**inputs | {"use_cache": True})
    other = model_inputs(treepack.pack(shared_samples()[:3], max_tokens=256)[0].to("cpu"))
    with pytest.raises(ValueError, match=rf"got {tree.num_tokens} tokens, the packed tree has \d+: it was made for"):
        model(**inputs | {"tree_tiles": other["tree_tiles"]})
    with pytest.raises(TypeError, match=r"tree.to\(device\)"):
        term_log_probs(model, treepack.pack(shared_samples(), max_tokens=256)[0])


def test_subtree_end_alone():
    """As a collator hands it on, without what layers share."""
    model, tree = tiny("qwen3_5_text"), one_tree(pad_to_multiple_of=64)
    inputs = model_inputs(tree, model=model)
    whole = model(**inputs).logits
    alone = model(**{name: x for name, x in inputs.items() if name != "tree_tiles"}).logits
    assert torch.equal(whole, alone)


def test_a_layer_that_keeps_the_tree_to_itself():
    """A subclass that hands no keyword arguments on, and one whose own forward is another."""
    model = tiny("qwen3_5_text")
    layer = model.model.layers[0].linear_attn

    class Own(type(layer)):
        def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
            return super().forward(hidden_states, cache=cache, attention_mask=attention_mask)

    layer.__class__ = Own
    with pytest.raises(ValueError, match=r"linear_attn\.conv1d is Conv1d, .* tokens meet in its own code"):
        term_log_probs(model, one_tree())


@pytest.mark.skipif(not OLD_LFM2, reason="this transformers hands the tree on")
def test_a_transformers_that_keeps_the_tree_from_the_layer():
    with pytest.raises(ValueError, match=r"Lfm2ShortConv, which carries a state: it does not hand on .* in 5\.24\)"):
        term_log_probs(tiny("lfm2"), one_tree())
