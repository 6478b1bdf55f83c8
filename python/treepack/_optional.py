"""What is not there, said with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require"]


def require(module: str, what: str, extra: str) -> None:
    """Raises ModuleNotFoundError that names `what` and the extra, where a module is not installed."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"{what} needs {module}: pip install 'treepack[{extra}]'", name=module)
