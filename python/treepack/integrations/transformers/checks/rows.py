"""Two tiny samples with a common prefix, as one packed row and as rows of their own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....attention import TreeTiles
from ..model import call_inputs
from .positions import position_table
from .tree import row_rope

__all__ = ["Row", "Rows", "rows_for"]

# Longer than convolutions are wide. 63 tokens in a row: no size of a head or a layer, by which a token's values are
# known in a tensor.
_PREFIX, _BRANCH = 23, 20
_LEAST = 6


class Row(NamedTuple):
    """A row as a model takes it."""

    ids: list[int]
    positions: list[int]
    end: list[int]

    def inputs(self, tree: Any) -> dict[str, Any]:
        """What `model_inputs` makes of a tree, with the device and dtypes of that one."""
        positions = tree.position_ids.new_tensor(self.positions)
        tiles = TreeTiles(tree.subtree_end.new_tensor(self.end), positions)
        tiles.row_checked = True
        # Kernels have a check of their own, and no loss is read.
        inputs = call_inputs(tree.input_ids.new_tensor(self.ids), positions, tiles, "reference")
        return inputs | {"weighted_aux_loss": True}


class Rows(NamedTuple):
    prefix: int
    branch: int
    packed: Row
    first: Row
    second: Row

    def of_samples(self) -> tuple[Tensor, Tensor]:
        """Where the tokens of the two samples lie in the packed row."""
        tokens = torch.arange(self.prefix + 2 * self.branch)
        return tokens[: -self.branch], torch.cat([tokens[: self.prefix], tokens[-self.branch :]])


def rows_for(inner: Any, draw: int) -> Rows | None:
    """The rows of a model without its wrappers, the same at every call; None if it is too small for any.

    Args:
        draw: another number gives other tokens.
    """
    prefix, branch = _sizes(inner)
    drawn = _ids(inner, prefix + 3 * branch, draw)
    if branch < 2 or drawn is None:
        return None
    cuts = (0, prefix, prefix + branch, prefix + 2 * branch, prefix + 3 * branch)
    shared, a, b, padding = (drawn[start:stop] for start, stop in itertools.pairwise(cuts))
    tokens, alone = prefix + 2 * branch, prefix + branch
    depth = list(range(alone))
    padded = depth + branch * [0], alone * [alone] + list(range(alone, tokens))
    return Rows(
        prefix,
        branch,
        Row(shared + a + b, depth + depth[prefix:], prefix * [tokens] + branch * [alone] + branch * [tokens]),
        Row(shared + a + padding, *padded),
        Row(shared + b + padding, *padded),
    )


def _sizes(inner: Any) -> tuple[int, int]:
    """Tokens of the prefix and of a branch: less where the model has no positions for them."""
    limits = [_PREFIX + _BRANCH]
    if (table := position_table(inner)) is not None:
        limits.append(table[1])
    if (rope := row_rope(inner.config.get_text_config())) is not None:
        limits.append(rope[1] - 1)
    most = min(limits)
    branch = most * _BRANCH // (_PREFIX + _BRANCH) if most >= _LEAST else 0
    return most - branch, branch


def _ids(inner: Any, count: int, draw: int) -> list[int] | None:
    """Ordinary tokens: none that a config gives a meaning to (the end, padding, a place for an image)."""
    settings = {**vars(inner.config), **vars(inner.config.get_text_config())}
    named = [x for name, x in settings.items() if "token" in name or "image" in name or "audio" in name]
    special = {token for x in named for token in (x if isinstance(x, Iterable) and not isinstance(x, str) else (x,))}
    size = getattr(inner.get_input_embeddings(), "num_embeddings", None) or settings.get("vocab_size")
    if not isinstance(size, int) or size - len([x for x in special if isinstance(x, int) and 0 <= x < size]) < 4:
        return None
    source = random.Random(draw)
    ids: list[int] = []
    while len(ids) < count:
        token = source.randrange(size)
        if token not in special and token not in ids[-3:]:
            ids.append(token)
    return ids
