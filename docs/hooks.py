"""What mkdocs needs beyond its settings: files outside of docs/ that the pages link to become pages of the site.

A link such as `../benches/README.md` is right in the repository and leads out of the site. Every file that is linked
this way is shown under `repository/`: Markdown as a page, anything else as a block of code. Comments that are meant
for the tests of the pages alone (`tests/docs/doc_blocks.py`) are left out of the site. In tables, names may break after
an underscore and the like, so that a table fits a phone without breaking a word.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "repository"
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "benches/README.md")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
COMMENT = re.compile(r"^<!-- (?:skip|invisible-code).*?-->\n?", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
JOINT = re.compile(r"(?<=\w)([_./,=(\[]|::)(?=\w)|(?<=\w)(?=\[\])")
# What the search lists first: pages that answer a task, then the others, last those about the project.
BOOST = {"reference/": 0.5, "repository/": 0.3, "kernel-log": 0.3, "house": 0.3, "releasing": 0.5}
TASKS = ("Start", "Train")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".rs": "rust"}


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked, and what that links to in turn."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting = [*ALWAYS, *(target for page in pages for target in outside(page))]
    while waiting:
        path = waiting.pop()
        uri = page_of(path)
        if uri in files.src_uris:
            continue
        files.append(File.generated(config, uri, content=content_of(path)))
        if path.endswith(".md"):
            waiting.extend(outside(path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them, no comments for tests, and the page's weight in the search."""
    here = page.file.src_uri
    weights = [weight for name, weight in BOOST.items() if here.startswith(name)]
    task = any(section.title in TASKS for section in page.ancestors)
    page.meta["search"] = {"boost": weights[0] if weights else 3.0 if task else 1.0}
    source = source_of(here)
    return LINK.sub(lambda found: link(found, source, here), COMMENT.sub("", markdown))


def on_post_page(output: str, **_: Any) -> str:
    """Names in tables with places to break. Of the page when it is done: the search index has the names whole."""
    return TABLE.sub(lambda table: CODE.sub(lambda name: JOINT.sub(r"\1<wbr>", name[0]), table[0]), output)


def link(found: re.Match[str], source: str, here: str) -> str:
    target = normal(source, found[1])
    if not (ROOT / target).is_file():
        return found[0]  # mkdocs says what is wrong with it
    uri = target.removeprefix("docs/") if target.startswith("docs/") else page_of(target)
    return f"]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{found[2] or ''})"


def outside(page: str) -> list[str]:
    """The files outside of docs/ that a file of the repository links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [normal(page, found[1]) for found in LINK.finditer(text)]
    return [x for x in targets if not x.startswith("docs/") and (ROOT / x).is_file()]


def normal(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def page_of(path: str) -> str:
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def source_of(uri: str) -> str:
    return uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"


def content_of(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n````\n"
