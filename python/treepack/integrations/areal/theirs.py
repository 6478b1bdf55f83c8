"""What is used of AReaL, looked up once, where it is a version that is known."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["KNOWN_VERSIONS", "Areal", "areal"]

#: Versions of AReaL that the tests have run against.
KNOWN_VERSIONS = ("1.0.4",)

_TREE = "areal.models.tree_attn.tree"
_NAMES = ("data", "mb_spec", "pad_to_maximum", "dp_group", "parallel_size")


class Areal:
    """The modules, classes and functions. ImportError without AReaL of a known version."""

    def __init__(self) -> None:
        known = ", ".join(KNOWN_VERSIONS)
        try:
            self.tree: Any = importlib.import_module(_TREE)
            self.block_size: int = importlib.import_module("areal.models.tree_attn.constants").BLOCK_SIZE
            self.MicroBatchList: Any = importlib.import_module("areal.utils.data").MicroBatchList
            self.stats_tracker: Any = importlib.import_module("areal.utils.stats_tracker")
            self.trace_scope: Any = importlib.import_module("areal.utils.perf_tracer").trace_scope
            self.logger: Any = importlib.import_module("areal.utils.logging").getLogger("TreeAttentionCore")
            self.build_packed_tree_batch: Callable[..., Any] = self.tree.build_packed_tree_batch
            names = tuple(inspect.signature(self.build_packed_tree_batch).parameters)
        except (ImportError, AttributeError) as error:
            kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
            raise kind(f"this needs areal, known to work: {known} ({error})") from error
        if names != _NAMES:
            raise ImportError(f"build_packed_tree_batch of this areal takes {names}; known to work: areal {known}")


_found: Areal | None = None


def areal() -> Areal:
    """The one `Areal`; ImportError without AReaL of a known version."""
    global _found
    if _found is None:
        _found = Areal()
    return _found
