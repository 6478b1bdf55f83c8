"""Ranges on a GPU: what waits lies in host memory, and nothing of the result depends on it."""

import numpy as np
import pytest
import torch

import treepack

pytest.importorskip("transformers")
from transformers import Qwen2Config, Qwen2ForCausalLM

from treepack.integrations.transformers import RangeRunner

ROWS, WIDTH, LAYERS = 2048, 512, 6


def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        made = Qwen2ForCausalLM._from_config(config, attn_implementation="treepack", dtype=torch.bfloat16)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made.train()


def tree():
    """A stem and three branches, each a stem with three branches: the first range of a branch waits for the others."""
    draw = np.random.default_rng(0)
    stem = draw.integers(0, 1000, 700)
    samples = []
    for _ in range(3):
        inner = np.concatenate([stem, draw.integers(0, 1000, 500)])
        samples += [np.concatenate([inner, draw.integers(0, 1000, 1300)]) for _ in range(3)]
    (packed,) = treepack.pack([{"input_ids": x} for x in samples], max_tokens=ROWS, cut=True)
    return packed


def run(made, cut, **options):
    made.zero_grad(set_to_none=True)
    waiting = []
    for part in RangeRunner(made, cut, **options):
        part.backward(part.term_log_probs().sum() / cut.num_terms)
        waiting += [part.num_tokens] * part.waits
    return [x.grad.clone() for layer in made.model.layers for x in layer.parameters()], waiting


def test_the_result_is_the_same_bits():
    made, cut = model(), tree().to("cuda")
    run(made, cut)  # compiles
    here, waiting = run(made, cut, offload=False)
    assert waiting  # else nothing is tested
    for _ in range(3):
        there, _ = run(made, cut)
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_what_waits_takes_no_memory_of_the_device():
    made, cut = model(), tree().to("cuda")
    run(made, cut)
    held = []
    for offload in (False, True):
        made.zero_grad(set_to_none=True)
        for part in RangeRunner(made, cut, offload=offload):
            before = torch.cuda.memory_allocated()
            part.backward(part.term_log_probs().sum() / cut.num_terms)
            if part.index == 0:  # it waits: no gradient is there yet
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated() - before)
                rows = part.num_tokens
    inputs = LAYERS * rows * WIDTH * 2
    assert inputs <= held[0]
    assert held[1] <= held[0] - inputs * 0.8
