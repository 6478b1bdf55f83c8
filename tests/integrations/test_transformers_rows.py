"""Models that are right on some trees only: rotary embeddings that follow the longest sample of a row, and images."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import COMMON, KeepDouble, alone_log_probs, largest_difference, packed_log_probs, shared_samples, tiny
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import treepack
from treepack import term_log_probs
from treepack.integrations.transformers import check_model, model_inputs
from treepack.integrations.transformers.checks.layers import check_attention_config
from treepack.integrations.transformers.checks.tree import check_tree, row_is_short

SCALED = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0]},
    "dynamic": {},
    "yarn": {},
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
IMAGE = 63


def scaled(kind, limit=12):
    """A tiny model whose rotary embeddings were made for `limit` tokens and are scaled beyond."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": limit}
    more = {
        "longrope": {"original_max_position_embeddings": limit},
        "dynamic": {"max_position_embeddings": limit},
    }
    family = "phi3" if kind == "longrope" else "llama"
    return tiny(family, rope_parameters=rope | SCALED[kind], **more.get(kind, {}))


def one_tree(samples=None, **options):
    return treepack.pack(samples or shared_samples(), max_tokens=256, **options)[0].to("cpu")


def of_length(*lengths):
    """Samples that share their first three tokens."""
    return [
        {"input_ids": np.r_[1, 2, 3, np.arange(n - 3) + 4 + i], "completion_mask": np.r_[0, np.ones(n - 1, int)]}
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("branching", ["token", "label"])
def test_longrope_on_both_sides(branching):
    """Its frequencies change for the whole row where one sample is longer than the first context."""
    model = scaled("longrope")
    tree = one_tree(of_length(16, 12, 13), branching=branching)
    message = (
        r"Phi3ForCausalLM has longrope rotary embeddings.*original_max_position_embeddings = 12 tokens.*"
        r"sample 1 has 12 tokens and sample 0 16"
    )
    with pytest.raises(ValueError, match=message):
        check_tree(model, tree)
    for lengths in ((12, 9, 12), (13, 20)):
        check_tree(model, one_tree(of_length(*lengths), branching=branching))


def test_frequencies_that_grow():
    """Dynamic scaling is no other than none, and so the same for all, below the length it was made for."""
    model = scaled("dynamic", limit=18)
    longest = max(len(s["input_ids"]) for s in shared_samples())
    with pytest.raises(ValueError, match=rf"has dynamic rotary.*sample 5 has {longest}.*below 18 tokens"):
        check_tree(model, one_tree())
    check_tree(scaled("dynamic", limit=19), one_tree())
    model.config.rope_parameters = {"full_attention": model.config.rope_parameters, "sliding_attention": None}
    with pytest.raises(ValueError, match="has dynamic rotary"):  # by type of layer
        check_tree(model, one_tree())
    model.config.rope_parameters = {"type": "dynamic", "factor": 2.0}  # the older spelling
    with pytest.raises(ValueError, match="has dynamic rotary"):
        check_tree(model, one_tree())


def test_padding_and_dummies_have_no_samples():
    one = shared_samples()[:1]
    for tree in treepack.pack(one, max_tokens=64, ranks=2, pad_to_multiple_of=16):
        check_tree(scaled("longrope", limit=5), tree.to("cpu"))
        check_tree(scaled("dynamic", limit=16), tree.to("cpu"))
    assert tree.num_samples == 0


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotary_embeddings(kind):
    """What is accepted is right: packed against alone, also beyond the first context."""
    model = scaled(kind, limit={"longrope": 6, "dynamic": 19}.get(kind, 12))
    with KeepDouble(), torch.no_grad():
        packed = packed_log_probs(model, shared_samples())
        alone = alone_log_probs(model, shared_samples())
    assert largest_difference(packed, alone) < 1e-12


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_plain_call_has_seen_no_tree(kind):
    """An attention layer does not see the samples: it asks for inputs of which the tree was checked."""
    model = scaled(kind, limit={"longrope": 6, "dynamic": 19}[kind])
    with pytest.raises(ValueError, match=rf"{kind} rotary embeddings.*model_inputs\(tree, model=model\)"):
        model(**model_inputs(one_tree()))
    layer = model.model.layers[0].self_attn
    check_attention_config(
        layer, layer.config.sliding_window if kind == "longrope" else None, False, SimpleNamespace(row_checked=True)
    )
    assert model(**model_inputs(one_tree(), model=model)).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"has {kind} rotary"):
        term_log_probs(scaled(kind), one_tree())


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2, "out_hidden_size": 32, "vision_use_head": False,
}  # fmt: skip
SEEING = {
    "gemma3": (
        {"query_pre_attn_scalar": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 61, "eoi_token_index": 62},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        {},
        {"image_token_id": IMAGE, "video_token_id": 62, "vision_start_token_id": 60, "vision_end_token_id": 61},
    ),
}


def seeing(kind):
    """A tiny model that takes images; its language model runs packed trees."""
    text, vision, more = SEEING[kind]
    torch.manual_seed(0)
    made = CONFIG_MAPPING[kind](text_config=COMMON | text, vision_config=VISION | vision, **more)
    attention = {"text_config": "treepack", "vision_config": "sdpa"}
    return AutoModelForImageTextToText.from_config(made, attn_implementation=attention).double().eval()


@pytest.mark.parametrize("kind", SEEING)
def test_places_for_images(kind):
    """A sample with one is refused by its name; text alone is run, by the same model."""
    model = seeing(kind)
    text = [{"input_ids": [1, 5, 6, *t], "completion_mask": [0, 0, 0, *[1] * len(t)]} for t in ([7, 8], [9, 10, 11])]
    assert term_log_probs(model, one_tree(text)).isfinite().all()
    setting = next(name for name, token in SEEING[kind][2].items() if token == IMAGE)
    image = {"input_ids": [1, 5, IMAGE, IMAGE, 7], "completion_mask": [0, 0, 0, 0, 1]}
    tree = one_tree([*text, image])
    at = tree.input_ids.tolist().index(IMAGE)
    message = rf"sample 2: token id {IMAGE} \(packed position {at}\) is {setting} of {type(model).__name__}.*unpacked"
    with pytest.raises(ValueError, match=message):
        check_tree(check_model(model), tree)
    with pytest.raises(ValueError, match=re.escape(f"is {setting} of")):
        term_log_probs(model, tree)
    with pytest.raises(ValueError, match=re.escape(f"is {setting} of")):
        model_inputs(tree, model=model)


def test_padding_is_no_image():
    """Padding has token id 0, which is a place for an image in some configs that were never set."""
    model = seeing("gemma3")
    model.config.image_token_index = 0
    text = [{"input_ids": [1, 5, 6, 7], "completion_mask": [0, 0, 0, 1]}]
    check_tree(model, one_tree(text, pad_to_multiple_of=16))
    check_tree(tiny("llama"), one_tree([{"input_ids": [1, IMAGE, 2], "completion_mask": [0, 0, 1]}]))


def test_a_placeholder_of_a_model_of_text():
    """A config may carry the id of an image without an encoder that makes one: there it is a token like others."""
    model = tiny("qwen2")
    model.config.image_token_id = int(shared_samples()[0]["input_ids"][0])
    check_tree(model, one_tree())


def test_no_packed_tree():
    tree = one_tree()
    likeness = type("Likeness", (), {"subtree_end": tree.subtree_end, "position_ids": tree.position_ids})()
    with pytest.raises(TypeError, match="a PackedTree is needed, not a Likeness"):
        check_tree(scaled("longrope"), likeness)


def test_rows_of_which_the_longest_is_known():
    """What an integration that packs by itself asks."""
    for kind, fits in (("longrope", 12), ("dynamic", 11), ("yarn", 1000)):
        config = scaled(kind).config
        assert row_is_short(config, fits)
        assert row_is_short(config, fits + 1) == (kind == "yarn")
