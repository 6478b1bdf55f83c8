"""Bars to their text: what a tokenizer makes of the tokens, in runs of trained and other tokens, cut where it is long.

Only what is in the trees is decoded; no file is read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import PackError
from .bars import Bars
from .samples import valid
from .segments import Flags

if TYPE_CHECKING:
    from ..tree.tree import HostTree

#: Tokens of a bar that are shown, of its beginning and of its end.
HEAD, TAIL = 160, 40

#: Runs of a text: 0 not trained, 1 trained, 2 a note about what is left out.
Runs = list[tuple[int, str]]


def texts_of(tree: HostTree, bars: Bars, trained: Flags, tokenizer: Any, most: int) -> dict[int, Runs]:
    """Bar -> the text of its tokens, for bars of one segment; those that stand for most tokens of samples come first,
    until there are `most` bytes of text."""
    starts = np.cumsum(bars.tokens) - bars.tokens
    weight = np.where(bars.segments == 1, bars.tokens * bars.samples, 0)
    out: dict[int, Runs] = {}
    for bar in np.argsort(-weight, kind="stable").tolist():
        if not weight[bar]:
            break
        runs = _text(tree, int(starts[bar]), int(bars.tokens[bar]), trained, tokenizer)
        most -= sum(len(text.encode()) for _, text in runs)
        if most < 0:
            break
        out[bar] = runs
    return out


def _text(tree: HostTree, start: int, tokens: int, trained: Flags, tokenizer: Any) -> Runs:
    if tokens <= HEAD + TAIL:
        return _runs(tree, start, start + tokens, trained, tokenizer)
    left = f" ... {tokens - HEAD - TAIL:,} more tokens ... "
    head = _runs(tree, start, start + HEAD, trained, tokenizer)
    return [*head, (2, left), *_runs(tree, start + tokens - TAIL, start + tokens, trained, tokenizer)]


def _runs(tree: HostTree, start: int, end: int, trained: Flags, tokenizer: Any) -> Runs:
    flags = trained[start:end]
    cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), end - start]
    ids = tree.input_ids[start:end].tolist()
    return [(int(flags[a]), _decoded(tokenizer, ids[a:b], start + a)) for a, b in pairwise(cuts)]


def _decoded(tokenizer: Any, ids: list[int], start: int) -> str:
    """Text that UTF-8 can hold."""
    try:
        text = tokenizer.decode(ids)
    except Exception as error:  # each tokenizer has errors of its own
        raise PackError(
            f"report: the tokenizer cannot decode positions {start} to {start + len(ids) - 1}, ids {ids[:5]} ...: "
            f"{error}; give the tokenizer that made the ids"
        ) from error
    return valid(str(text))


def checked(tokenizer: Any) -> Any:
    """The tokenizer.

    Raises:
        PackError: it is nothing that decodes.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise PackError(
            f"report: tokenizer is a {type(tokenizer).__name__}; needed is an object with decode(ids), say of "
            "transformers.AutoTokenizer.from_pretrained"
        )
    return tokenizer
