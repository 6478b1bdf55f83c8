"""A padded batch -> AReaL's micro-batches, packed by treepack.

A padded batch goes through `treepack.pack(placement="first_fit")` and comes out as AReaL's `MicroBatchList`: the same
samples in the same micro-batches. Costs one pass over the batch; no dense mask is made. Tokens of a tree lie
depth-first, where AReaL lays them out in order of insertion.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ... import _core
from ...errors import PackError, Where
from ...inputs.columns import Flat, Inputs
from ...inputs.convert import to_ids
from ...packing import pack
from .theirs import Areal, areal
from .trie import PackedTrie

__all__ = ["build_packed_tree_batch", "build_tries"]

_Integers = npt.NDArray[np.integer[Any]]


def build_tries(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_tokens: int,
    *,
    order: Literal["first_seen", "largest_first"] = "first_seen",
) -> list[PackedTrie]:
    """First fit of a padded batch into prefix trees: what AReaL calls greedy tries.

    Args:
        input_ids: (B, S) integers from 0.
        attention_mask: (B, S), not 0 at tokens. Padding may be left, right or in between; rows without a token are in
            no trie.
        max_tokens: most positions of a tree; each is padded to it.
        order: see `build_packed_tree_batch`.

    Returns:
        The roots. One without sequences if no row has a token, none if there are no rows.

    Raises:
        ValueError: shapes that do not fit, a row longer than max_tokens, ids below 0 or above 2^31 - 1.
        TypeError: ids that are no integers, sparse or nested tensors.
    """
    return _Batch(input_ids, attention_mask).tries(max_tokens, order)


def build_packed_tree_batch(
    data: dict[str, Any],
    mb_spec: Any,
    pad_to_maximum: bool = True,
    dp_group: dist.ProcessGroup | None = None,
    parallel_size: int = 1,
    *,
    order: Literal["first_seen", "largest_first"] = "first_seen",
) -> Any:
    """AReaL's function of this name, on treepack: the same micro-batches in number, samples and token count.

    Args:
        data: `input_ids` and `attention_mask` (B, S), on any device; tensors of exactly their shape are packed, all
            else is handed to every micro-batch as it is. `position_ids` are those of the tree, whatever `data` has.
        mb_spec: AReaL's `MicroBatchSpec`; `max_tokens_per_mb` is the budget of a tree.
        pad_to_maximum: must be True, as in AReaL.
        dp_group: ranks of a torch.distributed job get the same number of micro-batches; a rank with fewer gets dummies.
        parallel_size: product of the tensor and sequence parallel sizes; `max_tokens_per_mb` must be a multiple of its
            lcm with AReaL's block size.
        order: of siblings and roots. "first_seen" puts the first token of the first sample at position 0, as AReaL
            does: its functions read that token as the label after the last token of every sample, which no loss counts.
            "largest_first" has fewer partial attention tiles and another value in that place.

    Returns:
        A `MicroBatchList` whose micro-batches hold `input_ids` and `position_ids` (1, max_tokens_per_mb), `trie_node`
        (a `PackedTrie`) and the packed tensors (tokens of its samples,), end to end in the order of
        `trie_node.all_sequence_ids`.

    Raises:
        ValueError: as AReaL (no positive budget, pad_to_maximum=False, a budget that is no multiple of the block size,
            a sample over the budget), and ids below 0 or above 2^31 - 1.
        TypeError: ids that are no integers, sparse or nested tensors.
        ImportError: no AReaL of a known version.
    """
    theirs = areal()
    max_tokens = _budget(theirs, mb_spec, pad_to_maximum, parallel_size)
    with theirs.trace_scope("tree_attn.build_packed_tree_batch"):
        batch = _Batch(data["input_ids"], data["attention_mask"])
        tries = batch.tries(max_tokens, order)
        counts = [trie.num_tokens for trie in tries]
        for _ in range(_missing(len(tries), data["input_ids"].device, dp_group)):
            tries.append(PackedTrie(len(tries)))
            counts.append(0)
        if not tries:
            raise ValueError("the batch has no rows, on any rank")
        theirs.stats_tracker.scalar(tree_token_ratio=sum(counts) / data["attention_mask"].sum())
        mbs = batch.micro_batches(tries, data, max_tokens)
    return theirs.MicroBatchList(
        data=data,
        mb_spec=mb_spec,
        mbs=mbs,
        group_lens=counts,
        padded_mbs=mbs,  # one list, as in AReaL: its engines take `trie_node` out of both at once
        padding_lengths=[max_tokens - count for count in counts],
        padded_to_lengths=[max_tokens] * len(tries),
        _max_seqlen=max_tokens,
    )


class _Batch:
    """A padded batch as samples in flat tokens: `rows` are the rows that have a token, `starts` and `ends` (rows,)
    where they are in `tokens`, int64. That is the batch itself, (B * S,), or where some row has holes a copy without
    padding, of which `where` says where it came from."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor):
        for name, tensor in (("input_ids", input_ids), ("attention_mask", attention_mask)):
            if tensor.layout != torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout)
                raise TypeError(f"{name} is a tensor of kind {kind}; it must be a dense one, (B, S)")
        if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; "
                "both must be (B, S)"
            )
        self.ids = input_ids
        self.tokens = to_ids(input_ids.cpu().reshape(-1), Where("input_ids"))
        self.where: _Integers | None = None
        mask = attention_mask.cpu().contiguous()
        other = mask.is_floating_point() or mask.is_complex()
        spans = None if other else _core.token_spans(mask.numpy())
        if spans is None:  # values other than 0 and 1, or holes
            real = (mask != 0).numpy()
            spans = _core.token_spans(real)
        if spans is None:
            self.where = np.flatnonzero(real)
            self.tokens = self.tokens[self.where]
            lengths = real.sum(1, dtype=np.int64)
            ends = np.cumsum(lengths)
            spans = ends - lengths, ends
        self.rows = np.flatnonzero(spans[1] > spans[0])
        self.starts, self.ends = (x if len(self.rows) == len(x) else x[self.rows] for x in spans)
        self.lengths = self.ends - self.starts

    def tries(self, max_tokens: int, order: Literal["first_seen", "largest_first"]) -> list[PackedTrie]:
        longest = int(self.lengths.max(initial=0))
        if longest > max_tokens:
            at = int((self.lengths > max_tokens).argmax())
            has = f"sample {self.rows[at]} has {self.lengths[at]} tokens"
            raise ValueError(f"{has}; a tree holds max_tokens={max_tokens}")
        if not longest:
            return [PackedTrie(0)] if len(self.ids) else []
        # No terms, since AReaL has its own: one mask of zeros for all samples.
        untrained = Flat(np.zeros(longest, np.uint8), np.zeros_like(self.lengths), self.lengths)
        samples: Any = Inputs(Flat(self.tokens, self.starts, self.ends), untrained)
        try:
            packed = pack(
                samples, max_tokens=max_tokens, placement="first_fit", order=order, pad_to_multiple_of=max_tokens
            )
        except PackError as error:
            error.rename(lambda number: (int(self.rows[number]), "sample {}"))
            raise
        return [PackedTrie(number, tree, self.rows[tree.sample_index]) for number, tree in enumerate(packed)]

    def micro_batches(self, tries: list[PackedTrie], data: dict[str, Any], max_tokens: int) -> list[dict[str, Any]]:
        """One dict for each trie; each column is gathered once for all of them."""
        ids, shape = self.ids, self.ids.shape
        known = ("input_ids", "attention_mask", "position_ids")  # a column of depths would hide those of the tree
        columns = {
            name: value
            for name, value in data.items()
            if name not in known and torch.is_tensor(value) and value.shape == shape
        }
        others = {name: value for name, value in data.items() if name not in known and name not in columns}
        order, sizes = self._gather(tries)
        parts: dict[str, tuple[Tensor, ...]] = {}
        for name, value in columns.items():
            gathered = value.reshape(-1).index_select(0, order.to(value.device))
            parts[name] = torch.split(gathered, sizes)
        mbs = []
        for number, trie in enumerate(tries):
            mb: dict[str, Any] = {
                "input_ids": torch.zeros(1, max_tokens, dtype=ids.dtype, device=ids.device),
                "position_ids": torch.zeros(1, max_tokens, dtype=torch.long, device=data["attention_mask"].device),
                "trie_node": trie,
            }
            if trie.tree is not None:
                mb["input_ids"][0].copy_(torch.from_numpy(trie.tree.input_ids))
                mb["position_ids"][0].copy_(torch.from_numpy(trie.tree.position_ids))
            mbs.append(mb | {name: part[number] for name, part in parts.items()} | others)
        return mbs

    def _gather(self, tries: list[PackedTrie]) -> tuple[Tensor, list[int]]:
        """(places in the flattened batch of all tokens, trie by trie and sample by sample; how many of each trie)."""
        none = np.zeros(0, np.int64)
        samples = [none if trie.tree is None else trie.tree.sample_index for trie in tries]
        every = np.concatenate(samples)
        count = self.lengths[every]
        ends = np.cumsum(count)
        index = np.repeat(self.starts[every] - (ends - count), count)
        index += np.arange(len(index))
        if self.where is not None:
            index = self.where[index]
        return torch.from_numpy(index), [int(self.lengths[sample].sum()) for sample in samples]


def _budget(theirs: Areal, mb_spec: Any, pad_to_maximum: bool, parallel_size: int) -> int:
    """`max_tokens_per_mb`, checked as AReaL checks it."""
    given = {name: getattr(mb_spec, name) for name in ("n_mbs", "granularity", "n_mbs_divisor")}
    if any(value != 1 for value in given.values()):
        theirs.logger.warning("tree packing has no use for n_mbs, granularity and n_mbs_divisor: got %s", given)
    max_tokens = mb_spec.max_tokens_per_mb
    if max_tokens is None or max_tokens <= 0:
        raise ValueError(f"MicroBatchSpec.max_tokens_per_mb is {max_tokens}; tree training needs a positive number")
    if not pad_to_maximum:
        raise ValueError("pad_to_maximum is False; tree training needs True: block masks cover whole blocks")
    block = math.lcm(theirs.block_size, parallel_size)
    if max_tokens % block:
        raise ValueError(
            f"max_tokens_per_mb is {max_tokens}; it must be a multiple of {block}, the lcm of the block size "
            f"{theirs.block_size} and parallel_size {parallel_size}"
        )
    return int(max_tokens)


def _missing(count: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """How many micro-batches fewer than another rank this one has."""
    if not dist.is_initialized():
        return 0
    mine = torch.tensor([count], dtype=torch.int64, device=device)
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return int(torch.cat(every).max()) - count
