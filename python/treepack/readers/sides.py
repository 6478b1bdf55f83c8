"""Which columns of a file of preference pairs are which side's, by their names and the first rows.

{"prompt_ids": ..., "chosen_ids": ..., "rejected_ids": ...} -> the columns of chosen, and those of rejected
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import listed
from ..inputs.aliases import USUAL
from ..inputs.lookalikes import MASK_NAMES, candidate, pairing
from .columns import numbers_in
from .nested import chats_in
from .source import Chunk, ReadError

SIDES = ("chosen", "rejected")
#: Where the tokens of a side come from, most telling first.
_TOKENS = ("{0}_input_ids", "{0}_ids", "{0}_token_ids", "{0}_tokens", "{0}")
#: Columns of a side that are found under its name: those without which other tokens are trained, or padding is packed.
_PREFIXED = ("completion_mask", "labels", "attention_mask")
#: Columns that the reader finds by itself and that say nothing of one side of a pair.
_ALONE = (
    *_PREFIXED,
    "old_log_probs",
    "ref_log_probs",
    "advantage",
    "reward",
    "identity",
    "sampling_mask",
    "sampling_mask_counts",
    "prompt_length",
    "response_length",
)
_IDS = ("input_ids", "prompt_ids", "completion_ids", "messages")
_MASKS = (*USUAL["completion_mask"], *USUAL["labels"], *sorted(MASK_NAMES))


def columns_of_sides(
    path: object, names: Sequence[str], head: Chunk, given: Mapping[str, str], tokenizer: str | None
) -> dict[str, dict[str, str]]:
    """For each side, canonical name -> column, as `open_rollouts` takes it.

    given: by the user: "chosen", "rejected", "chosen.NAME", "rejected.NAME", and names for both. Raises ReadError.
    """
    tokens = {side: _tokens(path, side, names, given) for side in SIDES}
    if tokenizer is not None and any(_is_no_ids(head, column) for column in tokens.values()):
        ids, more = "messages", {"prompt_ids": "", "prompt_messages": _prompt_messages(names, head, given)}
    else:
        _no_masks_of_neither(path, names, head, given)
        ids, more = _form(path, names, head, given, tokens)
    out = {}
    for side in SIDES:
        columns = dict.fromkeys((*_ALONE, *_IDS), "")
        if ids != "messages":
            columns |= _prefixed(side, names)
        out[side] = columns | more | {ids: tokens[side]} | given_columns(side, given)
    return out


def given_columns(side: str, given: Mapping[str, str]) -> dict[str, str]:
    """Canonical name -> column, of what was given for one side or for both."""
    both = {name: column for name, column in given.items() if name.partition(".")[0] not in SIDES}
    return both | {name.removeprefix(f"{side}."): at for name, at in given.items() if name.startswith(f"{side}.")}


def _tokens(path: object, side: str, names: Sequence[str], given: Mapping[str, str]) -> str:
    tokens = given.get(side) or next((name for form in _TOKENS if (name := form.format(side)) in names), None)
    if tokens is None:
        raise ReadError(
            f"{path}: no column of {side} tokens; it has {listed(names)}. Looked for "
            f"{', '.join(form.format(side) for form in _TOKENS)}; name yours with --column {side}=NAME"
        )
    return tokens


def _prefixed(side: str, names: Sequence[str]) -> dict[str, str]:
    """Masks and labels of a side, `chosen_labels` or `labels_chosen`."""
    found = {}
    for canonical in _PREFIXED:
        usual = [*USUAL[canonical], *(sorted(MASK_NAMES) if canonical == "completion_mask" else ())]
        there = [at for name in usual for at in (f"{side}_{name}", f"{name}_{side}") if at in names]
        if there:
            found[canonical] = there[0]
    if "completion_mask" in found:
        found.pop("labels", None)
    return found


def _form(
    path: object, names: Sequence[str], head: Chunk, given: Mapping[str, str], tokens: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """What the ids of the sides are, whole samples or completions, and the column of the prompt: the first rows tell
    whether the sides begin with it."""
    numbers = numbers_in(head)
    known = [name for name in USUAL["prompt_ids"] if name in names]
    usual = [name for name in known if name not in numbers]
    known = [name for name in known if name.endswith("ids")]  # `prompt_tokens: 3` is a count
    if known and not usual and "prompt_ids" not in given:
        raise ReadError(
            f"{path}: column {known[0]!r} is named as the tokens of a prompt and holds single numbers; a list of ids "
            "in each row is needed; leave it out with --column prompt_ids="
        )
    prompt = given.get("prompt_ids", usual[0] if usual else "")
    rows = [
        (ids, part)
        for column in tokens.values()
        for one, other in zip(head.columns.get(column, ()), head.columns.get(prompt, ()), strict=False)
        if (ids := candidate(one)) is not None and (part := candidate(other)) is not None
    ]
    how = pairing(rows, "prompt") if rows else "apart"
    if how == "mixed":
        raise ReadError(
            f"{path}: some of {tokens['chosen']!r} and {tokens['rejected']!r} begin with {prompt!r} and some do not, "
            "so a side would hold the prompt twice, or lack it: make them alike, or leave the prompt out where all of "
            "them are whole: --column prompt_ids="
        )
    return ("completion_ids" if prompt and how == "apart" else "input_ids"), {"prompt_ids": prompt}


def _prompt_messages(names: Sequence[str], head: Chunk, given: Mapping[str, str]) -> str:
    """The column of the messages before both sides, or of the text that they hold already; '' for none."""
    if "prompt_messages" in given:
        return given["prompt_messages"]
    chats = chats_in(head)
    there = [name for name in USUAL["prompt_messages"] if name in names]
    return next((name for name in there if name in chats or any(isinstance(x, str) for x in head.columns[name])), "")


def _is_no_ids(head: Chunk, column: str) -> bool:
    """Whether a column holds anything but lists of integers."""
    values = [value for value in head.columns.get(column, ()) if value is not None]
    return not values or any(candidate(value) is None for value in values)


def _no_masks_of_neither(path: object, names: Sequence[str], head: Chunk, given: Mapping[str, str]) -> None:
    """ReadError for a mask or labels that may be of either side."""
    named = {*given.values(), *given}
    for name in _MASKS:
        canonical = "labels" if name in USUAL["labels"] else "completion_mask"
        if name in names and not {name, canonical} & named and any(map(_is_per_token, head.columns[name])):
            raise ReadError(
                f"{path}: column {name!r} does not say of which side it marks the tokens: name it, --column "
                f"chosen.{canonical}=... --column rejected.{canonical}=..., or leave it out, --column {name}="
            )


def _is_per_token(value: Any) -> bool:
    return candidate(value) is not None
