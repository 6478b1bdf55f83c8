"""Groups of samples: their numbers against sets of prefixes, on the page and in `inspect`."""

import json
import random

import pytest
from report_browser import SMALL, small

import treepack
from treepack.reports.groups import Groups

pytest.importorskip("jinja2", reason="jinja2 is not installed: it comes with treepack[cli]")


def prefixes(samples):
    return len({tuple(ids[: i + 1]) for ids in samples for i in range(len(ids))})


def drawn(seed):
    """Samples of few letters with a mask each, and their groups."""
    draw = random.Random(seed)
    samples = [[draw.randrange(3) for _ in range(draw.randrange(1, 9))] for _ in range(30)]
    masks = [[draw.randrange(2) for _ in ids] for ids in samples]
    return samples, masks, [draw.choice(["a", "b", "c"]) for _ in samples]


def turns(mask):
    return sum(now and not before for before, now in zip([0, *mask[1:-1]], mask[1:], strict=False))


@pytest.mark.parametrize("seed", range(8))
def test_numbers_of_groups(seed):
    samples, masks, names = drawn(seed)
    rows = [
        {"input_ids": ids, "completion_mask": mask, "group_id": name}
        for ids, mask, name in zip(samples, masks, names, strict=True)
    ]
    (tree,) = treepack.pack(rows, max_tokens=1000)
    groups = Groups()
    groups.add(tree, [names[number] for number in tree.sample_index.tolist()])
    trained = [sum(mask[1:]) for mask in masks]
    found = {group.name: group for group in groups.largest(9)}
    for name in set(names):
        mine = [i for i, each in enumerate(names) if each == name]
        group = found[name]
        assert group.samples == len(mine)
        assert group.raw_tokens == sum(len(samples[i]) for i in mine)
        assert group.packed_tokens == prefixes([samples[i] for i in mine])
        assert group.trained_tokens == sum(trained[i] for i in mine)
        assert (group.shortest, group.longest) == (min(trained[i] for i in mine), max(trained[i] for i in mine))
        assert group.turns == sum(turns(masks[i]) for i in mine)
    numbers = groups.finish()
    within = sum(group.packed_tokens for group in found.values())
    assert numbers["shared_within"] == sum(map(len, samples)) - within
    assert numbers["shared_across"] == within - prefixes(samples)
    assert numbers["mean_completion"] == sum(trained) / len(samples)
    saved = [group.saved for group in groups.largest(9)]
    assert saved == sorted(saved, reverse=True)


def test_samples_without_a_group():
    groups = Groups()
    groups.add(treepack.pack(SMALL, max_tokens=64)[0], [None, None, None])
    assert groups.finish() is None
    assert 'id="groups"' not in treepack.report(small()).html


def test_the_page(open_report):
    said = [{"line": i, "group_id": name} for i, name in enumerate(("one", "two", "two"))]
    details = {"The file": [("file", "<b>x</b>.jsonl", "jsonl")], "Data quality": [("NaN", "0", "at trained tokens")]}
    page = open_report(treepack.report(small(), samples=said, details=details))
    assert page.locator("#groups tr").all_inner_texts()[1:] == [
        "two\t12\t30\t18\t2\t40.0 %\t4 to 8\t1.0",  # 8 + 4 tokens are shared by two samples
        "one\t0\t14\t14\t1\t42.9 %\t6 to 6\t1.0",
    ]
    page.click("#groups button >> text=two")
    assert page.input_value("#query") == "group_id=two"
    assert page.inner_text("#found").startswith("2 samples found, at 1.")
    text = page.inner_text("section[aria-labelledby=details-title]")
    assert "<b>x</b>.jsonl" in text
    for part in (treepack.__version__, "max_tokens", "32", "at trained tokens"):
        assert part in text
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_inspect(tmp_path, capsys):
    pytest.importorskip("typer", reason="the command line needs treepack[cli]")
    from treepack.cli.commands import run

    samples, masks, names = drawn(1)
    path, page = tmp_path / "rollouts.jsonl", tmp_path / "page.html"
    rows = zip(samples, masks, names, strict=True)
    path.write_text(
        "".join(json.dumps({"input_ids": i, "completion_mask": m, "group_id": g}) + "\n" for i, m, g in rows)
    )
    assert run(["inspect", str(path), "--max-tokens", "64", "--json", "--html", str(page)]) == 0
    numbers = json.loads(capsys.readouterr().out)["groups"]
    within = sum(prefixes([ids for ids, each in zip(samples, names, strict=True) if each == name]) for name in "abc")
    assert (numbers["groups"], numbers["shared_across"]) == (3, within - prefixes(samples))
    assert run(["inspect", str(path), "--max-tokens", "64"]) == 0
    assert "shared within groups" in capsys.readouterr().out
    html = page.read_text()
    for part in ("Data quality", "samples without a term", "max_tokens", "rollouts.jsonl", "shared across groups"):
        assert part in html
