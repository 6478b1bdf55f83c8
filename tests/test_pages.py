"""What messages call a page: its address where the package's metadata leads to one, else the file."""

from email.message import Message
from pathlib import Path

import pytest

from treepack import _pages

ROOT = Path(__file__).resolve().parents[1]


def metadata(*urls):
    found = Message()
    found["Version"] = "0.2.0"
    for url in urls:
        found["Project-URL"] = url
    return lambda name: found


def test_by_address(monkeypatch):
    urls = ("Repository, https://example.org/code", "Documentation, https://example.org/docs/")
    monkeypatch.setattr(_pages, "metadata", metadata(*urls))
    assert _pages.page("cli") == "https://example.org/docs/cli.html"
    assert _pages.page("kernel", "tiles") == "https://example.org/docs/kernel.html#tiles"


def test_without_a_site(monkeypatch):
    """The file of this version, where the repository shows it."""
    monkeypatch.setattr(_pages, "metadata", metadata("Repository, https://example.org/code/"))
    assert _pages.page("cli") == "https://example.org/code/blob/v0.2.0/docs/cli.md"
    assert _pages.page("cli", "exit-codes") == "https://example.org/code/blob/v0.2.0/docs/cli.md#exit-codes"


def test_without_an_address(monkeypatch):
    monkeypatch.setattr(_pages, "metadata", metadata())
    assert _pages.page("cli", "x") == "docs/cli.md in treepack's repository"

    def missing(name):
        raise _pages.PackageNotFoundError(name)

    monkeypatch.setattr(_pages, "metadata", missing)
    assert _pages.page("cli") == "docs/cli.md in treepack's repository"


def named():
    """The pages, and parts of them, that the package names."""
    import re

    for path in sorted((ROOT / "python" / "treepack").rglob("*.py")):
        for name, part in re.findall(r"\bpage\(['\"]([\w-]+)['\"](?:, ['\"]([\w-]+)['\"])?\)", path.read_text()):
            if path.name != "_pages.py":
                yield pytest.param(name, part, id=f"{path.name}-{name}")


@pytest.mark.parametrize(("name", "part"), list(named()))
def test_every_page_that_is_named_is_there(name, part):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    heads = {line.strip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("## ")}
    assert not part or part in heads


def test_no_message_names_a_path():
    """In a string that is no docstring, a page goes by `page()`."""
    import ast

    for path in sorted((ROOT / "python" / "treepack").rglob("*.py")):
        if path.name == "_pages.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                assert "docs/" not in node.value, f"{path.name}:{node.lineno}"
