"""Which column of a file is what: by the usual names, or as given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import listed, shown
from ..inputs.aliases import USUAL, right_name
from .source import ReadError

#: Columns that say where the tokens come from; a file is read by one of these forms.
FORMS = {
    "pair": ("prompt_ids", "completion_ids"),
    "ids": ("input_ids", "prompt_length", "response_length"),
    "prompted": ("input_ids", "prompt_ids"),  # whole samples, and the prompt that they begin with
    "answered": ("input_ids", "completion_ids"),  # ... and the completion that they end with
    "chat": ("messages", "tools", "prompt_messages"),
    "dialogue": ("prompt_messages", "completion_messages", "tools"),
}
#: The columns without which a form is not there.
_NEEDED = {"pair": FORMS["pair"], "ids": ("input_ids",), "chat": ("messages",), "dialogue": FORMS["dialogue"][:2]}
#: Forms that need a tokenizer.
CHATS = ("chat", "dialogue")
#: Columns that a row may lack: null says the same.
MAY_LACK = ("tools",)
#: Columns of token ids.
IDS = ("input_ids", "prompt_ids", "completion_ids")
#: Columns without which the ids of a sample, or what of it is trained, cannot be made.
NEEDED = frozenset([*(name for used in FORMS.values() for name in used), "labels", "attention_mask"])
#: Columns that have a value for each token.
PER_TOKEN = frozenset(
    ["completion_mask", "labels", "attention_mask", "old_log_probs", "ref_log_probs", "sampling_mask_counts"]
)

#: Columns without which other tokens are trained, or merged: they are in all of the input or in nothing of it.
_TELLING = ("completion_mask", "labels", "attention_mask", "identity")


def form_of(found: Mapping[str, str]) -> str:
    """The form by which these columns are read, of those that `resolve` returns."""
    if "messages" in found or "completion_messages" in found:
        return "chat" if "messages" in found else "dialogue"
    has = ("input_ids" in found, "prompt_ids" in found, "completion_ids" in found)
    return {(True, True, False): "prompted", (True, False, True): "answered", (True, False, False): "ids"}.get(
        has, "pair"
    )


def unexpected(found: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Name in a file -> canonical name, of the columns that say what is trained or merged, or what a chat is about, and
    that `resolve` did not find, where it looked. A later line or file that has one is not like the first."""
    if form_of(found) in CHATS:
        return {name: "tools" for name in USUAL["tools"] if "tools" not in found and "tools" not in given}
    wanted = [name for name in _TELLING if name not in found and name not in given]
    if "completion_mask" in found:
        wanted = [name for name in wanted if name != "labels"]
    return {usual: canonical for canonical in wanted for usual in USUAL[canonical]}


def has_chat(names: Sequence[str], chats: Collection[str]) -> bool:
    """Whether a file has chat messages. `chats`: columns that hold some."""
    return any(name in names for name in USUAL["messages"]) or all(
        any(name in chats for name in USUAL[canonical]) for canonical in _NEEDED["dialogue"]
    )


def resolve(
    path: Path,
    names: Sequence[str],
    given: Mapping[str, str],
    tokenizer: str | None,
    numbers: Collection[str] = (),
    chats: Collection[str] = (),
) -> dict[str, str]:
    """Canonical name -> name in the file, of every column that is read. `numbers`: columns with one number for each
    row, which are no token ids whatever they are called; `chats`: columns of chat messages, which a prompt and a
    completion have to be to be read as such.

    Where the file has more than one form of the tokens, that of `given` is read; else chat messages if there is a
    tokenizer for them; else prompt and completion ids, since they say what is trained; else whole samples.
    """
    if {"subtree_end", "cu_segments"} <= set(names):
        raise ReadError(f"{path}: it holds packed trees; rollouts are needed (treepack.offline.load reads the trees)")
    for canonical, name in given.items():
        if name and name not in names:
            raise ReadError(f"{path}: no column {name!r} to take {shown(canonical)} from; it has {_listed(names)}")
        if (right := right_name(canonical, name, names)) is not None:
            raise ReadError(
                f"{path}: --column {canonical}={name}: a sample has no column {canonical!r}; did you mean "
                f"--column {right}={name}? (in Python columns=)"
            )
    found = {}
    for canonical, usual in USUAL.items():
        among = chats if canonical in _NEEDED["dialogue"] else names
        there = [name for name in usual if name in among and not (canonical in IDS and name in numbers)]
        if there and canonical not in given:
            found[canonical] = there[0]
    found |= {canonical: name for canonical, name in given.items() if name}
    form = _form(path, names, found, given, tokenizer, numbers)
    dropped = {name for used in FORMS.values() for name in used}.difference(FORMS[form])
    if form == "ids":  # whole samples, and a half that tells what of them is trained
        dropped.difference_update(half for half in ("prompt_ids", "completion_ids") if given.get(half))
    if form == "pair":  # counts of a server, which its prompt and answer are checked against
        dropped.difference_update(name for name in ("prompt_length", "response_length") if name in given)
    if form == "chat" and "prompt_messages" not in given:
        dropped.add("prompt_messages")
    if form in CHATS:  # how the template cuts tokens is not known to what was stored for each token
        dropped |= {name for name in PER_TOKEN if name not in given}
    if "completion_mask" in found:
        dropped.add("labels")
    taken = {canonical: name for canonical, name in found.items() if canonical not in dropped}
    for canonical, name in taken.items():
        if names.count(name) > 1:
            raise ReadError(
                f"{path}: {names.count(name)} columns are named {name!r}, and {canonical} is read from it: rename "
                f"one, or leave it out with --column {canonical}="
            )
    return taken


def _form(
    path: Path,
    names: Sequence[str],
    found: Mapping[str, str],
    given: Mapping[str, str],
    tokenizer: str | None,
    numbers: Collection[str],
) -> str:
    has = {form: all(name in found for name in needed) for form, needed in _NEEDED.items()}
    given_forms = [form for form, used in FORMS.items() if has.get(form) and any(given.get(name) for name in used)]
    order = [*given_forms, *(CHATS if tokenizer else []), "pair", "ids", *CHATS]
    form = next((form for form in order if has[form]), None)
    if form in CHATS and not tokenizer:
        column = found[_NEEDED[form][-1]]
        raise ReadError(
            f"{path}: column {column!r} holds chat messages; to turn them into token ids, name the folder of a "
            "tokenizer with a chat template: --tokenizer DIR (tokenizer= in Python)"
        )
    if form is None:
        single = next((name for name in USUAL["input_ids"] if name in names and name in numbers), None)
        if single is not None:
            raise ReadError(
                f"{path}: column {single!r} holds one number in each row; a list of token ids is needed, the tokens of "
                "one sample in one row"
            )
        raise ReadError(
            f"{path}: no column of token ids; it has {_listed(names)}. Looked for {', '.join(USUAL['input_ids'])}, "
            "prompt_ids with completion_ids, messages, and prompt with completion where both are messages; name yours "
            "with --column input_ids=NAME (columns={'input_ids': NAME} in Python). Text has to be tokenized first, or "
            "given as chat messages with a tokenizer"
        )
    return form


def _listed(names: Sequence[str]) -> str:
    return listed(names) or "no columns"
