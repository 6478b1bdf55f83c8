"""Checks of a packed result, for a test suite or a doubtful run: against its samples, and through a model.

Nothing here is loaded by `import treepack`; `check_parity` needs torch and a model.
"""

from typing import TYPE_CHECKING, Any

from .packed import check_packed, sample_paths
from .samples import as_samples

if TYPE_CHECKING:
    from .parity import Parity, check_parity

__all__ = ["Parity", "as_samples", "check_packed", "check_parity", "sample_paths"]


def __getattr__(name: str) -> Any:
    # Needs torch and a model: loaded when it is first used.
    if name in ("Parity", "check_parity"):
        from .parity import Parity, check_parity

        return Parity if name == "Parity" else check_parity
    raise AttributeError(f"module 'treepack.testing' has no attribute {name!r}")
