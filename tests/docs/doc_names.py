"""The public names of the package, read and not imported."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "treepack"
# Whole modules: their `__all__` is what is public.
MODULES = [
    "distributed",
    "integrations.areal",
    "integrations.collator",
    "integrations.transformers",
    "integrations.trl",
    "integrations.verl",
    "offline",
    "readers",
    "synthetic",
    "testing",
]


def public(module):
    """`__all__` of a module, read and not imported: some need what is not installed."""
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no __all__")
