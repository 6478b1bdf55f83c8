"""A Hugging Face model on one tree over several ranks: which models and options can run so, and what all ranks get.

The model runs the rows of its rank as it would run a whole tree; `attention.py` hands queries, keys and values to the
hook of the `TreeShard`, which travels with the other keyword arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention import TRITON
from ...distributed.shard import TreeShard
from ...distributed.split import check_heads
from ...logprobs.api import TermLogProbs
from .capture import Capture
from .checks.tree import check_ranges
from .mixers import is_mixer
from .model import decoder_of
from .router import RouterSums

__all__ = ["check_shard", "of_all_ranks", "shard_of"]


def shard_of(tree: Any, mesh: Any, shard: str | None) -> TreeShard | None:
    """What of a tree this rank runs; None without a mesh.

    Raises:
        ValueError: `shard` without a mesh; TypeError and ValueError as of `TreeShard`.
    """
    if mesh is None:
        if shard is not None:
            raise ValueError(
                f"shard={shard!r} says how the ranks of a mesh run one tree, and there is no mesh: pass one dimension "
                'of a DeviceMesh too, mesh=mesh["sp"]'
            )
        return None
    return TreeShard(tree, mesh, "rows" if shard is None else shard)


def check_shard(model: Any, inner: Any, part: TreeShard, impl: str | None) -> None:
    """Raises ValueError where a model that `check_model` passes cannot run a part of a tree; on every rank alike.

    Args:
        model: with its wrappers. inner: without.
    """
    name, config = type(inner).__name__, inner.config.get_text_config()
    stateful = next((type(m).__name__ for m in decoder_of(inner).modules() if is_mixer(type(m))), None)
    if stateful is not None:
        raise ValueError(
            f"{name} has layers that carry a state ({stateful}), which does not go from rank to rank; run its trees on "
            "one rank each, without mesh"
        )
    if Capture.compiled(model):
        raise ValueError(
            f"{name} is compiled (torch.compile); what ranks exchange passes its graph by: run a tree over ranks on "
            "the model that is not"
        )
    if part.form == "rows" and impl not in (None, "reference", *TRITON):
        raise ValueError(
            f"impl={impl!r} takes whole forests; shard=\"rows\" runs by {', '.join(map(repr, TRITON))} or 'reference', "
            'shard="heads" by any'
        )
    check_ranges(inner, part.tree, parts=part.wire.size, instead="run this tree on one rank, without mesh")
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if part.form == "heads" and isinstance(heads, int) and isinstance(kv_heads, int):
        check_heads(name, heads, kv_heads, part.wire.size)


def of_all_ranks(
    part: TreeShard, hidden: Tensor, values: TermLogProbs, sums: RouterSums | None
) -> tuple[Tensor, TermLogProbs, RouterSums | None]:
    """(hidden states of own rows (n, h), values of all terms, router sums over all rows) from those that the rows of
    this rank, one of padding among them, gave."""
    made = [x for x in values[:3] if x is not None]
    found = iter(part.gather(torch.stack(made, 1)).unbind(1))
    values = values._replace(
        **{
            name: next(found)
            for name in ("log_probs", "entropy", "full_log_probs")
            if getattr(values, name) is not None
        }
    )
    if sums is not None:
        flat = part.add_up(torch.cat([x.reshape(-1) for x in sums]))
        experts = len(sums.chosen)
        sums = RouterSums(flat[:experts], flat[experts : 2 * experts], flat[2 * experts])
    return hidden[: part.num_rows], values, sums
