"""The tables of the pages say what the result files say: each figure is looked up, each ratio computed again."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benches" / "results"
DECIDE = ROOT / "docs" / "when-packing-helps.md"
FLEX = ROOT / "docs" / "migrating-flexattention.md"


def rows(page, heading):
    """The cells of the first table below a heading, without its first two lines."""
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def box(name):
    """The rows of the boxes in a result file: cells of each line that is drawn with them."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def number(text):
    return float(text.replace(",", ""))


def packed_tokens(name, budget):
    """`"tokens (trees)"` of the default placement; of first fit for a set that the table of placements lacks."""
    for row in box("placement.txt"):
        if row[0] == f"{name}, {budget.replace(',', '')}" and "(" in row[7]:
            return row[7]
    (row,) = (row for row in box("pack.txt") if row[0] == name and row[3] == budget)
    return f"{row[5]} ({row[4]})"


@pytest.mark.parametrize("row", rows(DECIDE, "Tokens"), ids=lambda row: row[0])
def test_tokens(row):
    label, samples, raw, budget, packed, ratio = row
    name = re.search(r"`(\w+)`", label)[1]
    assert (samples, raw) in [(other[1], other[2]) for other in box("pack.txt") if other[0] == name]
    assert packed == packed_tokens(name, budget)
    assert ratio == f"{number(raw) / number(packed.split()[0]):.2f}"


def attention(tree, file="gpu_attention.txt"):
    """(N, raw, {implementation: (both ms, over triton, bytes a token)}) of the first section of a tree at D = 128."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    head = re.search(rf"^{tree}  D 128  .*?N (\d+)  raw (\d+)\n((?:  .*\n)+)", text, re.MULTILINE)
    line = r"^  (\w+) .*\)\s+\d+\s+([\d.]+)\s+([\d.]+)x\s+([\d.]+)  "
    return int(head[1]), int(head[2]), {x[0]: x[1:] for x in re.findall(line, head[3], re.MULTILINE)}


@pytest.mark.parametrize("row", rows(DECIDE, "Attention"), ids=lambda row: row[0])
def test_attention(row):
    tree, raw, n, ratio, triton, fa4, alone, faster = row
    positions, tokens, times = attention(tree)
    assert (number(n), number(raw)) == (positions, tokens)
    assert ratio == f"{tokens / positions:.2f}"
    assert (triton, fa4, alone) == (times["triton"][0], times["fa4"][0], times["alone"][0])
    assert faster == times["alone"][1]


@pytest.mark.parametrize("row", rows(FLEX, "What it saves"), ids=lambda row: row[0])
def test_flex(row):
    tree, n, flex, triton, slower, metadata = row
    positions, _, times = attention(
        tree, "gpu_peers.txt"
    )  # of before the Hopper kernels: its `triton` is the portable one
    assert number(n) == positions
    assert (flex, triton, slower) == (times["flex"][0], times["triton"][0], times["flex"][1])
    assert metadata == f"{times['flex'][2]}, {times['triton'][2]}"


@pytest.mark.parametrize("row", rows(DECIDE, "A whole training step"), ids=lambda row: row[0])
def test_step(row):
    name, raw, packed, tokens, flops, ours, alone, faster, share, peaks = row
    text = (RESULTS / "gpu_model.txt").read_text(encoding="utf-8")
    head = re.search(
        rf"^{name}: .*?N ([\d,]+) of ([\d,]+) raw.*?token ratio ([\d.]+), FLOP ratio ([\d.]+)\n((?:  .*\n)+)",
        text,
        re.MULTILINE,
    )
    assert (packed, raw, tokens, flops) == head.groups()[:4]
    line = r"^  {} +([\d.]+) +[\d.]+ +([\d.]+)"
    ours_ms, ours_peak = re.search(line.format("triton"), head[5], re.MULTILINE).groups()
    alone_ms, alone_peak = re.search(line.format("alone"), head[5], re.MULTILINE).groups()
    assert (ours, alone, peaks) == (ours_ms, alone_ms, f"{ours_peak} / {alone_peak}")
    assert f"alone: {faster}x = {share} of the FLOP ratio" in head[5]


def test_sentences():
    """The figures that stand in the text of the decision page."""
    text = DECIDE.read_text(encoding="utf-8")
    turns, coding = (
        [number(packed_tokens(name, budget).split()[0]) for budget in ("16,384", "32,768")]
        for name in ("tau_airline_turns", "swe_gemini_comb")
    )
    more = f"half the budget cost\n{turns[0] / turns[1] - 1:.0%} more tokens".replace("%", " %")
    assert more in text
    assert f"and {coding[0] / coding[1] - 1:.0%} on the coding agent".replace("%", " %") in text
    cudnn, triton = (attention("chain16k")[2][name][0] for name in ("cudnn", "triton"))
    assert f"takes {triton} ms instead of {cudnn}" in text
    plain = [number(attention(row[0])[2]["triton_plain"][1]) for row in rows(DECIDE, "Attention")]
    assert f"take {min(plain):.2f} to {max(plain):.2f} times that" in text
    pack_ms = [number(row[9]) for row in box("pack.txt") if len(row) > 17]
    ratios = [number(row[12]) for row in box("pack.txt") if len(row) > 17]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times one `np.concatenate`" in text
    assert max(pack_ms) < 16
    assert "at most 16 ms" in text
