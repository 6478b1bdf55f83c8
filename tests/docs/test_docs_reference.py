"""Every public name has its place in docs/reference/."""

import importlib
import re

import pytest
from doc_names import MODULES, PACKAGE, ROOT, public

import treepack

REFERENCE = ROOT / "docs" / "reference"


def sections():
    """{identifier: the members that are named, or None for all} of the `:::` blocks."""
    found = {}
    for page in REFERENCE.glob("*.md"):
        for block in re.split(r"^::: ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            members = re.search(r"members: \[(.*)\]", block)
            found[block.split()[0]] = members and [name.strip() for name in members[1].split(",")]
    return found


def test_what_becomes_of_docstrings(monkeypatch):
    pytest.importorskip("griffe", reason="needs mkdocstrings[python] (make docs)")
    monkeypatch.syspath_prepend(ROOT / "docs")
    docstrings = importlib.import_module("docstrings")
    assert docstrings.listed("One of\n- a\n- b") == "One of\n\n- a\n- b"
    assert (
        docstrings.fenced("One.\n\n  >>> 1 + 1\n  2\n\nTwo.") == "One.\n\n  ```pycon\n  >>> 1 + 1\n  2\n  ```\n\nTwo."
    )


def test_every_name_of_the_package():
    assert {f"treepack.{name}" for name in treepack.__all__} <= set(sections())


@pytest.mark.parametrize("module", MODULES)
def test_every_public_module(module):
    assert sections().get(f"treepack.{module}", "absent") is None
    assert public(module)


@pytest.mark.parametrize("module", ["attention", "logprobs"])
def test_public_names_of_modules_in_part(module):
    listed = sections()
    members = {f"treepack.{module}.{name}" for name in listed[f"treepack.{module}"]}
    missing = {f"treepack.{module}.{name}" for name in public(module)} - members
    assert {name.replace(f".{module}.", ".") for name in missing} <= set(listed)


def test_integrations_are_all_there():
    """A new integration with public names does not stay out of the reference: those that others import alone may."""
    inner = {"__init__", "__pycache__", "models"}
    assert {path.stem for path in (PACKAGE / "integrations").iterdir()} - inner == {
        module.split(".")[1] for module in MODULES if module.startswith("integrations.")
    }
