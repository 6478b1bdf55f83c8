"""pyarrow, or one line that says how to get it. Typed as `Any`: it comes without types."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .._optional import require

require("pyarrow", "treepack.offline", "cli")
pa: Any = import_module("pyarrow")
pq: Any = import_module("pyarrow.parquet")
