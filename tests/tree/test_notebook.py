"""Packed as HTML, for a notebook."""

import re

import treepack
from treepack import synthetic

EVIL = "<script>alert(1)</script>"


def cells(html):
    return [re.sub(r"<[^>]*>", "|", row).strip("|").split("||") for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_the_numbers():
    packed = treepack.pack(synthetic.agent(prompt=60, answers=4, answer=30), max_tokens=128)
    html = packed._repr_html_()
    rows = cells(html)
    assert rows[:4] == [
        ["samples", "4"],
        ["tokens", "360 → 240 (1.50 times fewer)"],
        ["loss terms", "120"],
        ["trees", "2"],
    ]
    for number, tree in enumerate(packed):
        assert rows[5 + number][:4] == [
            str(number),
            str(len(tree.sample_index)),
            str(tree.num_tokens),
            str(tree.num_terms),
        ]
    assert "columns: advantage, group_id, old_log_probs" in html


def test_skipped_ranks_padding_and_many_trees():
    samples = [{"input_ids": [i, i + 1]} for i in range(30)] + [{"input_ids": list(range(40))}]
    html = treepack.pack(samples, max_tokens=4, ranks=2, overlong="skip", pad_to_multiple_of=4)._repr_html_()
    assert "30, 1 skipped" in html
    assert "on 2 ranks" in html
    assert "more trees" in html
    assert "padding" in treepack.pack(samples[:1], max_tokens=4, pad_to_multiple_of=4)._repr_html_()


def test_names_stay_text():
    html = treepack.pack([{"input_ids": [1, 2], EVIL: 1.0}], max_tokens=4)._repr_html_()
    assert EVIL not in html
    assert "&lt;script&gt;" in html


def test_nothing_packed():
    assert "<b>Packed</b>" in treepack.pack([], max_tokens=4)._repr_html_()
