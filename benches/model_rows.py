"""The rows of `gpu_model.py`: lists of samples, made here or cut from real rollouts under TREEPACK_DATA.

A row is what one rank sees in one micro-batch. Shapes are nests of (length, trained, children); ids are random, the
segments that part at a fork start with different ones, so N is the sum of the lengths.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treepack
from treepack import synthetic

Node = tuple[int, bool, list[Any]]
Sample = dict[str, Any]

VOCABULARY = 151_646  # ids of the tokenizer; the model's table has 151,936 rows


def answers(groups: int, n: int, prompt: int, length: int) -> list[Node]:
    """`groups` prompts with `n` answers each, their lengths normal around `length` (a quarter of it as deviation)."""
    draw = random.Random(0)
    return [
        (prompt, False, [(max(1, int(draw.gauss(length, length / 4))), True, []) for _ in range(n)])
        for _ in range(groups)
    ]


def turns(
    n: int = 8, count: int = 6, prompt: int = 1500, think: int = 450, answer: int = 120, tool: int = 150
) -> list[Node]:
    """Rollouts whose thinking is dropped after two turns: every turn forks off the spine without thinking and
    trains its own thinking and answer."""

    def spine(turn: int) -> list[Node]:
        last = (think + answer, True, [])
        kept = (think + answer + tool, False, [last])
        return [kept, (answer + tool, False, spine(turn + 1))] if turn + 1 < count else [kept]

    return [(prompt, False, [child for _ in range(n) for child in spine(1)])]


def samples_of(forest: list[Node]) -> list[Sample]:
    """One sample for each leaf."""
    random_ids = np.random.default_rng(0)
    out: list[Sample] = []

    def walk(node: Node, first: int, ids: list[np.ndarray], masks: list[np.ndarray]) -> None:
        length, trained, children = node
        own = random_ids.integers(0, VOCABULARY, length)
        own[0] = first
        ids, masks = [*ids, own], [*masks, np.full(length, trained, np.uint8)]
        for place, child in enumerate(children):
            walk(child, place, ids, masks)
        if not children:
            out.append({"input_ids": np.concatenate(ids), "completion_mask": np.concatenate(masks)})

    for place, root in enumerate(forest):
        walk(root, place, [], [])
    return out


def real(name: str, count: int) -> list[Sample]:
    """The first samples of a data set."""
    folder = os.environ.get("TREEPACK_DATA")
    if not folder:
        raise FileNotFoundError("TREEPACK_DATA is not set: it names the folder that holds data/")
    with np.load(Path(folder) / "data" / f"{name}.npz") as file:
        cuts = file["offsets"][: count + 1]
        tokens, mask = file["tokens"][: cuts[-1]].astype(np.int64), file["completion_mask"][: cuts[-1]]
    return [{"input_ids": tokens[a:b], "completion_mask": mask[a:b]} for a, b in itertools.pairwise(cuts)]


def synthetic_agent() -> list[Sample]:
    kept = ("input_ids", "completion_mask")
    return [{name: sample[name] for name in kept} for sample in synthetic.agent(kept_sets=False)]


#: Name -> samples. The first five are those of the end-to-end table that the project set out from.
ROWS: dict[str, Callable[[], list[Sample]]] = {
    "agent9k": lambda: samples_of(answers(1, 8, 6000, 400)),
    "agent2x16k": lambda: samples_of(answers(2, 8, 4096, 512)),
    "multiturn": lambda: samples_of(turns()),
    "comb60": lambda: real("swe_gemini_comb", 60),
    "docs16k": lambda: samples_of([(1024, True, []) for _ in range(16)]),
    "agent": synthetic_agent,
    "tau_turns": lambda: real("tau_airline_turns", 40),
    "tau_traj": lambda: real("tau_airline_traj", 12),
    "qwen_math": lambda: real("qwen_math_n8", 64),
    "small": lambda: samples_of(answers(1, 4, 60, 20)),  # to see that a script runs
}
FIRST_FIVE = tuple(ROWS)[:5]


def one_tree(samples: list[Sample]) -> treepack.PackedTree:
    """All samples of a row in one tree."""
    packed = treepack.pack(samples, max_tokens=sum(len(sample["input_ids"]) for sample in samples))
    (tree,) = packed
    return tree


def flops(model: Any, tokens: int, pairs: int, rows: int) -> float:
    """Floating-point operations of a training step with every layer checkpointed, the head computed twice.

    Products of weights: 2 per weight and token forward, again in the recomputation, twice backward. Attention: 4 D per
    head and visible pair forward, again in the recomputation, 2.5 times that backward. Norms and the like are left out.
    """
    width, size = model.hidden_size, model.hidden_size // model.num_attention_heads
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    layer = width * size * (2 * heads + 2 * kv_heads) + 3 * width * model.intermediate_size
    linear = 2 * model.num_hidden_layers * layer * tokens + 2 * width * model.vocab_size * rows
    attention = 4 * size * heads * model.num_hidden_layers * pairs
    return 4.0 * linear + 4.5 * attention
