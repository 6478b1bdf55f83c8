"""Micro-batches of TRL -> the same rows, those of a prompt together.

A trie shares what lies in one micro-batch, and TRL deals the answers to a prompt out over all of a generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Batch", "grouped", "window_of"]

#: Columns of a micro-batch: tensors and lists with a value for each row, numbers (0-d tensors), None.
Batch = dict[str, Any]


def window_of(steps: int, accumulation: int) -> int:
    """How many micro-batches of a generation belong to one optimizer step.

    Raises:
        ValueError: optimizer steps that begin within a generation in one place now and in another later.
    """
    if steps % accumulation and accumulation % steps:
        raise ValueError(
            f"keep_groups=True with steps_per_generation={steps} and gradient_accumulation_steps={accumulation}: one "
            "must divide the other, or rows would move between optimizer steps; change one, or set keep_groups to False"
        )
    return min(steps, accumulation)


def grouped(batches: list[Batch]) -> list[Batch]:
    """The rows of micro-batches of one size, dealt out anew: prompts in the order in which they first appear, the rows
    of each in their order."""
    prompts = torch.cat([batch["prompt_ids"] for batch in batches])
    masks = torch.cat([batch["prompt_mask"] for batch in batches])
    _, code = torch.unique(prompts.masked_fill(masks == 0, -1), dim=0, return_inverse=True)
    first = torch.full((int(code.max()) + 1,), len(code), device=code.device)
    first.scatter_reduce_(0, code, torch.arange(len(code), device=code.device), "amin")
    order = first[code].argsort(stable=True)
    size = len(prompts) // len(batches)
    return [
        {name: _take(name, batches, order[start : start + size], len(prompts)) for name in batches[0]}
        for start in range(0, len(prompts), size)
    ]


def _take(name: str, batches: list[Batch], rows: Tensor, count: int) -> Any:
    """The rows of a column, counted over all micro-batches."""
    values = [batch[name] for batch in batches]
    if values[0] is None or (isinstance(values[0], Tensor) and values[0].ndim == 0):
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(values)[rows]
    together = [value for part in values for value in part]
    if len(together) != count:
        raise ValueError(f"column {name!r} has {len(together)} values for {count} rows; keep_groups cannot move them")
    return [together[row] for row in rows.tolist()]
