"""Importing this makes `treepack.attention` importable from the checkout where the native
extension is not built.

The GPU scripts need no packer: they run from a bare copy of the sources. An installed treepack is used as it is.
"""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))
try:
    import treepack  # noqa: F401
except ImportError:
    package = types.ModuleType("treepack")
    package.__path__ = [str(ROOT / "python" / "treepack")]
    sys.modules["treepack"] = package
    for name in [name for name in sys.modules if name.startswith("treepack.")]:  # what a failed import left behind
        del sys.modules[name]
