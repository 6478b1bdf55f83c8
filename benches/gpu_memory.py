"""Peak memory of one training step by the tokens of a tree, for three sizes of models.

    python benches/gpu_memory.py [--tokens 4096 8192] [--models 0.5B]

Random weights of Qwen2.5's shapes, bfloat16, every layer checkpointed; forward, log-probs of the terms, backward.
A peak holds weights, gradients and activations, no optimizer. A tree of N tokens: a prompt of N / 2, 8 answers of
N / 16.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from gpu_model import environment, gate
from transformers import Qwen2Config, Qwen2ForCausalLM

import treepack
from treepack import synthetic

# hidden, intermediate, layers, heads, K/V heads, tied
MODELS = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}
GIB = 2**30


def make_model(size: str) -> Qwen2ForCausalLM:
    hidden, intermediate, layers, heads, kv_heads, tied = MODELS[size]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        vocab_size=151_936,
        max_position_embeddings=262_144,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="treepack", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def peak(model: Qwen2ForCausalLM, tokens: int) -> float:
    """GiB at the most in a step on one tree of so many tokens; inf where the memory ends."""
    samples = synthetic.agent(prompt=tokens // 2, answers=8, answer=tokens // 16)
    (tree,) = treepack.pack(samples, max_tokens=tokens)
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        treepack.term_log_probs(model, tree.to("cuda"), impl="triton").mean().backward()
    except torch.cuda.OutOfMemoryError:
        return float("inf")
    return torch.cuda.max_memory_allocated() / GIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096 * 2**i for i in range(6)])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # The gate has looked; of random weights in bfloat16 rounding alone comes up to what the check of layers allows.
    os.environ.setdefault("TREEPACK_MODEL_CHECK", "0")
    print(environment("cuda"))
    if not gate(["triton"], "cuda", False):
        return 1
    print("model  weights GiB" + "".join(f"{tokens:>9,}" for tokens in arguments.tokens))
    for size in arguments.models:
        model = make_model(size)
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / GIB
        peaks = "".join(f"{peak(model, tokens):9.1f}" for tokens in arguments.tokens)
        print(f"{size:5s} {weights:12.2f}{peaks}")
        del model
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
