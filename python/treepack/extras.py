"""What is not there, said with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require_torch"]


def require_torch(what: str) -> None:
    """Raises ModuleNotFoundError that names `what` and the extra, where torch is not installed."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError(f"{what} needs torch: pip install 'treepack[torch]'", name="torch")
