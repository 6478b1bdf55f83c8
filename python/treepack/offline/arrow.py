"""pyarrow, or one line that says how to get it. Held as `Any`: it comes without types."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _need(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "treepack.offline needs pyarrow: pip install 'treepack[cli]'", name=error.name
        ) from None


pa: Any = _need("pyarrow")
pq: Any = _need("pyarrow.parquet")
