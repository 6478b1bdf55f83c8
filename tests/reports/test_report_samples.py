"""From the picture back to the data, in a real browser: the samples of a bar, their sums and text, and the search."""

import numpy as np
import pytest
from report_browser import SMALL, pixel, place, small, theme
from report_naive import large_batch

import treepack

pytest.importorskip("jinja2", reason="jinja2 is not installed: it comes with treepack[cli]")
EVIL = "</script><img src=x onerror=alert(1)><b>"
#: Lines of a file and groups of the three samples of SMALL.
SAID = [{"line": 7, "group_id": "sums"}, {"line": 8, "group_id": "sums"}, {"line": 11, "group_id": "odd"}]
SIZES = [(1280, 1000), (390, 844)]


class Letters:
    """A tokenizer of one letter for each id."""

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def click(page, depth, row):
    x, y = place(page, depth, row)
    page.click("#icicle", position={"x": x, "y": y})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])
def test_a_bar_leads_to_its_samples(open_report, size, scheme):
    page = open_report(treepack.report(small(), samples=SAID, tokenizer=Letters()), color_scheme=scheme)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    x, y = place(page, 7, 0.2)
    page.hover("#icicle", position={"x": x, "y": y})
    assert page.inner_text("#tip").endswith("line 7 · line 8 · line 11\ngroup_id sums, odd\nadvantage 1, 0")
    click(page, 9, 1.2)  # B: the second and the third sample from depth 8 on
    assert page.inner_text("#detail h3") == "Segment 2"
    # B, C and D: 10 of 24 positions; alone 6 and 8 tokens of 44; 4 + 4 + 4 of 18 terms; they save 4 of 20.
    assert page.inner_text("#detail .sums") == (
        "With all below it: 10 packed tokens (41.7 % of the tree) · 14 tokens of the samples alone (31.8 %) · "
        "4 saved (20.0 % of what the tree saves) · 12 loss terms (66.7 %)"
    )
    cells = page.locator("#detail table tr").all_inner_texts()
    assert [row.split("\t") for row in cells] == [
        ["line", "sample", "group_id", "advantage", "length", "terms", "turns"],
        ["8", "1", "sums", "1", "14", "4", "1"],
        ["11", "2", "odd", "0", "16", "8", "1"],
    ]
    assert page.inner_text("#detail .text") == "efgh"  # 30 to 33
    assert page.locator("#detail mark").all_inner_texts() == ["efgh"]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    background = page.evaluate("getComputedStyle(document.querySelector('#detail mark')).backgroundColor")
    red, green, blue = (int(theme(page, "trained-0")[i : i + 2], 16) for i in (1, 3, 5))
    assert background == f"rgb({red}, {green}, {blue})"


@pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])
def test_search(open_report, size):
    page = open_report(treepack.report(small(), samples=SAID))
    page.set_viewport_size({"width": size[0], "height": size[1]})

    def found(query):
        page.fill("#query", query)
        page.keyboard.press("Enter")
        return page.inner_text("#found")

    # The third sample passes through the prompt, B and D: 16 of 24 positions, 8 of 18 terms.
    text = "1 sample found, at 1. Here 1 sample: 16 packed tokens (66.7 % of the tree) · 8 loss terms (44.4 %)."
    assert found("11") == text
    assert page.inner_text("#status") == "Shown: depth 12 to 15 of 1 sample, in 1 bar."
    assert page.inner_text("#detail h3") == "Segment 4"
    assert found("odd") == found("group=odd") == found("advantage<=0.5") == found("terms>6") == text
    assert found("group=sums").startswith("2 samples found, at 1.")
    assert page.inner_text("#detail h3") == "Segment 1"
    page.click("#next")
    assert page.inner_text("#detail h3") == "Segment 3"
    page.click("#previous")
    assert page.inner_text("#detail h3") == "Segment 1"
    assert found("12") == "0 samples found."
    assert found("colour=red").startswith('No column begins with "colour"; there are sample, length')
    assert found("line>x") == '"x" is no number; line> needs one.'
    page.click("#whole")
    page.fill("#query", "8")  # what is found is marked at the right edge, as one types
    page.get_by_text("1 sample found. Here 1 sample:").wait_for()
    _, y = place(page, 0, 1.5)
    x = page.locator("#icicle").bounding_box()["width"] - 5
    assert pixel(page, "icicle", x, y) == theme(page, "focus")
    assert pixel(page, "icicle", x, place(page, 0, 0.5)[1]) == "#000000"
    page.fill("#query", "")
    page.locator("#found:empty").wait_for(state="attached")


def test_keys_lead_to_samples_too(open_report):
    page = open_report(treepack.report(small(), samples=SAID))
    page.focus("#query")
    page.keyboard.type("line=8")
    page.keyboard.press("Enter")
    assert page.inner_text("#detail h3") == "Segment 3"
    for _ in range(5):  # the two buttons of the search, the two of the zoom, the picture
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "icicle"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#detail h3") == "Segment 1"
    assert "line 7" in page.inner_text("#spoken")
    page.keyboard.press("Tab")  # the table can be scrolled by keys
    assert page.evaluate("document.activeElement.className") == "scroll"


def test_trees_by_what_they_save(open_report):
    alike = [{"input_ids": [1, 2, 3, 4, 5, 6, i]} for i in range(10, 14)]
    trees = [*treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=9), *treepack.pack(alike, max_tokens=12)]
    page = open_report(treepack.report(trees))
    page.select_option("#sort", "saved")
    page.wait_for_selector("html[data-shown='1']")
    assert page.locator("#tree option").all_inner_texts() == [
        "1: 4 samples, 10 tokens, 18 saved",
        "0: 1 sample, 3 tokens, 0 saved",
    ]
    page.fill("#query", "length=3")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-shown='0']")
    assert page.inner_text("#found").startswith("1 sample found in 1 tree, at 1.")
    page.select_option("#sort", "order")
    page.wait_for_selector("html[data-shown='0']")
    assert page.locator("#tree option").nth(0).inner_text().startswith("0: 1 sample")


def test_values_and_text_stay_text(open_report):
    class Evil:
        def decode(self, ids):
            return EVIL

    samples = [{"line": EVIL, EVIL: EVIL}, {}, {}]
    page = open_report(treepack.report(small(), samples=samples, tokenizer=Evil()))
    click(page, 9, 0.2)
    assert EVIL in page.inner_text("#detail table")
    assert page.inner_text("#detail .text") == EVIL
    page.fill("#query", "onerror")
    page.keyboard.press("Enter")
    assert page.inner_text("#found").startswith("1 sample found")
    assert page.locator("img, b").count() == 0


def test_long_texts_are_cut(open_report):
    ids = np.arange(1000) % 26
    report = treepack.report(treepack.pack([{"input_ids": ids}], max_tokens=1000), tokenizer=Letters())
    page = open_report(report)
    page.focus("#next")
    page.keyboard.press("Tab")
    text = page.inner_text("#detail .text")
    assert text.startswith("abcdefghijklmnopqrstuvwxyz")
    assert text.endswith(Letters().decode(ids[-40:]))
    assert " ... 800 more tokens ... " in text
    assert page.locator("#detail mark").nth(0).inner_text().startswith("bcd")  # the first token is never trained


def test_a_large_tree(open_report):
    """100,000 samples with a line and a group each: a search among them, and a jump to one."""
    packed = treepack.pack(large_batch(), max_tokens=10**7)
    said = [{"line": i + 1, "group_id": i // 8} for i in range(100_000)]
    report = treepack.report(packed, samples=said)
    assert len(report.html) < 3_000_000
    page = open_report(report)
    page.fill("#query", "line=77777")
    page.keyboard.press("Enter")
    assert page.inner_text("#found").startswith("1 sample found, at 1. Here 1 sample: ")
    page.fill("#query", "group_id=9722")
    page.keyboard.press("Enter")
    assert page.inner_text("#found").startswith("8 samples found, at 1.")
    assert "9722" in page.inner_text("#detail table")


def test_a_tokenizer_that_is_none_or_wrong():
    with pytest.raises(treepack.PackError, match=r"tokenizer is a str; needed is an object with decode\(ids\)"):
        treepack.report(small(), tokenizer="models/qwen")

    class Wrong:
        def decode(self, ids):
            raise OverflowError("out of range")

    with pytest.raises(treepack.PackError, match=r"cannot decode positions 0 to 7, ids .* out of range; give the"):
        treepack.report(treepack.pack(SMALL, max_tokens=32), tokenizer=Wrong())
