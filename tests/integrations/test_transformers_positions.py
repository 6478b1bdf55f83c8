"""CASE 71: a sample that is longer than the model's table of positions is refused before anything runs."""

import numpy as np
import pytest
import torch
from tiny_models import KeepDouble, alone_log_probs, largest_difference, packed_log_probs, tiny
from torch import nn

import treepack
from treepack.integrations.transformers import model_inputs
from treepack.integrations.transformers.checks.positions import position_table

LIMIT = 12
#: Learned tables, with and without rows in front; sines made once, in the decoder and in each layer; rotary, without.
SIZES = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LIMIT, "n_ctx": LIMIT, "n_inner": 48, "rotary_dim": 4}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout"), 0.0)
TABLES = {
    "gpt2": ("wpe", SIZES),
    "gpt_bigcode": ("wpe", SIZES),
    "opt": ("embed_positions", {"ffn_dim": 48, "word_embed_proj_dim": 32, "activation_dropout": 0.0}),
    "biogpt": ("embed_positions", {"hidden_dropout_prob": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}),
    "gptj": ("embed_positions", SIZES),
}


def model_of(family):
    return tiny(family, max_position_embeddings=LIMIT, **NO_DROPOUT, **TABLES.get(family, ("", {}))[1])


def samples(*lengths):
    """Samples that share their first three tokens."""
    return [{"input_ids": np.r_[1, 2, 3, np.arange(n - 3) + 4 + i]} for i, n in enumerate(lengths)]


def tree_of(*lengths):
    return treepack.pack(samples(*lengths), max_tokens=256)[0].to("cpu")


@pytest.mark.parametrize("family", list(TABLES))
def test_the_table_is_found(family):
    assert position_table(model_of(family)) == (TABLES[family][0], LIMIT)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_rotary_embeddings_have_no_table(family):
    model = model_of(family)
    assert position_table(model) is None
    treepack.term_log_probs(model, tree_of(LIMIT + 8, LIMIT + 1))


@pytest.mark.parametrize("family", list(TABLES))
def test_a_sample_that_is_too_long_is_refused(family, monkeypatch):
    model, tree = model_of(family), tree_of(LIMIT, 5, LIMIT + 1, LIMIT + 3)

    def ran(*_, **__):
        raise AssertionError("the model ran")

    monkeypatch.setattr(type(model), "forward", ran)
    name = type(model).__name__
    message = rf"sample 2 has {LIMIT + 1} tokens; {name} has {LIMIT} positions .*2 samples of the tree are too long"
    with pytest.raises(ValueError, match=message):
        model_inputs(tree, model=model)


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt"])
def test_samples_up_to_the_limit_run_as_alone(family):
    model = model_of(family)
    rows = [sample | {"completion_mask": np.ones(len(sample["input_ids"]), int)} for sample in samples(LIMIT, 5, LIMIT)]
    with KeepDouble():
        alone, packed = alone_log_probs(model, rows, "sdpa"), packed_log_probs(model, rows)
    assert largest_difference(alone, packed) < 1e-9
    with pytest.raises(ValueError, match=rf"sample 0 has {LIMIT + 1} tokens; "):
        treepack.term_log_probs(model, tree_of(LIMIT + 1, 5))


def test_a_table_that_grows_is_looked_at_again():
    model = model_of("gpt2")
    with pytest.raises(ValueError, match=r"sample 0 has 14 tokens; GPT2LMHeadModel has 12 positions \(wpe\)"):
        model_inputs(tree_of(14), model=model)
    model.transformer.wpe = nn.Embedding(14, 32, dtype=torch.float64)
    model_inputs(tree_of(14), model=model)


def test_the_depth_counts_and_not_the_place_in_the_row():
    """A tree of far more positions than the table has."""
    tree = tree_of(*[LIMIT] * 5)
    assert tree.num_tokens > 4 * LIMIT - 12
    model_inputs(tree, model=model_of("gpt2"))


def test_a_tree_without_samples_passes():
    _, dummy = treepack.pack(samples(4), max_tokens=16, ranks=2)
    assert dummy.num_samples == 0
    model_inputs(dummy.to("cpu"), model=model_of("gpt2"))
