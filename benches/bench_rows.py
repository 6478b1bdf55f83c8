"""Host time of `treepack.row_log_probs` beside `pack()` of the same rows: `make bench-rows`.

Padded rows as trainers have them: prompts padded on the left, answers on the right, values of the answers wanted. What
is timed is all that the function does on the host apart from the model: reading the rows, packing them, finding the
places of the values. Against it `pack()` of the same arrays, and one copy of them. First every value must come back to
the token that it is of: with the id of each token in place of its log-prob, the answers come back as they are.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import console, environment, in_turn, spread
from rich.table import Table

import treepack
from treepack.integrations.transformers.row_batch import read_rows

#: name, prompts, answers to each, tokens of the longest prompt and the longest answer
SHAPES = (
    ("64 rows of 3,600", 8, 8, 3_000, 600),
    ("512 rows of 1,500", 64, 8, 1_000, 500),
    ("32 rows of 17,000", 4, 8, 16_000, 1_000),
)


def rows(prompts: int, answers: int, prompt: int, answer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask): lengths between half of the longest and the longest."""
    rng = np.random.default_rng(0)
    ids = np.zeros((prompts * answers, prompt + answer), np.int64)
    mask = np.zeros_like(ids)
    for at in range(prompts):
        length = int(rng.integers(prompt // 2, prompt + 1))
        shared = rng.integers(1, 150_000, length)
        for row in range(at * answers, (at + 1) * answers):
            end = prompt + int(rng.integers(answer // 2, answer + 1))
            ids[row, prompt - length : prompt], ids[row, prompt:end] = shared, rng.integers(1, 150_000, end - prompt)
            mask[row, prompt - length : end] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def host(ids: torch.Tensor, mask: torch.Tensor, last: int) -> Any:
    batch = read_rows(ids, mask, None, None, last)
    return [(tree, batch.places_of(tree)) for tree in batch.pack(None)]


def right(ids: torch.Tensor, mask: torch.Tensor, last: int) -> bool:
    out = np.zeros((len(ids), last), np.int64)
    for tree, places in host(ids, mask, last):
        out.reshape(-1)[places] = tree.term_target
    return np.array_equal(out, (ids * mask)[:, -last:].numpy())


def measure(ids: torch.Tensor, mask: torch.Tensor, last: int) -> list[str]:
    """A line of the table."""
    wanted = np.zeros(ids.shape, np.uint8)
    wanted[:, -last:] = 1
    batch = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "completion_mask": wanted}
    functions: dict[str, Callable[[], Any]] = {
        "host": lambda: host(ids, mask, last),
        "pack": lambda: treepack.pack(batch, max_tokens=ids.numel()),
        "copy": lambda: [np.array(array) for array in batch.values()],
    }
    times = in_turn(functions, repeats=21)
    mine, pack, copy = (statistics.median(times[which]) for which in functions)
    (tree,) = treepack.pack(batch, max_tokens=ids.numel())
    counts = f"{int(mask.sum()):,}", f"{tree.num_tokens:,}"
    return [*counts, f"{mine:.2f}", spread(times["host"]), f"{pack:.2f}", f"{copy:.2f}", f"{mine / (pack + copy):.2f}"]


def main() -> int:
    console.print(environment())
    table = Table("rows", "tokens", "in the tree", "on the host ms", "spread", "pack() ms", "copy ms", "ratio to both")
    for name, prompts, answers, prompt, answer in SHAPES:
        ids, mask = rows(prompts, answers, prompt, answer)
        if not right(ids, mask, answer):
            console.print(f"{name}: a value came back to another token; no figures")
            return 1
        table.add_row(name, *measure(ids, mask, answer))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
