"""What the first rows of a file look like inside -> where the samples lie in them, as paths.

A row that holds lists of steps, turns, choices or whole samples is known by what is in them: token ids under a name of
token ids, those of a prompt and those of an answer distinguished by that name or by the object around them. What
belongs to them (masks, log-probs, rewards) is looked for on the way from the row to the answer, the nearest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import listed
from ..inputs.aliases import USUAL
from ..inputs.lookalikes import holds
from .branches import as_branches
from .messages import decoded
from .paths import is_path
from .servers import plain_ids
from .source import ReadError

#: A name -> what it is of, in the singular: objects around `token_ids` that say whose they are.
_PROMPTS = ("prompt", "input", "request", "context", "observation")
_ANSWERS = ("response", "completion", "output", "choice", "answer", "action", "generation")
_WHOLE = (*USUAL["input_ids"], "ids")
#: Where SGLang puts the ids and log-probs of a response, and how many tokens it counted.
_SERVER = {
    "prompt_ids": "meta_info.input_token_logprobs",
    "completion_ids": "meta_info.output_token_logprobs",
    "old_log_probs": "meta_info.output_token_logprobs",
    "prompt_length": "meta_info.prompt_tokens",
    "response_length": "meta_info.completion_tokens",
}
_FORMS = ("input_ids", "prompt_ids", "completion_ids", "messages", "tools", "prompt_messages", "completion_messages")
#: Columns that have rows of their own for each token, so that lists of lists are no lists of samples.
_WIDE = ("identity", "sampling_mask", "sampling_mask_counts", *_FORMS[3:])
_USUAL = frozenset(name for usual in USUAL.values() for name in usual)
_LOG_PROBS = (*USUAL["old_log_probs"], *USUAL["ref_log_probs"])
#: Items of a list that are looked at, and depth at which a row is not looked into any more.
_ITEMS, _DEPTH = 8, 8


def find(rows: Sequence[Mapping[str, Any]], path: object) -> dict[str, str]:
    """Canonical name -> path of what such rows hold; {} where nothing that is read is nested. `path`: of the file.

    Raises ReadError where several lists hold token ids and nothing says which are meant, and for answers alone.
    """
    by_path = leaves(rows)
    roles = {name: role for name, value in by_path.items() if (role := _role(name, value))}
    flat = {role for name, role in roles.items() if not is_path(name)}
    if "completion_ids" in flat and flat & {"prompt_ids", "input_ids"}:
        return {name: at for name, at in _SERVER.items() if at in by_path and name not in _FORMS}
    answers = [name for name, role in roles.items() if role == "completion_ids"]
    if "input_ids" in flat and ("prompt_ids" in flat or not answers):
        return {}
    pairs = [(prompt, answer) for answer in answers if (prompt := _prompt_of(answer, roles))]
    if pairs:
        prompt, answer = _only(pairs, path)
        if "input_ids" in flat and (is_path(prompt) or _ends_with(by_path[prompt], by_path[answer])):
            return {}  # whole samples, and what they were made of
        return {**beside(by_path, answer, rows), "prompt_ids": prompt, "completion_ids": answer}
    wholes = [(name, name) for name, role in roles.items() if role == "input_ids" and "[]" in name]
    if wholes:
        _, whole = _only(wholes, path)
        return {**beside(by_path, whole, rows), "input_ids": whole}
    if any(is_path(answer) for answer in answers):
        raise ReadError(
            f"{path}: {answers[0]} holds the token ids of answers, and nothing those of their prompts; let the server "
            "give them (return_token_ids for vLLM, input_ids in the request of SGLang), and name them with "
            "--column prompt_ids=PATH"
        )
    return {}


def beside(by_path: Mapping[str, Any], answer: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Canonical name -> path of what belongs to the ids at the path `answer`. `by_path`: what `leaves` gives."""
    found = {}
    for canonical, usual in USUAL.items():
        if canonical in _FORMS:
            continue
        names = [*usual, *(f"{name}s" for name in usual if f"{name}s" not in _USUAL)]
        there = [
            at
            for path in by_path
            if _name(path) in names and (at := _with_lists(path, answer, by_path, rows)) and _leads_to(at, answer)
        ]
        there += [path for path in by_path if _counted(canonical, path, answer)]
        if there:
            found[canonical] = max(there, key=lambda path: _parent(path).count("."))
    return found


def neighbours(rows: Sequence[Mapping[str, Any]], answer: str) -> list[str]:
    """The paths of whatever stands beside the ids at the path `answer` and on the way there, read or not; objects that
    hold no ids are not looked into."""
    by_path = leaves(rows)
    if answer.endswith("[]"):
        columns = [name for name in by_path if not is_path(name.removesuffix("[]"))]
        return [at for name in columns if (at := _with_lists(name, answer, by_path, rows)).endswith("[]")]
    steps = [answer[: at + 1] for at, letter in enumerate(answer) if letter == "."]
    found: dict[str, None] = {}
    for path in by_path:
        step = max((step for step in steps if path.startswith(step)), default="")
        if step:
            rest = path[len(step) :].split(".")[0]
            found[step + (rest if "." not in path[len(step) :] else rest.split("[]")[0])] = None
    return list(found)


def leaves(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Path -> the first value there that is not empty, of everything in some rows but nulls. A list of lists of a
    column that has a value for each token is a list of samples: its path ends in []."""
    by_path: dict[str, Any] = {}
    for row in rows:
        for path, value in _walk(dict(row), "", 0):
            if path not in by_path or (hasattr(by_path[path], "__len__") and not len(by_path[path])):
                by_path[path] = value
    return by_path


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    value = decoded(value)
    name = _name(path)
    if depth < _DEPTH and name not in _LOG_PROBS:
        if isinstance(value, dict):
            for key, item in value.items():
                if isinstance(key, str) and key and not is_path(key):
                    yield from _walk(item, f"{path}.{key}" if path else key, depth + 1)
            return
        first = next((item for item in value if item is not None), None) if isinstance(value, list) else None
        if isinstance(first, dict) and "role" not in first:
            with suppress(ReadError):  # said with file and row when the row is read
                value = as_branches(value)
            for item in value[:_ITEMS]:
                yield from _walk(item, f"{path}[]", depth + 1)
            return
        if isinstance(first, list | np.ndarray) and plain_ids(value) is value and _is_per_token(name):
            inner = [item for item in value if isinstance(item, list | np.ndarray)]
            yield f"{path}[]", next((item for item in inner if len(item)), first)
            return
    if value is not None:
        yield path, value


def _is_per_token(name: str) -> bool:
    return any(name in usual or name.removesuffix("s") in usual for known, usual in USUAL.items() if known not in _WIDE)


def _role(path: str, value: Any) -> str | None:
    """Which of the three columns of ids a value is; None for what holds no ids."""
    name, around = _name(path), _parent(path).rstrip(".").split(".")
    value = plain_ids(value)
    integers = value.dtype.kind in "iu" if isinstance(value, np.ndarray) else isinstance(value, list) and value
    if not integers or not len(value) or not all(isinstance(x, int | np.integer) and x >= 0 for x in value[:64]):
        return None
    if any(isinstance(x, bool) for x in value[:64]):
        return None
    for role in ("prompt_ids", "completion_ids"):
        if name in USUAL[role] or f"{around[-1]}.{name}" == _SERVER[role]:
            return role
    if name not in _WHOLE:
        return None
    for outer in reversed(around):
        one = outer.removesuffix("[]").removesuffix("s").removesuffix("_token").lower()
        if one in _PROMPTS:
            return "prompt_ids"
        if one in _ANSWERS:
            return "completion_ids"
    return "input_ids"


def _prompt_of(answer: str, roles: Mapping[str, str]) -> str | None:
    """The ids of the prompt of an answer: of those on its way, the nearest; a whole sample there is a prompt."""
    for role in ("prompt_ids", "input_ids"):
        there = [path for path, path_role in roles.items() if path_role == role and _reaches(path, answer)]
        if there:
            return max(there, key=lambda path: (_common(path, answer), -len(path)))
    return None


def _reaches(prompt: str, answer: str) -> bool:
    """Whether every list that a prompt is in holds the answer, too; or both are columns of lists."""
    both_lists = prompt.endswith("[]") and answer.endswith("[]") and not _parent(prompt)
    return both_lists or _list(answer).startswith(_list(prompt))


def _only(pairs: list[tuple[str, str]], path: object) -> tuple[str, str]:
    """The one pair of prompt and answer: of those in one list the one that lies least deep."""
    lists = {_list(answer) for _, answer in pairs}
    least = min(answer.count(".") for _, answer in pairs)
    left = [pair for pair in pairs if pair[1].count(".") == least]
    if len(lists) > 1 or len(left) > 1:
        names = listed(dict.fromkeys(answer for _, answer in pairs))
        prompt, answer = pairs[0]
        example = f"completion_ids={answer} --column prompt_ids={prompt}" if prompt != answer else f"input_ids={answer}"
        raise ReadError(f"{path}: token ids lie in {names}; say which are meant, say --column {example}")
    return left[0]


def _with_lists(path: str, answer: str, by_path: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """A path, with [] after it where it is a column with an item for each item of the column `answer`."""
    column = answer.removesuffix("[]")
    if not answer.endswith("[]") or is_path(path) or not isinstance(by_path[path], list | np.ndarray):
        return path
    both = [(row.get(path), row.get(column)) for row in rows]
    alike = [len(a) == len(b) for a, b in both if isinstance(a, list | np.ndarray) and isinstance(b, list | np.ndarray)]
    return f"{path}[]" if alike and all(alike) else path


def _leads_to(path: str, answer: str) -> bool:
    """Whether a value stands on the way from the row to the answer."""
    if answer.endswith("[]"):  # columns of lists: the same item of another column
        parent = _parent(path)
        return path.endswith("[]") or parent == "" or (parent.endswith("[].") and parent.count(".") == 1)
    return answer.startswith(_parent(path)) and not path.endswith("[]")


def _counted(canonical: str, path: str, answer: str) -> bool:
    """Whether a server wrote a value beside an answer, in an object of its own."""
    at = _SERVER.get(canonical)
    if at is None or not (path == at or path.endswith(f".{at}")):
        return False
    return answer == path or answer.startswith(path.removesuffix(at))


def _ends_with(ids: Any, answer: Any) -> bool:
    return holds(np.asarray(plain_ids(ids)), np.asarray(plain_ids(answer)), "completion")


def _name(path: str) -> str:
    return path.rsplit(".", 1)[-1].removesuffix("[]")


def _list(path: str) -> str:
    """The path up to the innermost list; '' outside of any."""
    return path[: path.rfind("[]") + 2] if "[]" in path else ""


def _parent(path: str) -> str:
    """The path up to the object that a value is in, with the dot; '' for the row itself."""
    return path[: path.rfind(".") + 1]


def _common(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
