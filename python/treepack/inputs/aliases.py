"""The names that columns go by elsewhere: readers look for them in files, and errors point to them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from typing import Any

from .lookalikes import MASK_NAMES

#: Canonical name -> the names that it goes by, most telling first.
USUAL: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids", "tokens", "token_ids", "input_tokens"),
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompt_input_ids", "prompt_tokens"),
    "completion_ids": (
        "completion_ids",
        "completion_token_ids",
        "completion_input_ids",
        "completion_tokens",
        "response_ids",
        "response_token_ids",
        "response_tokens",
        "output_ids",
        "output_token_ids",
    ),
    "messages": ("messages", "conversation", "conversations", "chat", "traj"),
    "prompt_messages": ("prompt_messages", "prompt"),
    "completion_messages": ("completion_messages", "completion"),
    "tools": ("tools",),
    "completion_mask": (
        "completion_mask",
        "response_mask",
        "loss_mask",
        "assistant_masks",
        "assistant_mask",
        "action_mask",
    ),
    "labels": ("labels",),
    "attention_mask": ("attention_mask",),
    "old_log_probs": (
        "old_log_probs",
        "old_logprobs",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "rollout_log_probs",
        "rollout_logprobs",
        "completion_logprobs",
        "completion_log_probs",
        "response_logprobs",
        "response_log_probs",
        "logprobs",
        "log_probs",
    ),
    "ref_log_probs": ("ref_log_probs", "ref_log_prob", "ref_logprobs", "ref_per_token_logps"),
    "advantage": ("advantage", "advantages"),
    "reward": ("reward", "rewards", "score"),
    "group_id": (
        "group_id",
        "prompt_id",
        "uid",
        "group",
        "problem_id",
        "task_id",
        "example_id",
        "data_id",
        "instance_id",
    ),
    "prompt_length": ("prompt_length",),
    "response_length": ("response_length",),
    "identity": ("identity",),
    "sampling_mask": ("sampling_mask",),
    "sampling_mask_counts": ("sampling_mask_counts",),
}
_READ = (*USUAL["completion_mask"], *USUAL["labels"])
#: Names of masks and labels that are no `completion_mask`; those that readers take for one come first.
_MASKS = (*_READ[1:], *sorted(MASK_NAMES.difference(_READ)))
_HALVES = (*USUAL["prompt_ids"], *USUAL["completion_ids"])


def disguised_mask(names: Collection[Any], per_token: Callable[[str], bool]) -> str | None:
    """What to say of columns without a `completion_mask` that have one under another name (with a value per token),
    which as a plain column would train every token; None if they have none. Starts after "it has"."""
    name = next((name for name in _MASKS if name in names and per_token(name)), None)
    if name is None:
        return None
    given = f"{name} != -100 (a label is its own token, not shifted)" if name in USUAL["labels"] else name
    return (
        f"a column {name!r} and no completion_mask, so every token would be trained: give completion_mask = {given}, "
        f"or completion_mask = ones to train every token and carry {name!r} along"
    )


def half_of_pair(names: Collection[Any], per_token: Callable[[str], bool]) -> str | None:
    """What to say of `input_ids` without a `completion_mask` beside a half of a prompt/answer pair, which would be lost
    to the sample; None where there is none. Starts after "it has"."""
    name = next((name for name in _HALVES if name in names and per_token(name)), None)
    if name is None:
        return None
    front, back = (name, "input_ids") if name in USUAL["prompt_ids"] else ("input_ids", name)
    return (
        f"input_ids, a column {name!r} and no completion_mask, so every token of input_ids would be trained: leave "
        f"{name!r} out, with a completion_mask of 0 for each token of the prompt; where input_ids are the other half, "
        f"join {front!r} and {back!r} into input_ids first"
    )


def right_name(name: str, column: str, columns: Collection[str]) -> str | None:
    """The canonical name that is meant where a column of an input is to be taken as `name`; None where `name` is
    one, or one of its own. `column`: what it is taken from, '' to leave it out; `columns`: those of the input.

    A name that differs in a letter or two makes a new column, and what should have been heeded is not.
    """
    if name in USUAL or (name in columns and not (column and _decides(name))):
        return None
    if column and (decided := _decides(name)):
        return decided
    known = [*USUAL, *(columns if not column else ())]
    near = next(iter(difflib.get_close_matches(name, known, 1, _NEAR)), None)
    return None if near is None or re.fullmatch(rf"{re.escape(near)}(_.+|\d+)", name) else near


#: How alike two names are, 0 to 1 (difflib): one wrong letter in seven, or two in fifteen.
_NEAR = 0.84
_DECIDING = ("input_ids", "prompt_ids", "completion_ids", "messages", "completion_mask", "labels", "attention_mask")


def _decides(name: str) -> str | None:
    """The canonical name, of those that say what is packed and trained, that a name stands for elsewhere."""
    return next((canonical for canonical in _DECIDING if name in USUAL[canonical][1:]), None)


def no_ids(names: Collection[Any]) -> str:
    """What to say of columns without `input_ids`. Starts after "it has"."""
    text = f"no input_ids; it has {sorted(map(str, names))}"
    renamed, prompt, completion = (
        next((name for name in USUAL[canonical] if name in names), None)
        for canonical in ("input_ids", "prompt_ids", "completion_ids")
    )
    if renamed is not None and (prompt is None) == (completion is None):
        return f"{text}: rename {renamed!r} to input_ids"
    if renamed is not None:  # half of a pair, or the whole beside one
        half = prompt or completion
        return (
            f"{text}: where {half!r} and {renamed!r} are the two halves of a sample, join them into input_ids; where "
            f"{renamed!r} holds both, rename it to input_ids and leave {half!r} out; with a completion_mask of 0 for "
            "each token of the prompt and 1 for each of the completion"
        )
    if prompt is not None and completion is not None:
        return (
            f"{text}: join {prompt!r} and {completion!r} into input_ids, with a completion_mask of 0 for each token of "
            "the prompt and 1 for each of the completion"
        )
    return text
