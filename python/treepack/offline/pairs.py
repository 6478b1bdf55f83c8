"""Preference pairs (DPO): a chosen and a rejected sample that end up in one tree, next to each other.

A loss over a pair needs the log-probs of both samples in one micro-batch. `treepack.pack` places samples, so pairs are
placed first, each as one path, and the samples of every tree are packed after that:

    pair       a b c d | a b x y           path   a b c d x y, where x y carry that they are the rejected end and start
                                                  after 2 tokens of the chosen one

Paths merge where pairs have the same chosen tokens, and rejected ends where the pairs agree on all of both. Distinct
positions of the samples are distinct positions of the paths, so the samples of a tree of paths fit into one tree: N of
the samples is at most N of the paths. Costs the packing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PackError, PackTypeError, Where
from ..inputs.convert import to_identity, to_ids
from ..packing import pack
from ..tree.packed import Packed
from .options import Options

Array = npt.NDArray[Any]

CHOSEN, PAIR = "chosen", "pair"


class Pair(NamedTuple):
    """Two samples with the same columns."""

    chosen: dict[str, Any]
    rejected: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Raw tokens of both."""
        return len(self.chosen["input_ids"]) + len(self.rejected["input_ids"])


def pack_pairs(pairs: Sequence[Pair], options: Options, start: int = 0) -> tuple[list[Packed], int]:
    """Pack pairs so that both samples of each lie in one tree: one `Packed` of one tree each, and the number of pairs
    that fit no tree (`overlong="skip"`).

    In a tree the samples are chosen, rejected, chosen, rejected, ...; each carries `samples["chosen"]` (bool) and
    `samples["pair"]` (int64, the number of the pair, counted from `start`). A pair without a `completion_mask` trains
    what comes after its common prefix, where alone the two differ.

    Raises PackError for a pair that cannot be packed, with its number.
    """
    made = [samples_of(_ready(pair, start + number)) for number, pair in enumerate(pairs)]
    multiple = options.pad_to_multiple_of or 1
    room = options.max_tokens // multiple * multiple
    paths, numbers, skipped = [], [], 0
    for number, (chosen, rejected) in enumerate(made):
        path = _path(chosen, rejected, options.branching == "label")
        tokens = len(path["input_ids"])
        if tokens <= room:
            paths.append(path)
            numbers.append(number)
        elif options.overlong == "skip":
            skipped += 1
        else:
            needs = -(-tokens // multiple) * multiple
            raise PackError(
                f"chosen and rejected have {tokens} tokens, their common prefix once; a tree holds {room}",
                sample=start + number,
                called="pair {}",
                budget="max_tokens",
                needs=needs,
                remedy=f"raise max_tokens to {needs} or more, or leave such pairs out with overlong='skip'",
            )
    keywords = options.pack_keywords()
    try:
        placed = pack(paths, max_tokens=options.max_tokens, **{name: keywords[name] for name in _PLACING})
    except (PackError, TypeError):
        # What is wrong with a path is wrong with a sample, and the samples have the numbers that a user knows.
        _one_tree(_members(made, numbers, start), keywords | {"max_tokens": 2**31})
        raise
    out = []
    for tree in placed:
        members = [numbers[at] for at in tree.sample_index]
        out.append(_one_tree(_members(made, members, start), keywords))
    return out, skipped


_PLACING = ("branching", "order", "placement", "pad_to_multiple_of")


def _members(made: Sequence[tuple[Any, Any]], numbers: Sequence[int], start: int) -> list[dict[str, Any]]:
    """The samples of these pairs: chosen, rejected, chosen, ..."""
    return [
        {**sample, CHOSEN: side == 0, PAIR: start + number}
        for number in numbers
        for side, sample in enumerate(made[number])
    ]


def _one_tree(samples: list[dict[str, Any]], keywords: dict[str, Any]) -> Packed:
    def pair_of(number: int) -> tuple[int, str]:
        sample = samples[number]
        return sample[PAIR], "pair {} (chosen)" if sample[CHOSEN] else "pair {} (rejected)"

    try:
        packed = pack(samples, **keywords)
    except (PackError, PackTypeError) as error:
        error.rename(pair_of)
        raise
    if len(packed) != 1:
        raise RuntimeError(
            f"{len(samples)} samples of pairs that fit one tree came into {len(packed)}: please report it"
        )
    return packed


def _ready(pair: Pair, number: int) -> Pair:
    """The pair with what its tokens merge by as arrays, or an error with the number of the pair and its side."""
    sides = []
    for side, sample in zip(Pair._fields, pair, strict=True):
        try:
            sides.append(_with_arrays(sample, number))
        except (PackError, PackTypeError) as error:
            error.rename(partial(_called, side))
            raise
    return Pair(*sides)


def _called(side: str, number: int) -> tuple[int, str]:
    return number, f"pair {{}} ({side})"


def _with_arrays(sample: dict[str, Any], number: int) -> dict[str, Any]:
    where = Where("input_ids", number)
    ids = to_ids(sample["input_ids"], where)
    if not len(ids):
        raise where.error("is empty; a sample needs at least one token")
    if "identity" not in sample:
        return {**sample, "input_ids": ids}
    where = Where("identity", number)
    identity = to_identity(sample["identity"], where)
    if identity.ndim and len(identity) != len(ids):
        raise where.error(f"has {len(identity)} rows; input_ids has {len(ids)} tokens, so {len(ids)} are needed")
    return {**sample, "input_ids": ids, "identity": identity}


def tokens_of(pair: Pair) -> int:
    """Tokens of a pair in a tree, the common prefix once."""
    return len(_path(pair.chosen, pair.rejected, label=False)["input_ids"])


def samples_of(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both samples; trained after the common prefix where nothing says what is trained."""
    chosen, rejected = (
        {name: value for name, value in sample.items() if name not in (CHOSEN, PAIR)} for sample in pair
    )
    if "completion_mask" not in chosen and "completion_mask" not in rejected:
        common = _common(chosen, rejected)
        for sample in (chosen, rejected):
            mask = np.ones(len(sample["input_ids"]), np.uint8)
            mask[:common] = 0
            sample["completion_mask"] = mask
    return chosen, rejected


def _common(chosen: dict[str, Any], rejected: dict[str, Any]) -> int:
    """Tokens that the two share from the start."""
    a, b = _keys(chosen), _keys(rejected)
    length = min(len(a), len(b))
    if a.shape[1] != b.shape[1]:
        return 0  # the packer says what is wrong with the identities
    differs = (a[:length] != b[:length]).any(1)
    return int(differs.argmax()) if differs.any() else length


def _keys(sample: dict[str, Any]) -> Array:
    """What tokens merge by, int64 (L, 1 + width of the identity)."""
    ids = np.asarray(sample["input_ids"], np.int64).reshape(-1, 1)
    if "identity" not in sample:
        return ids
    identity = np.asarray(sample["identity"])
    if identity.ndim == 0:
        identity = np.full(len(ids), identity)
    return np.concatenate([ids, identity.reshape(len(ids), -1).astype(np.int64)], 1)


def _path(chosen: dict[str, Any], rejected: dict[str, Any], label: bool) -> dict[str, Any]:
    """The positions of a pair as one sample."""
    a, b = _keys(chosen), _keys(rejected)
    if a.shape[1] != b.shape[1]:
        b = a[:0]
    start = _common(chosen, rejected)
    # Under label branching a position knows the next token: where the two part, the last common token is there twice.
    start = max(start - 1, 0) if label else start
    keys = np.concatenate([a, b[start:]])
    side = np.zeros((len(keys), 2), np.int64)
    side[len(a) :] = 1, start
    if label:
        side[len(a) - 1, 0] = 2  # the end of the chosen sample, where no next token follows
    return {"input_ids": np.ascontiguousarray(keys[:, 0]), "identity": np.concatenate([keys[:, 1:], side], 1)}
