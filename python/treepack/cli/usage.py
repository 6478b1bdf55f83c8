"""A wrong command line -> what is wrong with it, in words of our own; and what `--help` says at its end."""

from __future__ import annotations

from typing import Any

from .._pages import page

_CODES = (
    "Exit codes: 0 all well; 1 the self-test of doctor fails; 2 something to put right, said in one line on stderr; "
    "130 interrupted; 141 whoever reads the output has closed it."
)


def epilog(*examples: str, at: str = "cli") -> str:
    """The end of a help text: examples, exit codes, the address of the page."""
    shown = "\n\n".join(f"  {example}" for example in examples)
    return f"Examples:\n\n{shown}\n\n{_CODES}\n\nMore: {page(at)}"


def usage_line(error: Any) -> str:
    """One line for an error of the parser of options: which, what it has, what is allowed."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "treepack"
    kind = type(error).__name__
    if kind == "NoSuchOption":
        near = sorted(error.possibilities or ())
        meant = f"did you mean {' or '.join(near)}?" if near else f"`{command} --help` lists them"
        return f"{command} has no option {error.option_name}; {meant}"
    if kind == "MissingParameter" and error.param is not None:
        name = error.param.opts[0] if error.param.opts[0].startswith("-") else error.param.name.upper()
        return f"{command} needs {name}: {error.param.help or 'see --help'}"
    if kind == "BadParameter" and error.param is not None:
        name = next((name for name in error.param.opts if name.startswith("--")), error.param.name.upper())
        said = str(error.message).removeprefix("Value error, ")
        return f"{name} {said}"
    return str(error.format_message())
