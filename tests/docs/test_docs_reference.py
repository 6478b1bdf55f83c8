"""Every public name has its place in docs/reference/; the site that is built from it loads nothing from elsewhere."""

import ast
import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import treepack

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
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


def sections():
    """{identifier: the members that are named, or None for all} of the `:::` blocks."""
    found = {}
    for page in REFERENCE.glob("*.md"):
        for block in re.split(r"^::: ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            members = re.search(r"members: \[(.*)\]", block)
            found[block.split()[0]] = members and [name.strip() for name in members[1].split(",")]
    return found


def public(module):
    """`__all__` of a module, read and not imported: some need what is not installed."""
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no __all__")


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


class Loads(HTMLParser):
    """What a browser loads with a page; links to follow are not among it."""

    def __init__(self):
        super().__init__()
        self.urls = []

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "audio", "video", "embed"):
            self.urls += [names[x] for x in ("src", "srcset") if names.get(x)]
        if tag == "link" and names.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.urls.append(names.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs mkdocs, mkdocs-material and mkdocstrings (make docs)")
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs mkdocstrings[python] (make docs)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.urls
        assert not [url for url in loads.urls if re.match(r"(\w+:)?//", url)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.parametrize("width", [1000, 390])
def test_tables_fit_their_page(site, browser, width):
    """Nothing sticks out of a page; at 1,000 px no table has to be scrolled."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    wide = "[...document.querySelectorAll('.md-typeset__scrollwrap')].filter((x) => x.scrollWidth > x.clientWidth + 1)"
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path.name
        found = page.evaluate(f"{wide}.map((x) => x.innerText.slice(0, 40))")
        assert width < 1000 or found == [], path.name
    context.close()


def test_the_site_has_the_reference(site):
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    names = [f"treepack.{name}" for name in treepack.__all__]
    names += [f"treepack.{module}.{name}" for module in MODULES for name in public(module)]
    assert [name for name in names if f'id="{name}"' not in pages] == []
    assert "&gt;&gt;&gt;" in pages
    assert "<blockquote>" not in pages


def test_comments_for_tests_stay_out_of_the_site(site):
    for page in site.rglob("*.html"):
        assert "invisible-code" not in page.read_text(encoding="utf-8"), page
