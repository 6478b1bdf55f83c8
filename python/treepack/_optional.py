"""Packages that one can do without: what is not there is said with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["MissingPackage", "require"]


class MissingPackage(ModuleNotFoundError):
    """A package that is not installed; the message has the command that installs it."""


def require(module: str, what: str, extra: str | None = None) -> None:
    """Raises MissingPackage where a module is not installed.

    Args:
        module: the module. what: what needs it, the start of the message.
        extra: the extra of treepack that brings it; None: it is installed by its own name.
    """
    if find_spec(module) is None:
        package = module if extra is None else f"'treepack[{extra}]'"
        raise MissingPackage(f"{what} needs {module}: pip install {package}", name=module)
