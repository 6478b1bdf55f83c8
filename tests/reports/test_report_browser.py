"""The report in a real browser, without a screen: it draws what is in the tree, it zooms, it asks for nothing, its
console is clean. Needs playwright and a Chromium of the system: `TREEPACK_CHROMIUM=/path/to/chromium` names one."""

import time

import pytest
from report_browser import SMALL, pixel, place, small, theme
from report_naive import large_batch

import treepack
from treepack import synthetic

pytest.importorskip("jinja2", reason="jinja2 is not installed: it comes with treepack[cli]")

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&"
LOAD_SECONDS = 3  # loose: it takes well below one second where nothing else runs


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tree_is_drawn(open_report, scheme):
    page = open_report(treepack.report(small()), color_scheme=scheme)
    expected = [
        ((7, 0.2), "prompt-1"),  # 3 samples
        ((13, 0.2), "trained-0"),
        ((11, 1.2), "trained-1"),
        ((13.5, 1.2), "prompt-0"),
        ((15.5, 2.2), "trained-0"),
    ]
    for (depth, row), name in expected:
        assert pixel(page, "icicle", *place(page, depth, row)) == theme(page, name), (depth, row)
    assert pixel(page, "icicle", *place(page, 15.5, 0.5)) == "#000000"  # transparent: nothing is there
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


def test_the_theme_can_change(open_report):
    page = open_report(treepack.report(small()), color_scheme="light")
    light = [pixel(page, name, 100, 20) for name in ("icicle", "mask", "tiles")]
    page.emulate_media(color_scheme="dark")
    page.evaluate("new Promise(requestAnimationFrame)")  # the change is reported before the next frame
    dark = [pixel(page, name, 100, 20) for name in ("icicle", "mask", "tiles")]
    assert dark[1:] == [theme(page, "paper"), theme(page, "partial")]
    assert all(a != b for a, b in zip(light, dark, strict=True))


def test_numbers(open_report):
    page = open_report(treepack.report(small(), title="Three answers"))
    assert page.title() == "Three answers - treepack report"
    assert page.inner_text("h1") == "Three answers"
    assert page.inner_text("#raw-tokens") == "44"
    assert page.inner_text("#packed-tokens") == "24"
    assert page.inner_text("#ratio") == "1.83 x"
    assert page.inner_text("#facts") == (
        "3 samples · 44 raw tokens in 24 positions · 5 segments · 13 rows · 18 loss terms · columns advantage"
    )
    assert page.inner_text("#status") == "Shown: depth 0 to 15 of 3 samples, in 5 bars."
    assert page.inner_text("#mask-note").startswith("232 of 576 pairs visible (40.3 %).")
    assert page.locator(".kinds tr").all_inner_texts() == [
        "full: no mask\t0 tiles\t0.0 %",
        "partial: masked\t1 tile\t100.0 %",
        "empty: skipped\t0 tiles\t0.0 %",
    ]
    assert page.locator("#lengths rect title").all_text_contents() == ["14 tokens: 2 samples", "16 tokens: 1 sample"]
    shared = page.locator("#sharing rect title").all_text_contents()
    assert (len(shared), shared[0], shared[8]) == (
        16,
        *(f"{d} tokens: {n} samples on a position" for d, n in ((0, "3.00"), (8, "1.50"))),
    )


def test_the_mask_and_the_tiles_are_drawn(open_report):
    """A prompt of 1,024 tokens and two answers of 1,024: queries of the second answer do not see the first."""
    packed = treepack.pack(synthetic.agent(prompt=1024, answers=2, answer=1024), max_tokens=4096, order="first_seen")
    cuts = packed[0].cu_segments.tolist()
    page = open_report(treepack.report(packed))
    box = page.locator("#mask").bounding_box()
    size = box["width"] - 62 - 10
    total = packed[0].num_tokens

    def at(canvas, query, key):
        return pixel(page, canvas, 62 + size * key / total, 6 + size * query / total)

    inside = {name: sum(cuts[i : i + 2]) / 2 for i, name in enumerate(("prompt", "first", "second"))}
    for query, key, sees in (
        ("first", "prompt", True),
        ("second", "prompt", True),
        ("second", "first", False),
        ("first", "second", False),
    ):
        assert at("mask", inside[query], inside[key]) == theme(page, "ink" if sees else "paper"), (query, key)
        assert at("tiles", inside[query] - 60, inside[key] - 60) == theme(page, "full" if sees else "unseen"), (
            query,
            key,
        )
    assert at("tiles", 520, 520) == theme(page, "partial")  # on the diagonal
    tiles, (rows, _) = -(-total // 128), packed[0].tiles[128]
    assert page.locator(".kinds tr td:nth-child(2)").all_inner_texts() == [
        f"{count} tiles" for count in (rows[:, 2].sum(), rows[:, 3].sum(), tiles**2 - rows[:, 2:].sum())
    ]
    page.locator("#tiles").hover(position={"x": 62 + size * 100 / total, "y": 6 + size * 1000 / total})
    assert page.inner_text("#tip") == "queries 896 to 1,023\nkeys 0 to 127\nfull"


def test_zoom_by_click(open_report):
    page = open_report(treepack.report(small()))
    whole = page.inner_text("#status")
    assert page.is_disabled("#zoom-out")
    assert page.is_disabled("#whole")
    x, y = place(page, 11, 1.5)
    page.click("#icicle", position={"x": x, "y": y})
    assert page.inner_text("#status") == "Shown: depth 8 to 15 of 2 samples, in 3 bars."
    x, y = place(page, 5, 0.5, reach=8, rows=2)  # C, in the new view
    page.hover("#icicle", position={"x": x, "y": y})
    assert page.inner_text("#tip") == (
        "Segment 3\n2 tokens, packed positions 18 to 19\ndepth 12 to 13\n1 sample alone\n0 tokens trained (0.0 %)\n"
        "sample 1\nadvantage 1"
    )
    page.click("#icicle", position={"x": x, "y": y})
    assert page.inner_text("#status") == "Shown: depth 12 to 13 of 1 sample, in 1 bar."
    page.click("#zoom-out")
    assert page.inner_text("#status") == "Shown: depth 8 to 15 of 2 samples, in 3 bars."
    page.click("#whole")
    assert page.inner_text("#status") == whole
    assert page.is_disabled("#zoom-out")


def test_keys(open_report):
    page = open_report(treepack.report(small()))
    page.focus("#next")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "icicle"
    assert page.inner_text("#spoken").startswith("Segment 0, 8 tokens")
    for key, segment in (
        ("ArrowRight", 1),
        ("ArrowDown", 2),
        ("ArrowRight", 3),
        ("ArrowDown", 4),
        ("ArrowUp", 3),
        ("ArrowLeft", 2),
    ):
        page.keyboard.press(key)
        assert page.inner_text("#spoken").startswith(f"Segment {segment},"), key
    assert page.inner_text("#tip").startswith(
        "Segment 2\n4 tokens, packed positions 14 to 17\ndepth 8 to 11\nshared by 2 samples"
    )
    page.keyboard.press("Enter")
    assert page.inner_text("#status") == "Shown: depth 8 to 15 of 2 samples, in 3 bars."
    page.keyboard.press("Escape")
    assert page.inner_text("#status") == "Shown: depth 0 to 15 of 3 samples, in 5 bars."
    page.keyboard.press("Enter")
    page.keyboard.press("Home")
    assert page.inner_text("#status") == "Shown: depth 0 to 15 of 3 samples, in 5 bars."


def saved(tree):
    """Tokens that a tree spares its samples."""
    return sum(map(len, tree.path_index())) - int(tree.cu_segments[-1])


def test_another_tree(open_report):
    samples = [*synthetic.agent(prompt=60, answers=3, answer=30), *synthetic.agent(1, prompt=50, answers=2, answer=20)]
    packed = treepack.pack(samples, max_tokens=150)
    assert sorted(tree.num_tokens for tree in packed) == [90, 150]
    page = open_report(treepack.report(packed))
    page.set_viewport_size({"width": 360, "height": 900})  # the long names of the trees stay inside
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 1280, "height": 1000})
    first = page.inner_text("#facts")
    page.click("#icicle", position={"x": 700, "y": 30})
    page.select_option("#tree", "1")
    page.wait_for_selector("html[data-shown='1']")
    tree = packed[1]
    assert page.inner_text("#facts") != first
    assert page.inner_text("#facts").startswith(f"{len(tree.sample_index)} samples · ")
    depth, samples, segments = tree.position_ids.max(), len(tree.sample_index), len(tree.segment_parent)
    assert page.inner_text("#status") == f"Shown: depth 0 to {depth} of {samples} samples, in {segments} bars."
    assert page.locator("#tree option").all_inner_texts() == [
        f"{i}: {len(each.sample_index)} samples, {each.num_tokens} tokens, {saved(each)} saved"
        for i, each in enumerate(packed)
    ]


def test_what_users_name_does_nothing(open_report):
    packed = treepack.pack([{"input_ids": [1, 2, 3], EVIL: 1.0}], max_tokens=8)
    page = open_report(treepack.report(packed, title=EVIL))
    assert page.inner_text("h1") == EVIL
    assert page.title().startswith("</script>")
    assert EVIL in page.inner_text("#facts")
    assert page.locator("img").count() == 0


def test_a_large_tree_opens_fast(open_report):
    packed = treepack.pack(large_batch(), max_tokens=10**7)
    report = treepack.report(packed)
    page = open_report(report)
    assert page.evaluate("performance.now()") < 1000 * LOAD_SECONDS  # since the navigation began
    assert f"{len(packed[0].segment_parent):,} segments (the " in page.inner_text("#facts")
    shown = int(page.inner_text("#status").split(" in ")[1].split()[0].replace(",", ""))
    assert 200 < shown < 10_000  # bars lower than a pixel are merged
    # The deepest bars are merged ones: their colour is that of most of their tokens, which are trained.
    x, y = place(page, 56, 50_000, reach=58, rows=100_000)
    page.hover("#icicle", position={"x": x, "y": y})
    assert "too thin to draw" in page.inner_text("#tip")
    page.click("#icicle", position={"x": x, "y": y})
    started = time.perf_counter()
    assert page.inner_text("#status").startswith("Shown: depth 4")
    assert time.perf_counter() - started < 1


def test_padding_and_trees_without_samples(open_report):
    packed = treepack.pack(SMALL[:1], max_tokens=32, ranks=2, pad_to_multiple_of=32)
    page = open_report(treepack.report(packed))
    assert page.inner_text("#facts").startswith(
        "1 sample · 14 raw tokens in 14 positions and 18 of padding · 1 segment"
    )
    page.select_option("#tree", "1")
    page.wait_for_selector("html[data-shown='1']")
    assert page.inner_text("#facts").startswith("0 samples · 0 raw tokens in 0 positions and 32 of padding")
    page = open_report(treepack.report(packed.for_rank(1)))  # padding alone: histograms of nothing
    assert page.inner_text("#facts").startswith("0 samples")


def test_in_a_notebook(open_report):
    page = open_report.watched()
    page.set_content(treepack.report(small())._repr_html_())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-shown='0']").wait_for(state="attached")
    assert frame.locator("#packed-tokens").inner_text() == "24"
    assert frame.locator("#status").inner_text() == "Shown: depth 0 to 15 of 3 samples, in 5 bars."


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_sticks_out(open_report, width):
    page = open_report(treepack.report(small()))
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert pixel(page, "icicle", *place(page, 7, 0.2)) == theme(page, "prompt-1")
