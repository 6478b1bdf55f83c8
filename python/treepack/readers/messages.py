"""Chat messages as files hold them -> as a template and a comparison want them. One clean-up for every entrance.

What differs between formats and says nothing goes: nulls that Arrow fills in, JSON as text where objects belong, tool
arguments as a JSON string, content in parts of text. What says which messages are trained (`weight`, `loss`, `train`)
is read and taken out. What cannot be meant is refused with the message and what it has. Nothing given is changed.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..errors import listed
from .source import ReadError, first_line, kind

Message = dict[str, Any]

#: The role whose messages are trained.
ASSISTANT = "assistant"
#: What says of one message whether it is trained.
_FLAGS = ("weight", "loss", "train")
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALLS = ("tool_calls", "function_call")
#: In a JSON schema, maps from names to schemas; and values that are no schemas, in which null is a value.
_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LITERALS = ("default", "const", "enum", "examples")
_NULL_MEANS = ("default", "const")


class Turns(NamedTuple):
    """A conversation: messages with nothing but what a template reads, and of each whether it is trained."""

    messages: list[Message]
    trained: list[bool]

    def as_context(self) -> Turns:
        """The same messages, none of them trained."""
        return Turns(self.messages, [False] * len(self.messages))

    def then(self, more: Turns) -> Turns:
        """These messages, and more after them."""
        return Turns(self.messages + more.messages, self.trained + more.trained)

    def starts_with(self, other: Turns) -> bool:
        """Whether the conversation begins with all messages of another one."""
        return self.messages[: len(other.messages)] == other.messages


class Arguments(dict[str, Any]):
    """Arguments of a tool call that were JSON text, which is kept for templates that print text."""

    text: str = ""


def clean_messages(value: Any, where: str, name: str = "messages") -> Turns:
    """A conversation. `where`: "FILE, line 3"; `name`: of its column.

    Raises ReadError for what is no list of messages with role and content, for content that is no text, and for flags
    that are neither 0 nor 1.
    """
    value = decoded(value)
    if not isinstance(value, list) or not value:
        has = "an empty list" if value == [] else kind(value)
        raise ReadError(f'{where}: {name} is {has}; a list of {{"role": ..., "content": ...}} is needed')
    turns = [_message(message, f"{where}: message {number}") for number, message in enumerate(value)]
    return Turns([message for message, _ in turns], [trained for _, trained in turns])


def clean_tools(value: Any, where: str, name: str = "tools") -> list[Any] | None:
    """The tools of a conversation; None where there are none. A tool may be JSON text, and so may be its parts."""
    value = decoded(value)
    if value is None or value == []:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ReadError(f"{where}: {name} is {kind(value)}; a list of tools, or JSON text of one, is needed")
    return [_tool(tool, f"{where}: {name}[{number}]") for number, tool in enumerate(value)]


def joined(prompt: Turns, side: Turns, where: str, name: str) -> Turns:
    """The messages of a side of a pair with those of its prompt in front, once. `name`: of the side's column.

    Raises ReadError for a side that neither starts with the prompt nor goes on from it.
    """
    if side.starts_with(prompt):
        rest = Turns(side.messages[len(prompt.messages) :], side.trained[len(prompt.messages) :])
        return prompt.as_context().then(rest)
    first = side.messages[0]
    if first in prompt.messages or first["role"] in ("system", "developer", prompt.messages[-1]["role"]):
        differs = next(
            (n for n, (a, b) in enumerate(zip(prompt.messages, side.messages, strict=False)) if a != b),
            len(side.messages),
        )
        raise ReadError(
            f"{where}: {name} starts with a message of role {first['role']!r}, and is not the prompt and more: they "
            f"differ at message {differs}; with the prompt in front the conversation would hold it twice. Allowed are "
            f"sides that start with all messages of the prompt, and sides that go on from it"
        )
    return prompt.as_context().then(side)


def decoded(value: Any) -> Any:
    """The object, list or null that a text is the JSON of; any other value as it is."""
    if isinstance(value, str) and (value.lstrip()[:1] in ("[", "{") or value.strip() == "null"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


# --- a message ------------------------------------------------------------------------------------------------------


def _message(value: Any, where: str) -> tuple[Message, bool]:
    value = decoded(value)
    if not isinstance(value, dict):
        raise ReadError(f"{where} has no role; it is {kind(value)}, needed are role and content")
    message = {name: item for name, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise ReadError(f"{where} has no role; it has {listed(message) or 'nothing'}, needed are role and content")
    for name in _CALLS:
        if name in message:
            message[name] = _calls(message[name], f"{where}: {name}")
    if not message.get("tool_calls", True):
        del message["tool_calls"]  # an empty list is no call, and templates look for the name
    if "content" in message:
        message["content"] = _content(message["content"], where)
    elif not any(name in message for name in _CALLS):
        raise ReadError(f"{where} has no content; it has {listed(message)}")
    return message, _trained(message, where)


def _trained(message: Message, where: str) -> bool:
    """Whether a message is trained; takes the flags out of it."""
    flags = {name: message.pop(name) for name in _FLAGS if name in message}
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ReadError(
                f"{where} has {name} {value!r}; allowed are 0 and false (not trained), 1 and true (trained): give a "
                "factor for the loss as a column of the sample"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise ReadError(f"{where} has {' and '.join(f'{n} {v!r}' for n, v in flags.items())}, which do not agree")
    role = message["role"]
    if role != ASSISTANT and any(flags.values()):
        name = next(iter(flags))
        raise ReadError(
            f"{where} of role {role!r} has {name} {flags[name]!r}; only messages of the role {ASSISTANT!r} are "
            f"trained: leave {name} out, or make it 0"
        )
    return role == ASSISTANT and all(flags.values())


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ReadError(f"{where} has content that is {kind(value)}; text, or a list of parts of text, is needed")
    return "".join(_part(part, f"{where}: part {number} of content") for number, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ReadError(f"{where} is {kind(part)}; text is needed")
    fields = {name: value for name, value in part.items() if value is not None}
    if fields.get("type", "text") not in _TEXT_PARTS:
        raise ReadError(f"{where} is of type {fields['type']!r}; only parts of text can be packed")
    if not isinstance(fields.get("text"), str):
        raise ReadError(f'{where} has {listed(fields) or "nothing"}; {{"type": "text", "text": ...}} is needed')
    return str(fields["text"])


# --- tool calls -----------------------------------------------------------------------------------------------------


def _calls(value: Any, where: str) -> Any:
    value = decoded(value)
    if isinstance(value, list):
        return [_call(call, f"{where}[{number}]") for number, call in enumerate(value)]
    return _call(value, where)


def _call(value: Any, where: str) -> dict[str, Any]:
    call = without_nulls(decoded(value))
    if not isinstance(call, dict):
        raise ReadError(f"{where} is {kind(value)}; an object with the name and the arguments of a tool is needed")
    if "function" in call:
        call["function"] = decoded(call["function"])
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    if isinstance(inner.get("arguments"), str):
        inner["arguments"] = _arguments(inner["arguments"], f"{where}: arguments")
    return call


def _arguments(text: str, where: str) -> Arguments:
    """Arguments that a server wrote as text. A null in it was written by the model and stays."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{where} is text that is no JSON ({first_line(error)}); an object is needed") from None
    if not isinstance(value, dict):
        raise ReadError(f"{where} is JSON text of {kind(value)}; an object is needed")
    arguments = Arguments(value)
    arguments.text = text
    return arguments


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of all tool calls as JSON text: as it was, or as `json.dumps` writes it."""
    return [_with_text(message) for message in messages]


def _with_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_text(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {name: _with_text(item) if name in (*_CALLS, "function") else item for name, item in value.items()}
    given = out.get("arguments")
    if isinstance(given, dict):
        out["arguments"] = getattr(given, "text", "") or json.dumps(given, ensure_ascii=False)
    return out


# --- nulls ----------------------------------------------------------------------------------------------------------


def without_nulls(value: Any) -> Any:
    """A copy without the keys of objects, at every depth, whose value is null. Items of lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _tool(value: Any, where: str) -> Any:
    value = decoded(value)
    if not isinstance(value, dict):
        raise ReadError(f"{where} is {kind(value)}; an object, or JSON text of one, is needed")
    return _schema({name: decoded(item) if name in _OBJECTS else item for name, item in value.items()})


#: Parts of a tool that are objects, whatever a file makes of them.
_OBJECTS = ("function", "parameters", "input_schema", "inputSchema", "return")


def _schema(value: Any) -> Any:
    """A copy without nulls, those of a schema's own `default`, `const`, `enum` and `examples` kept."""
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for name, item in value.items():
        if name in _OBJECTS:
            item = decoded(item)
        if name in _LITERALS:
            if item is not None or name in _NULL_MEANS:
                out[name] = item
        elif item is not None:
            named = name in _NAMES and isinstance(item, dict)
            out[name] = {key: _schema(sub) for key, sub in item.items() if sub is not None} if named else _schema(item)
    return out
