"""Chat messages -> token ids and what of them is trained: the assistant's turns."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._optional import require
from .messages import ASSISTANT, Message, Turns, with_text_arguments
from .offsets import Offsets
from .source import ReadError, first_line

Array = npt.NDArray[Any]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
#: Stand in the rendered text where a template begins and ends what is generated; of no language.
_BEGIN, _END = "\ue0b5\ue0b6", "\ue0b6\ue0b5"
#: Words of a conversation on which a template is tried out; it may cut and trim, and leaves a word.
_ASKED, _ANSWERED = "treepackquestion", "treepackanswer"


class _Ending(NamedTuple):
    """What a template prints after the content of an assistant's message, whatever the content is: up to its end token,
    and after that. Both are '' where there is no end token."""

    upto: str = ""
    after: str = ""


class ChatEncoder:
    """A tokenizer folder (`save_pretrained`) and its chat template.

    Trained is what the template marks with `{% generation %}`. Where it marks nothing, a turn of the assistant is what
    the rendered text gains over the messages before it with their generation prompt: the template must then render a
    longer chat as a continuation of a shorter one. Either way a turn ends with its end token, which is trained; what
    the template prints after it, whatever was said, is context. A turn is a range of ids; a token that reaches over
    the start of a turn is not trained.
    """

    def __init__(self, folder: str):
        self._tokenizer = load_tokenizer(folder)
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ReadError(f"tokenizer {folder}: it has no chat template; take that of an instruction-tuned model")
        if not self._tokenizer.is_fast:
            raise ReadError(f"tokenizer {folder}: it is a slow one; a fast one (tokenizer.json) is needed")
        self._folder = folder
        self.untrained: dict[str, None] = {}
        """The roles in conversations of which nothing was trained."""
        self._marking = _GENERATION.sub(_mark, template) if _GENERATION.search(template) else None

    def __call__(self, turns: Turns, tools: list[Any] | None, where: str) -> tuple[Array, Array]:
        """Ids int64 (L,) and completion mask uint8 (L,) of one conversation."""
        try:
            if self._text_arguments:
                turns = Turns(with_text_arguments(turns.messages), turns.trained)
            text, spans = self._marked(turns, tools) if self._marking else self._by_difference(turns, tools, where)
            ids, offsets = self._tokens(text)
            mask = np.zeros(len(ids), np.uint8)
            for span in spans:
                mask[offsets.tokens(*self._to_its_end(text, span))] = 1
            if not mask[1:].any():
                self.untrained.update((str(message["role"]), None) for message in turns.messages)
            return ids, mask
        except ReadError:
            raise
        except Exception as error:  # a template raises what it likes
            raise ReadError(f"{where}: the chat template refuses the messages: {first_line(error)}") from None

    def _render(self, messages: list[Message], tools: Any = None, prompt: bool = False, marked: bool = False) -> str:
        template = self._marking if marked else None
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, chat_template=template
            )
        )

    def _tokens(self, text: str) -> tuple[Array, Offsets]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], np.int64)
        return ids, Offsets(ids, encoded["offset_mapping"], self._tokenizer.decode)

    # --- what was generated -----------------------------------------------------------------------------------------

    def _marked(self, turns: Turns, tools: Any) -> tuple[str, list[Span]]:
        """The rendered text and what of it the template marks, without the messages that are not trained."""
        text, spans = _unmarked(self._render(turns.messages, tools, marked=True))
        left_out: set[int] = set()
        for number, (message, trained) in enumerate(zip(turns.messages, turns.trained, strict=True)):
            if message["role"] == ASSISTANT and not trained:
                left_out.update(range(*(self._marks(turns.messages[:count], tools) for count in (number, number + 1))))
        return text, [span for number, span in enumerate(spans) if number not in left_out]

    def _marks(self, messages: list[Message], tools: Any) -> int:
        """How many parts of these messages are marked."""
        return self._render(messages, tools, marked=True).count(_BEGIN) if messages else 0

    def _by_difference(self, turns: Turns, tools: Any, where: str) -> tuple[str, list[Span]]:
        text, spans = self._render(turns.messages, tools), []
        for number, trained in enumerate(turns.trained):
            if not trained:
                continue
            before = self._render(turns.messages[:number], tools, prompt=True)
            after = self._render(turns.messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise ReadError(
                    f"{where}: the chat template renders message {number} differently once more follow, so what "
                    "was generated cannot be determined; give token ids, a sample per turn, or a template with "
                    "{% generation %}"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _to_its_end(self, text: str, span: Span) -> Span:
        """The span up to the end token of its turn: without what the template prints after it, and with it where the
        template's mark ends before."""
        start, end = span
        ending, turn = self._ending, text[start:end]
        for more in range(len(ending.after), 0, -1):
            if turn.endswith(ending.after[:more]) and turn[:-more].endswith(self._special):
                return start, end - more
        if not turn.endswith(self._special):
            for inside in range(len(ending.upto)):
                if turn.endswith(ending.upto[:inside]) and text.startswith(ending.upto[inside:], end):
                    return start, end + len(ending.upto) - inside
        return span

    # --- what a template is like, looked at once --------------------------------------------------------------------

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """The texts of special tokens."""
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple({token.content for token in added if token.special} | set(self._tokenizer.all_special_tokens))

    @cached_property
    def _ending(self) -> _Ending:
        text = self._tried_out()
        if text is None:
            return _Ending()
        _, found, ending = text.rpartition(_ANSWERED)
        if not found:
            raise ReadError(
                f"tokenizer {self._folder}: its chat template does not print the content of an assistant's message "
                "that is text; take the template of a model for text"
            )
        places = [(at, -len(token), token) for token in self._special if token and (at := ending.find(token)) >= 0]
        if not places:
            return _Ending()
        at, _, token = min(places)
        return _Ending(ending[: at + len(token)], ending[at + len(token) :])

    def _tried_out(self) -> str | None:
        """A question and its answer as the template prints them; None where it wants what only the rows have."""
        messages: list[Message] = [{"role": "user", "content": _ASKED}, {"role": ASSISTANT, "content": _ANSWERED}]
        for system in ([], [{"role": "system", "content": _ASKED}]):
            try:
                return self._render([*system, *messages])
            except Exception:  # a template raises what it likes
                continue
        return None

    @cached_property
    def _text_arguments(self) -> bool:
        """Whether the template takes the arguments of a tool call for text: it fails on an object, or prints it as
        Python does."""
        call = {"name": "treepack", "arguments": {_ASKED: _ANSWERED}}
        calls = [{"id": "treepack1", "type": "function", "function": call}]
        asked: list[Message] = [{"role": "user", "content": _ASKED}]
        messages = [*asked, {"role": ASSISTANT, "content": "", "tool_calls": calls}]
        try:
            return repr({_ASKED: _ANSWERED})[1:-1] in self._render(messages)
        except Exception:
            try:
                self._render(with_text_arguments(messages))
            except Exception:
                return False
            return True


def load_tokenizer(folder: str) -> Any:
    if not Path(folder).is_dir():
        raise ReadError(f"tokenizer {folder}: no such folder; name one that save_pretrained of a tokenizer wrote")
    require("transformers", f"tokenizer {folder}: it", "transformers")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a wrong folder makes it raise
        raise ReadError(f"tokenizer {folder}: it cannot be loaded: {first_line(error)}") from None


def _mark(tag: re.Match[str]) -> str:
    """A generation tag as one that prints where it stands. It stays a tag, since Jinja trims around tags alone."""
    left, end, right = tag.groups()
    return f"{{%{left} if true %}}{_END if end else _BEGIN}{{% endif {right}%}}"


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """A text without the marks, and what was between them."""
    out, spans, begins = "", [], []
    for piece in re.split(f"({_BEGIN}|{_END})", text):
        if piece == _BEGIN:
            begins.append(len(out))
        elif piece == _END:
            spans.append((begins.pop(), len(out)))
        else:
            out += piece
    return out, spans
