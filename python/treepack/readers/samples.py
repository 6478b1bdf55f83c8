"""Chunks of columns -> dicts that go straight into `treepack.pack`, checked value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import Where, shown
from ..inputs import convert
from ..inputs.aliases import USUAL
from ..inputs.convert import is_array
from ..inputs.lookalikes import CHANCE, holds, pairing
from .messages import ASSISTANT, Turns, clean_messages, clean_tools, decoded, joined
from .names import IDS, PER_TOKEN
from .servers import plain_ids, plain_log_probs
from .source import Chunk, ReadError, kind

Array = npt.NDArray[Any]
Encode = Callable[[Turns, list[Any] | None, str], tuple[Array, Array]]

#: Columns with one number for each token; others may have a row for each.
_ONE_AXIS = ("completion_mask", "labels", "attention_mask", "sampling_mask_counts")
LARGEST_ID = 2**31 - 1
_IDS = f"token ids, integers from 0 to {LARGEST_ID},"
_SHOWN = 30
#: The columns that tokens come from.
_TOKENS = (*IDS, "prompt_messages", "messages", "completion_messages")


def build(
    chunk: Chunk, columns: dict[str, str], where: str, encode: Encode | None, apart: bool = False
) -> list[dict[str, Any]]:
    """The samples of a chunk. `columns`: canonical name -> name in the file; `where`: "FILE, line"; `encode`: a
    conversation, its tools and where -> ids and completion mask; `apart`: no completion begins with its prompt."""
    out = []
    for i, number in enumerate(chunk.numbers):
        row = {canonical: chunk.columns[name][i] for canonical, name in columns.items()}
        out.append(_Sample(row, columns, f"{where} {number}", encode, apart).columns())
    return out


class _Sample:
    """One sample on its way: `row` is what is left to convert."""

    def __init__(self, row: dict[str, Any], names: dict[str, str], where: str, encode: Encode | None, apart: bool):
        self.row, self.names, self.where = row, names, where
        self.mask: Array | None = None
        self.prompt = 0  # tokens of the prompt, where it is known which are
        if "messages" in row or "completion_messages" in row:
            if encode is None:
                raise ReadError(f"{where}: {shown(names.get('messages', 'completion'))} needs a tokenizer")
            self.ids, self.mask = encode(*self._chat(), where)
        elif "input_ids" in row:
            self.ids = self._ids("input_ids")
            halves = [half for half in ("prompt_ids", "completion_ids") if half in row]
            for half in halves:
                self._take_half(half)
            if not halves:
                self._find_response()
        else:
            prompt, completion = self._ids("prompt_ids"), self._ids("completion_ids")
            self._check_apart(prompt, completion, apart)
            self.ids, self.prompt = np.concatenate([prompt, completion]), len(prompt)
            self.mask = _trained_from(len(prompt), len(self.ids))
            self._check_counts()
        if not len(self.ids):
            columns = " and ".join(self._called(name) for name in _TOKENS if name in names)
            raise ReadError(f"{where}: no tokens in {columns}; a sample has at least one. Leave empty samples out")

    def _chat(self) -> tuple[Turns, list[Any] | None]:
        """The conversation and its tools; a prompt that stands in a column of its own is context."""
        row, called, where = self.row, self._called, self.where
        tools = clean_tools(row.pop("tools", None), where, called("tools"))
        if "completion_messages" in row:
            prompt = clean_messages(row.pop("prompt_messages"), where, called("prompt_messages"))
            name = called("completion_messages")
            return joined(prompt, clean_messages(row.pop("completion_messages"), where, name), where, name), tools
        turns = clean_messages(row.pop("messages"), where, called("messages"))
        given = decoded(row.pop("prompt_messages", None))
        if given is not None:
            turns = _after_prompt(given, turns, where, called("prompt_messages"), called("messages"))
        return turns, tools

    # --- the response of whole samples ------------------------------------------------------------------------------

    def _find_response(self) -> None:
        """Where a whole sample says which tokens are the response: they stand at its end, and they are trained."""
        total = len(self.ids)
        response, prompt = (self._count(name, total) for name in ("response_length", "prompt_length"))
        if response is None and prompt is None:
            response = self._short(total)
            if response is None:
                return
        elif response is None:
            response = total - (prompt or 0)
        elif prompt is not None and prompt + response != total:
            raise self._error(
                "response_length",
                f"is {response} and {self._called('prompt_length')} {prompt}; together they have to be "
                f"the {total} tokens of the sample",
            )
        self.prompt, self.mask = total - response, _trained_from(total - response, total)
        padding = self.row.get("attention_mask")
        if padding is not None and not np.all(padding):
            raise self._error(
                "attention_mask",
                "marks padding, and the response is counted in tokens; cut the padding out first, or "
                "give completion_mask with a value for each token",
            )

    def _count(self, name: str, total: int) -> int | None:
        """A number of tokens of this sample; None where there is none."""
        if name not in self.row:
            return None
        value = self.row.pop(name)
        floating = isinstance(value, float | np.floating)  # as nulls elsewhere make of integers
        whole = value.is_integer() if floating else isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not 0 <= value <= total:
            left_out = f"leave it out with --column {name}="
            raise self._error(name, f"is {_short(value)}; a number of tokens from 0 to {total} is needed: {left_out}")
        return int(value)

    def _short(self, total: int) -> int | None:
        """The length of the response where a mask and another column agree on it: both have fewer values than there
        are tokens. One column alone may be cut off, or be of something else."""
        there = {name: len(v) for name, v in self.row.items() if name in PER_TOKEN and hasattr(v, "__len__")}
        short = {name: length for name, length in there.items() if 0 < length < total}
        masked = any(name in short for name in ("completion_mask", "labels"))
        return next(iter(short.values())) if masked and len(short) > 1 and len(set(short.values())) == 1 else None

    def _check_counts(self) -> None:
        """That a prompt and its completion are whole, where a server counted their tokens."""
        for name, found in (("prompt_length", self.prompt), ("response_length", len(self.ids) - self.prompt)):
            if name in self.row and (counted := self._count(name, 2**31)) != found:
                raise self._error(
                    name,
                    f"is {counted}, and {found} token ids are there; the server was asked for a part of them "
                    "(SGLang: logprob_start_len=0 gives all of a prompt)",
                )

    def _take_half(self, half: str) -> None:
        """What is trained of a whole sample by a column that holds its prompt or its completion."""
        part, size = self._ids(half), len(self.ids)
        side: Literal["prompt", "completion"] = "prompt" if half == "prompt_ids" else "completion"
        if not holds(self.ids, part, side):
            place = "front" if side == "prompt" else "end"
            raise self._error("input_ids", f"does not hold {self._called(half)} at the {place}, as the first rows do")
        self.prompt = len(part) if side == "prompt" else size - len(part)
        self.mask = _trained_from(self.prompt, size)

    def _check_apart(self, prompt: Array, completion: Array, apart: bool) -> None:
        """ReadError for a half that holds the other one, where the names of the two say whole samples; and, `apart`,
        for any completion that begins with its prompt."""
        names = self.names["prompt_ids"], self.names["completion_ids"]
        usual = USUAL["input_ids"]
        if (names[1] in usual and pairing([(completion, prompt)], "prompt") == "whole" and len(prompt)) or (
            names[0] in usual and pairing([(prompt, completion)], "completion") == "whole" and len(completion)
        ):
            whole, half = names[::-1] if names[1] in usual else names
            raise ReadError(
                f"{self.where}: {shown(whole)} holds {shown(half)}, and in the first rows it does not; in all rows of "
                "a file they are halves, or in none"
            )
        if apart and len(prompt) >= CHANCE and holds(completion, prompt, "prompt"):
            raise ReadError(
                f"{self.where}: {shown(names[1])} begins with {shown(names[0])}, and in the first rows it does not; "
                "with the prompt in front it would be there twice"
            )

    def columns(self) -> dict[str, Any]:
        """The sample as `treepack.pack` takes it, without padding."""
        out: dict[str, Any] = {"input_ids": self.ids}
        mask = self._mask()
        if mask is not None:
            out["completion_mask"] = mask
        real = self._per_token("attention_mask", convert.to_attention_mask) if "attention_mask" in self.row else None
        for name in list(self.row):
            out[name] = self._column(name)
        if real is not None and not real.all():
            out = {
                name: value[real] if name != "sampling_mask" and isinstance(value, np.ndarray) else value
                for name, value in out.items()
            }
            if not len(out["input_ids"]):
                raise ReadError(f"{self.where}: {self._called('attention_mask')} marks every token as padding")
        return out

    def _mask(self) -> Array | None:
        if "completion_mask" in self.row:
            return self._per_token("completion_mask", _to_mask)
        if "labels" not in self.row:
            return self.mask
        labels = self._per_token("labels", convert.to_numpy)
        trained: Array = labels != -100
        wrong = np.flatnonzero(trained & (labels != self.ids))
        if len(wrong):
            at = int(wrong[0])
            raise ReadError(
                f"{self.where}: {self._called('labels')}[{at}] is {labels[at]} and the token is {self.ids[at]}; a "
                "label is its own token or -100 (not trained), not shifted"
            )
        mask: Array = trained.astype(np.uint8)
        return mask

    def _column(self, name: str) -> Any:
        value = self.row[name]
        if name in PER_TOKEN:
            return self._per_token(name, convert.to_numpy)
        if name == "reward" and value is None:
            return float("nan")
        if name == "sampling_mask":
            return self._convert(name, convert.to_numpy)
        if is_array(value):
            return self._per_token(name, convert.to_identity if name == "identity" else convert.to_numpy)
        if value is None or not isinstance(value, int | float | np.number | np.bool_ | str):
            raise self._error(name, f"is {_short(value)}; a number, or one for each token, is needed")
        if isinstance(value, str) and name != "group_id":
            raise self._error(name, f"is text ({_short(value)}); numbers are needed")
        return value

    def _ids(self, name: str) -> Array:
        ids = self._convert(name, convert.to_ids)
        if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
            at = int(((ids < 0) | (ids > LARGEST_ID)).argmax())
            raise self._error(name, f"[{at}] is {ids[at]}; allowed are ids from 0 to {LARGEST_ID}")
        return ids

    def _per_token(self, name: str, convert: Callable[[Any, Where], Array]) -> Array:
        """A value for each token; one for each token of the response is filled up in front, with what says that the
        prompt is not trained."""
        array = self._convert(name, convert)
        if array.ndim > 1 and name in _ONE_AXIS:
            raise self._error(name, f"has shape {array.shape}; one number for each token is needed")
        if array.ndim and len(array) == len(self.ids):
            return array
        if self.prompt and array.ndim and len(array) == len(self.ids) - self.prompt:
            fill = {"labels": -100, "attention_mask": 1}.get(name, 0)
            return np.concatenate([np.full((self.prompt, *array.shape[1:]), fill, array.dtype), array])
        has = f"{len(array)} values" if array.ndim else f"the value {array}"
        allowed = f"one for each of the {len(self.ids)} tokens"
        if self.prompt:
            allowed += f" or of the {len(self.ids) - self.prompt} completion tokens"
        elif self.mask is None and array.ndim and 0 < len(array) < len(self.ids):
            allowed += "; where they are those of a response at the end, give its length as response_length"
        raise self._error(name, f"has {has}; needed is {allowed}")

    def _convert(self, name: str, convert: Callable[[Any, Where], Array]) -> Array:
        """The value as an array. It is then no longer in `row`."""
        value = self.row.pop(name)
        ids = name.endswith("_ids")
        if ids:
            value = plain_ids(value)
        elif name.endswith("_log_probs"):
            value = plain_log_probs(value, self.ids[self.prompt :])
        hint = "token ids" if ids else "numbers"
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, str):
            raise self._error(name, f"is text ({_short(value)}); {hint} are needed, say [1, 2, 3]")
        if isinstance(first, dict) and "role" in first:
            raise self._error(name, "holds chat messages; name a tokenizer for them: --tokenizer DIR (tokenizer=)")
        if value is None or isinstance(value, dict) or (ids and not is_array(value)):
            value = value.item() if isinstance(value, np.generic) else value
            raise self._error(name, f"is {kind(value)}; a list of {hint} is needed")
        try:
            return convert(value, Where(self.names[name], source=self.where))
        except (ValueError, TypeError) as error:
            at = _culprit(value, ids)
            if at is None:
                raise ReadError(str(error)) from None
            raise self._error(name, f"[{at}] is {_short(value[at])}; {_IDS if ids else hint} are needed") from None

    def _called(self, name: str) -> str:
        """How a message calls a column."""
        return shown(self.names.get(name, name))

    def _error(self, name: str, message: str) -> ReadError:
        space = "" if message.startswith("[") else " "
        return ReadError(f"{self.where}: {self._called(name)}{space}{message}")


def _culprit(value: Any, ids: bool) -> int | None:
    """Index of the first item of a list that is no number, or no token id."""
    if not isinstance(value, list | tuple) or any(isinstance(item, list | tuple | np.ndarray) for item in value):
        return None
    for at, item in enumerate(value):
        if not isinstance(item, int | float):
            return at
        if ids and not (type(item) is int and 0 <= item <= LARGEST_ID):
            return at
    return None


def _after_prompt(prompt: Any, turns: Turns, where: str, name: str, after: str) -> Turns:
    """The messages of a column `after` behind those of a prompt, where they do not start with them. A prompt that is
    text is that of a conversation which holds it already."""
    if not isinstance(prompt, str):
        return joined(clean_messages(prompt, where, name), turns, where, after)
    if turns.messages[0]["role"] == ASSISTANT:
        raise ReadError(
            f"{where}: {name} is text and {after} starts with a message of role {ASSISTANT!r}, so the prompt would be "
            f'lost; give {name} as messages, [{{"role": "user", "content": ...}}]'
        )
    return turns


def _trained_from(start: int, total: int) -> Array:
    """A mask of tokens of which all from `start` on are trained."""
    return np.repeat(np.array([0, 1], np.uint8), [start, total - start])


def _to_mask(value: Any, where: Where) -> Array:
    """A mask of 0 and 1, which some tools store as floats."""
    array = convert.to_numpy(value, where)
    if array.dtype.kind == "f" and ((array == 0) | (array == 1)).all():
        array = array.astype(np.uint8)
    mask = convert.to_mask(array, where)
    if mask.dtype == np.uint8 and mask.size and mask.max() > 1:
        at = int((mask > 1).argmax())
        raise where.error(f"is {mask.flat[at]}; allowed are 0 (context) and 1 (trained)", at)
    return mask.astype(np.uint8, copy=False)


def _short(value: Any) -> str:
    shown = kind(value) if value is None else repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
