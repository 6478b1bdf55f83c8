"""Chat messages -> token ids and what of them is trained: the assistant's turns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._optional import require
from .source import ReadError, first_line, kind

Array = npt.NDArray[Any]


class ChatEncoder:
    """A tokenizer folder (`save_pretrained`) and its chat template.

    Trained is what the template marks with `{% generation %}`. Where it marks nothing, a turn of the assistant is what
    the rendered text gains over the messages before it with their generation prompt, end token included: the template
    must then render a longer chat as a continuation of a shorter one. A token that reaches over the start of a turn is
    not trained.
    """

    def __init__(self, folder: str):
        if not Path(folder).is_dir():
            raise ReadError(f"tokenizer {folder}: no such folder; name one that save_pretrained of a tokenizer wrote")
        require("transformers", f"tokenizer {folder}: it", "transformers")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a wrong folder makes it raise
            raise ReadError(f"tokenizer {folder}: it cannot be loaded: {first_line(error)}") from None
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ReadError(f"tokenizer {folder}: it has no chat template; take that of an instruction-tuned model")
        if not self._tokenizer.is_fast:
            raise ReadError(f"tokenizer {folder}: it is a slow one; a fast one (tokenizer.json) is needed")
        self._marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def __call__(self, messages: Any, tools: Any, where: str) -> tuple[Array, Array]:
        """Ids int64 (L,) and completion mask uint8 (L,) of one conversation."""
        turns = _checked(messages, where)
        try:
            return self._with_marks(turns, tools) if self._marked else self._by_difference(turns, tools, where)
        except ReadError:
            raise
        except Exception as error:  # a template raises what it likes
            raise ReadError(f"{where}: the chat template refuses the messages: {first_line(error)}") from None

    def _with_marks(self, turns: list[dict[str, Any]], tools: Any) -> tuple[Array, Array]:
        out = self._tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.array(out["input_ids"], np.int64), np.array(out["assistant_masks"], np.uint8)

    def _by_difference(self, turns: list[dict[str, Any]], tools: Any, where: str) -> tuple[Array, Array]:
        def render(count: int, prompt: bool = False) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    turns[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
                )
            )

        text = render(len(turns))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], np.int64)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), np.uint8)
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before, after = render(number, prompt=True), render(number + 1)
            if not (text.startswith(after) and after.startswith(before)):
                raise ReadError(
                    f"{where}: the chat template renders message {number} differently once more follow, so what was "
                    "generated cannot be told; give token ids, a sample per turn, or a template with {% generation %}"
                )
            mask[(starts >= len(before)) & (ends <= len(after)) & (ends > starts)] = 1
        return ids, mask


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        has = "an empty list" if messages == [] else kind(messages)
        raise ReadError(f'{where}: messages is {has}; a list of {{"role": ..., "content": ...}} is needed')
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            has = f"has {', '.join(message)}" if isinstance(message, dict) else f"is {kind(message)}"
            raise ReadError(f"{where}: message {number} has no role; it {has}, needed are role and content")
        if "content" not in message and "tool_calls" not in message:
            raise ReadError(f"{where}: message {number} has no content; it has {', '.join(message)}")
        turns.append({name: value for name, value in message.items() if value is not None})  # Arrow fills up with nulls
    return turns
