"""A mini-batch of one rank -> trees, as many as on every other rank; and values of their terms -> jagged tensors.

    samples end to end (jagged)  ->  one pack() a rank, one collective  ->  a micro-batch of samples for each tree

verl adds up metrics over ranks micro-batch by micro-batch, so every rank has the same number and none is empty: a rank
with fewer trees cuts its largest ones in two, between the samples where they share least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PackError
from ...packing import pack
from ...tree.segments import sample_lengths
from ...tree.tree import HostTree

__all__ = ["Rows", "chunks", "entries", "one_tree", "rows_of", "token_positions", "trees_of_rank"]

Index = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """The samples of a mini-batch end to end, on the host."""

    ids: Index
    """(R,)"""
    offsets: Index
    """(n + 1,)"""
    trained: npt.NDArray[np.uint8]
    """(R,): 1 where a log-prob of the token may be asked for."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> Index:
        return np.diff(self.offsets)

    def take(self, samples: Sequence[int]) -> Rows:
        """Some of the samples, in the order named."""
        where = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in samples])
        offsets = np.concatenate([[0], np.cumsum(self.lengths()[np.asarray(samples)])])
        return Rows(self.ids[where], offsets, self.trained[where])


def rows_of(data: Any) -> Rows:
    """The samples of verl's TensorDict. Log-probs are made of the response, which is all that its losses read; without
    prompts and responses, of what a jagged `loss_mask` marks; without that, of every token."""
    ids = data["input_ids"]
    offsets = _numpy(ids.offsets())
    flat = _numpy(ids.values())
    lengths = np.diff(offsets)
    if "prompts" in data and "responses" in data:
        response = data["responses"]
        if response.is_nested:
            answers = _numpy(response.offsets().diff())
        else:
            answers = _numpy(data["attention_mask"][:, data["prompts"].shape[1] :].sum(1))
        ends = np.repeat(offsets[1:], lengths)
        trained = np.arange(len(flat)) >= ends - np.repeat(answers, lengths)
    elif (mask := data.get("loss_mask", None)) is not None and mask.is_nested and len(mask.values()) == len(flat):
        trained = _numpy(mask.values()) != 0
    else:
        trained = np.ones(len(flat), np.bool_)
    return Rows(flat, offsets, trained.astype(np.uint8))


def _numpy(tensor: Tensor) -> Index:
    return tensor.detach().cpu().numpy().astype(np.int64)


def trees_of_rank(
    rows: Rows, budget: int, group: Any, device: Any, *, pad_to_multiple_of: int | None = None
) -> tuple[list[HostTree], list[list[int]]]:
    """Trees within `budget` positions, as many on every rank of the group, and the samples of each.

    Raises:
        PackError: on every rank, so that none waits: samples of any rank that cannot be packed, one that is longer than
            the budget above all, or a rank that has fewer samples than another needs trees.
    """
    lengths = rows.lengths()
    longest = int(lengths.max(initial=0))
    packed: list[HostTree] = []
    error: PackError | None = None
    if longest > budget:
        text = f"it has {longest} tokens; max_token_len_per_gpu allows {budget}"
        error = PackError(text, sample=int(lengths.argmax()))
    elif len(rows):
        try:
            packed = _pack(rows, budget, pad_to_multiple_of)
        except PackError as caught:
            error = caught
    numbers = [len(packed), longest, -len(rows), int(error is not None)]
    most, longest_anywhere, fewest, failed = _over_ranks(numbers, group, device)
    if error is not None:
        raise error
    if longest_anywhere > budget:
        text = f"another rank has a sample of {longest_anywhere} tokens; max_token_len_per_gpu allows {budget}"
        raise PackError(text)
    if failed:
        raise PackError("another rank cannot pack its samples, and says why")
    if -fewest < most:
        raise PackError(
            f"a rank has {-fewest} samples and another needs {most} trees; verl wants a micro-batch with a sample on "
            "every rank: give the ranks equally many samples, or a larger max_token_len_per_gpu"
        )
    parts = [(tree, tree.sample_index.tolist()) for tree in packed]
    while len(parts) < most:
        parts = _cut_largest(parts, rows, budget, pad_to_multiple_of)
    return [tree for tree, _ in parts], [samples for _, samples in parts]


def chunks(rows: Rows, size: int, pad_to_multiple_of: int | None = None) -> list[HostTree]:
    """A tree for every `size` samples, in order: verl's micro-batches of a fixed number of samples.

    Raises:
        PackError: a number of samples that is no multiple of `size`.
    """
    if len(rows) % size:
        raise PackError(
            f"{len(rows)} samples in micro-batches of micro_batch_size_per_gpu={size}; allowed is a divisor"
        )
    return [one_tree(rows.take(range(at, at + size)), pad_to_multiple_of) for at in range(0, len(rows), size)]


def one_tree(rows: Rows, pad_to_multiple_of: int | None = None) -> HostTree:
    """All samples in one tree, however large."""
    multiple = pad_to_multiple_of or 1
    (tree,) = _pack(rows, -(-len(rows.ids) // multiple) * multiple, pad_to_multiple_of)
    return tree


def _pack(rows: Rows, budget: int, pad_to_multiple_of: int | None) -> list[HostTree]:
    batch = {"input_ids": rows.ids, "cu_seqlens": rows.offsets, "completion_mask": rows.trained}
    return list(pack(batch, max_tokens=budget, pad_to_multiple_of=pad_to_multiple_of))


def _over_ranks(numbers: list[int], group: Any, device: Any) -> list[int]:
    """The largest of each number over the ranks of a group."""
    if not dist.is_initialized():
        return numbers
    of_all = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
    found: list[int] = of_all.tolist()
    return found


def _cut_largest(
    parts: list[tuple[HostTree, list[int]]], rows: Rows, budget: int, pad_to_multiple_of: int | None
) -> list[tuple[HostTree, list[int]]]:
    """The tree with most positions of those with several samples as two trees of half of its samples each."""
    at = max((i for i, (_, samples) in enumerate(parts) if len(samples) > 1), key=lambda i: parts[i][0].num_tokens)
    tree, samples = parts[at]
    order = np.argsort(tree.sample_last_segment, kind="stable")  # depth first: neighbours share most
    halves = [sorted(samples[i] for i in half.tolist()) for half in np.array_split(order, 2)]
    cut = []
    for half in halves:
        (made,) = _pack(rows.take(half), budget, pad_to_multiple_of)
        cut.append((made, half))
    return [*parts[:at], *cut, *parts[at + 1 :]]


def entries(tree: HostTree) -> Index:
    """(M,): where the value of each term lies in the samples of the tree end to end: at the token before its own."""
    offsets = np.concatenate([[0], np.cumsum(sample_lengths(tree))])
    depth = tree.position_ids[tree.row_position[tree.term_row]]
    found: Index = offsets[tree.term_sample] + depth
    return found


def token_positions(tree: HostTree) -> Index:
    """(tokens,): the packed position of each token of the samples of the tree end to end."""
    return np.concatenate(tree.path_index()).astype(np.int64)
