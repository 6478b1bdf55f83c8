"""GRPO on a small random Qwen2, packed or not: the two loss curves are the same.

    python examples/grpo.py            # rollouts folded into prefix trees
    python examples/grpo.py --alone    # the same samples one by one through transformers' own attention

Rollouts are synthetic: groups of answers to one prompt, whose advantages are random. Each iteration scores its rollouts
with the policy as it stands (the old log-probs) and then takes a few clipped policy-gradient steps on them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import treepack
import treepack.integrations.transformers
from treepack.synthetic import agent

VOCABULARY, CLIP, ITERATIONS, STEPS = 256, 0.2, 5, 4


def small_model(packed: bool) -> Qwen2ForCausalLM:
    """Two layers, 4 query and 2 key heads, float64: the same weights for both ways."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1)  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="treepack" if packed else "sdpa").double()


def rollouts(iteration: int) -> list[dict[str, Any]]:
    """Two prompts with four answers each."""
    groups = [
        agent(2 * iteration + g, answers=4, prompt=40, answer=12, vocab_size=VOCABULARY, kept_sets=False)
        for g in range(2)
    ]
    return [sample | {"group_id": g} for g, group in enumerate(groups) for sample in group]


def grpo_loss(log_probs: Tensor, old_log_probs: Tensor, advantage: Tensor) -> Tensor:
    """Sum over tokens of the clipped surrogate (Schulman et al. 2017, eq. 7; Shao et al. 2024, eq. 3, without KL)."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage).sum()


def alone_log_probs(model: Qwen2ForCausalLM, sample: dict[str, Any]) -> Tensor:
    """Log-probs of the trained tokens of one sample, without treepack."""
    input_ids = torch.as_tensor(sample["input_ids"])
    target = 1 + torch.as_tensor(sample["completion_mask"])[1:].nonzero()[:, 0]
    logits = model(input_ids=input_ids[None], use_cache=False).logits[0, target - 1]
    return logits.log_softmax(-1)[torch.arange(len(target)), input_ids[target]]


@torch.no_grad()
def score(model: Qwen2ForCausalLM, samples: list[dict[str, Any]], packed: bool) -> None:
    """Write `old_log_probs` into the samples. Each group is packed on its own here and all together in training: what
    one packing computes, another can use."""
    for group in (samples[:4], samples[4:]):
        values = [alone_log_probs(model, sample) for sample in group] if not packed else []
        if packed:
            trees = treepack.pack(group, max_tokens=64)  # some: values come back by sample, whatever their tree
            values = trees.unpack_terms([treepack.term_log_probs(model, tree.to(model.device)) for tree in trees])
        for sample, log_probs in zip(group, values, strict=True):
            sample["old_log_probs"] = np.zeros(len(sample["input_ids"]))
            sample["old_log_probs"][sample["completion_mask"] > 0] = log_probs.cpu().numpy()


def train_step(model: Qwen2ForCausalLM, samples: list[dict[str, Any]], packed: bool) -> float:
    """Gradients of the mean over all trained tokens; returns the loss."""
    loss = 0.0
    if packed:
        forest = treepack.pack(samples, max_tokens=160)
        for tree in forest:
            tree = tree.to(model.device)
            log_probs = treepack.term_log_probs(model, tree)
            part = grpo_loss(log_probs, tree.terms["old_log_probs"], tree.terms["advantage"]) / forest.stats.terms
            part.backward()
            loss += part.item()
        return loss
    terms = sum(int(sample["completion_mask"].sum()) for sample in samples)
    for sample in samples:
        old = torch.as_tensor(sample["old_log_probs"][sample["completion_mask"] > 0])
        advantage = torch.tensor(sample["advantage"], dtype=torch.float32)
        part = grpo_loss(alone_log_probs(model, sample), old, advantage) / terms
        part.backward()
        loss += part.item()
    return loss


def train(packed: bool) -> list[float]:
    """The loss of each of the `ITERATIONS * STEPS` steps."""
    model = small_model(packed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for iteration in range(ITERATIONS):
        samples = rollouts(iteration)
        score(model, samples, packed)
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(train_step(model, samples, packed))
            optimizer.step()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--packed", action="store_true", help="prefix trees (the default)")
    way.add_argument("--alone", action="store_true", help="each sample alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are tiny: threads cost more than they give
    start = time.perf_counter()
    for step, loss in enumerate(train(packed=not arguments.alone)):
        print(f"step {step:2d}  loss {loss:+.9f}")
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
