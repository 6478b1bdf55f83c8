"""Links read as words: their text is the title of a page or a phrase, neither a path nor a word that only points."""

import re

import pytest
from doc_blocks import PAGES, ROOT

LINK = re.compile(r"(?<!!)\[([^]]*)\]\(([^)]*)\)")
CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.DOTALL | re.MULTILINE)
PATH = re.compile(r"[\w.-]+/[\w./-]+|[\w./-]+\.(md|py|html|toml|txt|yml|rs|css)")
POINTS = {"here", "this", "that", "there", "link", "above", "below", "see", "more", "what", "which", "page", "pages"}
POINTS |= {"their", "its", "own", "measured", "table", "the", "a", "on", "in", "it"}


def wrong(text):
    """What is wrong with the text of a link, or ''."""
    words = text.replace("`", "").replace("\n", " ").strip()
    if PATH.fullmatch(words):
        return "is a path"
    if POINTS.issuperset(words.lower().split()):
        return "only points"
    return ""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_read_as_words(path):
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    found = {shown: wrong(shown) for shown, _ in LINK.findall(text)}
    assert {shown: why for shown, why in found.items() if why} == {}


@pytest.mark.parametrize(
    "text", ["rows.md", "docs/rows.md", "`examples/grpo.py`", "here", "the table", "its own page", ""]
)
def test_what_is_no_text_of_a_link(text):
    assert wrong(text)


@pytest.mark.parametrize("text", ["Rows in, log-probs back", "TRL", "`treepack.recurrent`", "When does packing help?"])
def test_what_is(text):
    assert not wrong(text)
