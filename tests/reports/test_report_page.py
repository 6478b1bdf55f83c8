"""The page of a report as text: self-contained, safe, bounded, written all or nothing. What it looks like is
test_report_browser.py."""

import json
import os
import re
import subprocess
import sys
import zlib
from base64 import b64decode, b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers import says
from report_naive import large_batch

import treepack
from treepack import reports, synthetic
from treepack.reports import drawn, page

pytest.importorskip("jinja2", reason="jinja2 is not installed: it comes with treepack[cli]")
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&<!--\u2028"


class Page(HTMLParser):
    """Tags with their attributes, text by element id, and the text of scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.raw, self.stack = [], {}, [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.stack.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if not self.stack:
            return
        tag, name = self.stack[-1]
        if name:
            self.text[name] = self.text.get(name, "") + data
        if tag in ("script", "style", "h1"):
            self.raw.append((tag, data))

    @property
    def data(self):
        return json.loads(zlib.decompress(b64decode(self.text["data"])))


@pytest.fixture(scope="module")
def packed():
    return treepack.pack(synthetic.agent(prompt=60, answers=4, answer=30), max_tokens=128)


def test_both_ways_to_call_it(packed):
    assert treepack.report is reports.report
    html = treepack.report(packed).html
    assert html == treepack.report(packed).html  # the same bytes, however often
    alike = [Page(treepack.report(each).html).data for each in (packed, list(packed))]
    assert alike[0] == alike[1]
    assert html.startswith("<!doctype html>")
    assert "What was packed" in html


def test_importing_treepack_loads_none_of_it():
    check = (
        "import sys, treepack; sys.exit(any(name.startswith(('jinja2', 'treepack.reports')) for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_numbers(packed):
    read = Page(treepack.report(packed).html)
    stats = packed.stats
    shown = {name: read.text[name] for name in ("samples", "raw-tokens", "packed-tokens", "trees", "terms")}
    assert shown == {
        "samples": f"{stats.samples:,}",
        "raw-tokens": f"{stats.raw_tokens:,}",
        "packed-tokens": f"{stats.packed_tokens:,}",
        "trees": f"{stats.trees:,}",
        "terms": f"{stats.terms:,}",
    }
    assert read.text["ratio"] == f"{stats.packing_ratio:.2f} x"
    saved = 1 - stats.attention_pairs / stats.attention_pairs_alone
    assert read.text["saved"] == f"{100 * saved:.1f} %"
    fill = stats.packed_tokens / stats.trees / max(tree.num_tokens for tree in packed)
    assert read.text["fill"] == f"{100 * fill:.1f} %"
    trees = read.data["trees"]
    assert len(trees) == stats.trees > 1
    for field, total in (
        ("tokens", "packed_tokens"),
        ("alone", "raw_tokens"),
        ("terms", "terms"),
        ("samples", "samples"),
    ):
        assert sum(tree[field] for tree in trees) == getattr(stats, total)
    assert sum(tree["pairs"] for tree in trees) == stats.attention_pairs
    assert [tree["columns"] for tree in trees] == [["advantage", "group_id", "old_log_probs"]] * stats.trees


def test_nothing_is_loaded_from_anywhere(packed):
    html = treepack.report(packed, title="a title").html
    read = Page(html)
    links = [
        (tag, name, value)
        for tag, attributes in read.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset")
    ]
    assert links == [("link", "href", "data:,")]
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(|sendBeacon", html)
    assert set(re.findall(r"https?://[^\"'\s]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on") or name == "style"]


def test_the_policy_names_the_style_and_the_script(packed):
    html = treepack.report(packed).html
    policy = unescape(re.search(r'Content-Security-Policy"\s+content="([^"]*)"', html)[1])
    assert policy.startswith("default-src 'none'; ")
    for kind, found in (("style", "<style>(.*?)</style>"), ("script", "<script>(.*?)</script>")):
        (text,) = re.findall(found, html, re.DOTALL)
        assert f"{kind}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
        assert "<!--" not in text


def test_what_users_name_stays_text():
    samples = [{"input_ids": [1, 2, 3], EVIL: 1.0}, {"input_ids": [1, 2, 4], EVIL: 2.0}]
    plain = Page(treepack.report(treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=8), title="plain").html)
    html = treepack.report(treepack.pack(samples, max_tokens=8), title=EVIL).html
    read = Page(html)
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in plain.tags]
    assert ("h1", EVIL) in read.raw
    assert read.data["trees"][0]["columns"] == [EVIL]
    assert "</script><script>document" not in html


def test_long_names_are_cut():
    samples = [{"input_ids": [1, 2], **{f"{i:02}{'x' * 5000}": 1.0 for i in range(60)}}]
    report = treepack.report(treepack.pack(samples, max_tokens=8), title="t" * 10**6)
    tree = Page(report.html).data["trees"][0]
    assert [len(name) for name in tree["columns"]] == [drawn.NAME] * drawn.COLUMNS
    assert tree["more_columns"] == 20
    assert len(report.html) < 100_000


def test_a_large_tree_stays_small():
    packed = treepack.pack(large_batch(), max_tokens=10**7)
    assert len(packed) == 1
    assert len(packed[0].segment_parent) > 10**5
    html = treepack.report(packed).html
    assert len(html.encode()) < page.PAGE_BYTES
    bars = Page(html).data["trees"][0]["bars"]
    assert page.SEGMENTS <= len(bars["parent"]) <= 3 * page.SEGMENTS + 1
    assert sum(bars["tokens"]) == packed.stats.packed_tokens


def test_the_worst_page_stays_small():
    """Everything at its limit at once: many trees, all bushy, a mask that changes with each token, noisy pictures."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2, (60_000, 40))
    mask = rng.integers(0, 2, ids.shape).astype(np.uint8)
    batch = {"input_ids": ids.reshape(-1), "completion_mask": mask.reshape(-1)}
    batch["cu_seqlens"] = np.arange(len(ids) + 1) * ids.shape[1]
    packed = treepack.pack(batch, max_tokens=40_000)
    assert len(packed) > page.TREES
    assert sum(len(tree.segment_parent) for tree in packed[: page.TREES]) > page.SEGMENTS
    html = treepack.report(packed).html
    assert len(html.encode()) < page.PAGE_BYTES
    trees = Page(html).data["trees"]
    assert len(trees) == page.TREES
    assert f"The first {page.TREES} of {len(packed):,} trees are drawn" in html
    pictures = sum(len(tree[name]["png"]) for tree in trees for name in ("mask", "tiles"))
    assert pictures * 3 / 4 < drawn.PICTURE_BYTES + 2 * page.TREES
    assert sum(len(tree["bars"]["parent"]) for tree in trees) <= 3 * page.SEGMENTS + page.TREES


def test_shares():
    assert page._shares([5, 100, 1, 100], 60) == [5, 27, 1, 27]
    assert page._shares([1, 2], 60) == [1, 2]
    assert page._shares([9, 9, 9], 2) == [0, 1, 1]
    assert page._shares([], 60) == []


def test_nothing_to_draw():
    read = Page(treepack.report([]).html)
    assert read.text["trees"] == "0"
    assert "canvas" not in [tag for tag, _ in read.tags]


def test_dummies_and_skipped_samples():
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": list(range(20))}]
    html = treepack.report(treepack.pack(samples, max_tokens=8, ranks=2, overlong="skip")).html
    assert "1 skipped" in html
    assert [tree["samples"] for tree in Page(html).data["trees"]] == [1, 0]


def test_a_single_tree_and_one_on_a_device(packed):
    html = treepack.report(packed[0]).html
    assert treepack.report([packed[0]]).html == html
    pytest.importorskip("torch")
    assert treepack.report(packed[0].to("cpu")).html == html


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (7, ["an int", "pack() returns"]),
        ({"input_ids": [[1]]}, ["a dict", "pack() returns"]),
        ([{"input_ids": [1]}], ["item 0", "a dict", "pack the samples first"]),
        ("rollouts.jsonl", ["item 0", "a str"]),
    ],
)
def test_something_else(wrong, parts):
    with pytest.raises(treepack.PackError) as error:
        treepack.report(wrong)
    says(error, *parts)


def test_micro_batches_of_a_packer():
    packer = treepack.Packer(6)
    closed = [batch for ids in ([1, 2, 3], [1, 2, 4], [5, 6, 7]) for batch in packer.add({"input_ids": ids})]
    closed += packer.flush()
    assert len(closed) == 2
    trees = [tree for batch in closed for tree in batch]
    assert treepack.report(closed).html == treepack.report(trees).html
    with pytest.raises(treepack.PackError) as error:
        treepack.report([trees, [{"input_ids": [1]}]])
    says(error, "item 1 is a list", "pack the samples first")


def test_text_that_utf8_cannot_hold(tmp_path):
    """A file name that is not UTF-8 comes with lone surrogates."""
    packed = treepack.pack([{"input_ids": [1, 2]}], max_tokens=8)
    treepack.report(packed, title="\ud800 title").save(tmp_path / "x.html")
    assert "<h1>? title</h1>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_title_that_is_no_text(packed):
    with pytest.raises(treepack.PackError) as error:
        treepack.report(packed, title=3)
    says(error, "title", "int", "string")


def test_no_jinja2(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError) as error:
        treepack.report(packed)
    assert str(error.value) == "treepack.report needs jinja2: pip install 'treepack[cli]'"


def test_save(packed, tmp_path):
    report = treepack.report(packed, title="größer")
    target = tmp_path / "report.html"
    target.write_text("old")
    report.save(target)
    report.save(str(target))
    assert target.read_text(encoding="utf-8") == report.html
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_save_that_fails_leaves_what_was_there(packed, tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("old")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(page.Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        treepack.report(packed).save(target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_save_to_nowhere(packed, tmp_path):
    with pytest.raises(treepack.PackError) as error:
        treepack.report(packed).save(tmp_path / "missing" / "report.html")
    says(error, "missing/report.html", "No such file or directory", "name a file in a folder that is there")


def test_in_a_notebook(packed):
    report = treepack.report(packed, title=EVIL)
    frame = Page(report._repr_html_())
    ((tag, attributes),) = frame.tags
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == report.html
    assert repr(report) == f"Report({len(report.html.encode()):,} bytes of HTML; .save(path) writes them)"
