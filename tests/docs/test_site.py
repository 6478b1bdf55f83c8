"""The pages as a site: nothing loaded from elsewhere, tables that fit desk and phone, a search that finds the page."""

import functools
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from doc_names import MODULES, ROOT, public

import treepack


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


# What of a page does not fit: the page itself, and tables (Material puts each into a box that would scroll) whose
# words are whole. Blocks of code may scroll, and so they are no tables here.
TOO_WIDE = """() => {
  const found = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  for (const table of document.querySelectorAll(".md-content table:not(.highlighttable)")) {
    const box = table.closest(".md-typeset__scrollwrap"), name = table.innerText.slice(0, 60);
    if (!box) found.push("no box: " + name);
    else if (box.scrollWidth > box.clientWidth) found.push("too wide: " + name);
    for (const cell of table.querySelectorAll("th, td, code")) {
      const style = getComputedStyle(cell);
      if (style.overflowWrap === "anywhere" || style.wordBreak !== "normal") found.push("breaks words: " + name);
    }
  }
  return found;
}"""


WIDTHS = (1000, 390)


def test_tables_fit_their_page(site, browser):
    context = browser.new_context()
    page = context.new_page()
    tables = 0
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(TOO_WIDE) == [], (path.relative_to(site), width)
        tables += page.locator(".md-typeset__scrollwrap").count()
    assert tables > 40
    page.goto((site / "offline.html").as_uri())
    page.add_style_tag(content="td { white-space: nowrap; min-width: 200px !important }")
    assert page.evaluate(TOO_WIDE)  # the look sees what it looks for
    context.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


# What people type -> the page that answers it.
WORDS = {
    "install": "install",
    "pip install": "install",
    "quickstart": "index",
    "getting started": "index",
    "tutorial": "index",
    "is it worth it": "when-packing-helps",
    "speedup": "when-packing-helps",
    "how much faster": "when-packing-helps",
    "sequence packing": "when-packing-helps",
    "out of memory": "choose-a-budget",
    "OOM": "choose-a-budget",
    "max_tokens": "choose-a-budget",
    "batch size": "choose-a-budget",
    "custom training loop": "trainers",
    "huggingface trainer": "trainers",
    "openrlhf": "trainers",
    "trl": "migrating-trl",
    "GRPOTrainer": "migrating-trl",
    "grpo shared prompt": "migrating-trl",
    "verl": "migrating-verl",
    "areal": "migrating-areal",
    "megatron": "migrating-areal",
    "flash attention mask": "migrating-flexattention",
    "block mask": "migrating-flexattention",
    "multi gpu": "several-gpus",
    "DDP": "several-gpus",
    "FSDP": "several-gpus",
    "deepspeed": "several-gpus",
    "torchrun": "several-gpus",
    "dpo": "offline",
    "sft": "offline",
    "parquet": "offline",
    "preference pairs": "offline",
    "jsonl": "cli",
    "vllm": "cli",
    "chat template": "cli",
    "cu_seqlens": "rows",
    "log probs": "rows",
    "lora": "integrations",
    "torch.compile": "integrations",
    "gradient checkpointing": "integrations",
    "Blackwell": "kernel",
    "moe": "integrations",
    "mamba": "long-contexts",
    "long context": "long-contexts",
    "sliding window": "long-contexts",
    "position_ids": "reference/index",
    "loss mask": "trainers",
    "A100": "kernel",
    "changelog": "repository/CHANGELOG",
}
NOWHERE = "xylophone"

# Types each of the words into the search of the page, and reads the first three links once the answer is there.
SEARCH = """async ([all, nowhere]) => {
  const of = (name) => document.querySelector(".md-search" + name);
  const field = of("__input"), said = of("-result__meta"), list = of("-result__list");
  const until = (there) => new Promise((done) => {
    if (there()) return done();
    const watch = new MutationObserver(() => { if (there()) { watch.disconnect(); done(); } });
    watch.observe(of("-result"), { childList: true, subtree: true, characterData: true });
  });
  const type = (words) => {
    field.value = words;
    field.dispatchEvent(new KeyboardEvent("keyup", { key: "a", bubbles: true }));
  };
  const found = {};
  for (const words of all) {
    type("");
    await until(() => !list.children.length && /^\\s*Type to start/.test(said.textContent));
    type(words);
    if (words === nowhere) await until(() => /No match/.test(said.textContent));
    else await Promise.race([until(() => list.children.length), new Promise((done) => setTimeout(done, 5000))]);
    found[words] = [...list.children].slice(0, 3).map((item) => item.querySelector("a").href);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def found(site, browser):
    """{words: the first three pages that the site's own search lists}; it runs over HTTP alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}/"
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(root)
    page.click(".md-search__input")
    links = page.evaluate(SEARCH, [[*WORDS, NOWHERE], NOWHERE])
    context.close()
    server.shutdown()
    server.server_close()
    return {words: [re.split(r"[?#]", x.removeprefix(root))[0] for x in links[words]] for words in links}


@pytest.mark.parametrize(("words", "page"), WORDS.items())
def test_search_finds_the_page(found, words, page):
    assert f"{page}.html" in found[words]


def test_search_finds_nothing_where_nothing_is(found):
    assert found[NOWHERE] == []
