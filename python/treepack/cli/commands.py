"""The commands in one place, and the one place where an error becomes a line on stderr."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer

from .._optional import MissingPackage
from .._version import __version__
from ..errors import PackError, PackTypeError
from ..readers import ReadError, ReadWarning
from .doctor_command import doctor
from .inspect_command import inspect
from .pack_command import pack
from .terminal import printable
from .usage import epilog, usage_line

app = typer.Typer(
    name="treepack",
    help="Pack RL rollouts that share prefixes into prefix trees.",
    pretty_exceptions_enable=False,
)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says one line when it is stopped by Ctrl-C."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            raise typer.Exit(_say("interrupted; no file is left half-written", 130)) from None

    return run


_INSPECT = epilog(
    "treepack inspect rollouts.jsonl --max-tokens 16k",
    "treepack inspect rollouts.parquet --max-tokens 8k,16k,32k",
    "treepack inspect 'shards/*.jsonl' --html report.html --tokenizer models/qwen",
)
_PACK = epilog(
    "treepack pack rollouts.parquet --out packed --max-tokens 16k",
    "treepack pack preferences.jsonl --out packed --pairs",
    "treepack pack rollouts.parquet --out packed --max-tokens 16k --resume",
    at="offline",
)
app.command(epilog=_INSPECT)(_interruptible(inspect))
app.command(epilog=_PACK)(_interruptible(pack))
app.command(epilog=epilog("treepack doctor", "treepack doctor --impl triton"))(_interruptible(doctor))

#: What a user can put right. Everything else is a bug, and a bug shows its traceback.
_EXPECTED = (PackError, PackTypeError, ReadError, typer.TyperException, ModuleNotFoundError, OSError, MemoryError)
#: What a shell reports for a program that SIGPIPE ended.
_CLOSED = 141


def _version(value: bool) -> None:
    if value:
        print(f"treepack {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; never raises for what a user can put right."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name with letters that the terminal lacks is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_as_lines():
            code = app(args=list(arguments) or ["--help"], prog_name="treepack", standalone_mode=False)
        if sys.stdout is not None:  # None where the caller has closed it
            sys.stdout.flush()
        return int(code or 0)
    except (BrokenPipeError, SystemExit):  # the reader of our output has seen enough; typer and rich exit on that
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    except _EXPECTED as error:
        return _say(_line(error), 2)
    except KeyboardInterrupt:  # outside of any command
        return _say("interrupted", 130)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """What a reader warns of, as lines on stderr like any other message."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", ReadWarning)
        show = warnings.showwarning

        def say(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, ReadWarning):
                _say(f"warning: {message}", 0)
            else:
                show(message, category, *place, **more)

        warnings.showwarning = say
        yield


def _line(error: BaseException) -> str:
    if isinstance(error, typer.TyperException):
        return usage_line(error)
    if isinstance(error, MemoryError):
        return "out of memory; a smaller --window needs less"
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, MissingPackage):
        return f"{error}; pip install 'treepack[cli]' brings what the command line needs"
    if isinstance(error, OSError):
        return f"{error.filename or 'reading or writing failed'}: {error.strerror or error}"
    return str(error)


def _say(message: str, code: int) -> int:
    print("treepack:", printable(message), file=sys.stderr)
    return code
