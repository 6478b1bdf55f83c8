"""The tables of the pages say what the result files say: each figure is looked up, each ratio computed again."""

import re
from pathlib import Path

import pytest
import tritons

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benches" / "results"
DECIDE = ROOT / "docs" / "when-packing-helps.md"
BUDGET = ROOT / "docs" / "choose-a-budget.md"
FLEX = ROOT / "docs" / "migrating-flexattention.md"
TRL = ROOT / "docs" / "migrating-trl.md"
AREAL = ROOT / "docs" / "migrating-areal.md"
VERL = ROOT / "docs" / "migrating-verl.md"
RANGES = ROOT / "docs" / "ranges.md"
SHARDS = ROOT / "docs" / "shards.md"
PLACEMENT = ROOT / "docs" / "placement.md"
OFFLINE = ROOT / "docs" / "offline.md"
KERNEL = ROOT / "docs" / "kernel.md"
RECURRENT = ROOT / "docs" / "recurrent.md"
README = ROOT / "README.md"
BENCHES = ROOT / "benches" / "README.md"


def rows(page, heading, column=""):
    """The cells of the first table below a heading (that has such a column), without its first two lines."""
    return table(page, heading, column)[1:]


def columns(page, heading):
    """The columns of the first table below a heading, with their heads, without the column of the names."""
    return [list(cells) for cells in zip(*table(page, heading), strict=True)][1:]


def table(page, heading, column=""):
    text = re.split(rf"\n##+ {re.escape(heading)}\n", page.read_text(encoding="utf-8"), maxsplit=1)[1]
    tables = (found[0].splitlines() for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE))
    head, _, *lines = next(lines for lines in tables if column in lines[0])
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in (head, *lines)]


def box(name):
    """The rows of the boxes in a result file: cells of each line that is drawn with them."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def number(text):
    return float(text.replace(",", ""))


def rounds(shown, figure):
    """`shown` is `figure` with fewer digits."""
    digits = len(shown.partition(".")[2])
    return abs(number(shown) - number(figure)) <= 0.5 * 10**-digits + 1e-9


def says(page, sentence):
    """The page has this sentence, wherever its lines break."""
    return " ".join(sentence.split()) in " ".join(page.read_text(encoding="utf-8").split())


def packed_tokens(name, budget):
    """`"tokens (trees)"` of the default placement; of first fit for a set that the table of placements lacks."""
    for row in box("placement.txt"):
        if row[0] == f"{name}, {budget.replace(',', '')}" and "(" in row[7]:
            return row[7]
    (row,) = (row for row in box("pack.txt") if row[0] == name and row[3] == budget)
    return f"{row[5]} ({row[4]})"


def test_sharing_under_trainers():
    """The three boxes of the result file, each with the same ways."""
    titles = re.findall(r"^ *(\w+), max_tokens", (RESULTS / "trainers.txt").read_text(encoding="utf-8"), re.MULTILINE)
    found = box("trainers.txt")
    ways = len(found) // len(titles)
    wanted = [
        [f"`{titles[i // ways]}`", row[0], *(cell.replace("  ", ", ") for cell in row[1:])]
        for i, row in enumerate(found)
    ]
    shown = rows(VERL, "Sharing survives the trainer")
    assert [[row[0], row[1].strip("`"), *row[2:]] for row in shown] == wanted
    (balanced, *_, ours) = wanted[:ways]
    assert says(PLACEMENT, f"8 answers to a prompt keep {balanced[5].split()[0]} of {ours[5].split()[0]}")


@pytest.mark.parametrize("row", rows(DECIDE, "Tokens"), ids=lambda row: row[0])
def test_tokens(row):
    label, ratio, packed, budget, samples, raw = row
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
    tree, faster, ratio, triton, fa4, alone, sizes = row
    raw, n = sizes.split(" / ")
    positions, tokens, times = attention(tree)
    assert (number(n), number(raw)) == (positions, tokens)
    assert ratio == f"{tokens / positions:.2f}"
    assert (triton, fa4, alone) == (times["triton"][0], times["fa4"][0], times["alone"][0])
    assert faster == times["alone"][1]


@pytest.mark.parametrize("row", rows(FLEX, "What it saves"), ids=lambda row: row[0])
def test_flex(row):
    tree, slower, flex, triton, metadata, n = row
    positions, _, times = attention(
        tree, "gpu_peers.txt"
    )  # of before the Hopper kernels: its `triton` is the portable one
    assert number(n) == positions
    assert (flex, triton, slower) == (times["flex"][0], times["triton"][0], times["flex"][1])
    assert metadata == f"{times['flex'][2]}, {times['triton'][2]}"


STEPS = zip(
    rows(DECIDE, "A whole training step", "peak GiB"),
    rows(DECIDE, "A whole training step", "of the FLOP ratio"),
    strict=True,
)


@pytest.mark.parametrize(("ratios", "times"), list(STEPS), ids=lambda row: row[0])
def test_step(ratios, times):
    """A row of each of the two tables."""
    name, faster, padded, peaks = ratios
    again, share, flops, tokens, *times, sizes = times
    raw, packed = sizes.split(" / ")
    assert again == name
    text = (RESULTS / "gpu_model.txt").read_text(encoding="utf-8")
    head = re.search(
        rf"^{name}: .*?N ([\d,]+) of ([\d,]+) raw.*?token ratio ([\d.]+), FLOP ratio ([\d.]+)\n((?:  .*\n)+)",
        text,
        re.MULTILINE,
    )
    assert (packed, raw, tokens, flops) == head.groups()[:4]
    found = [
        re.search(rf"^  {contender} +([\d.]+) +[\d.]+ +([\d.]+)", head[5], re.MULTILINE).groups()
        for contender in ("triton", "alone", "padded")
    ]
    assert times == [ms for ms, _ in found]
    assert peaks == " / ".join(peak for _, peak in found)
    assert f"alone: {faster}x = {share} of the FLOP ratio" in head[5]
    assert f"padded: {padded}x" in head[5]


def test_sentences():
    """The figures that stand in the text of the decision page."""
    text = " ".join(DECIDE.read_text(encoding="utf-8").split())
    turns, coding = (
        [number(packed_tokens(name, budget).split()[0]) for budget in ("16,384", "32,768")]
        for name in ("tau_airline_turns", "swe_gemini_comb")
    )
    more = f"half the budget cost {turns[0] / turns[1] - 1:.0%} more tokens".replace("%", " %")
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


@pytest.mark.parametrize("row", rows(README, "Measured"), ids=lambda row: row[0])
def test_pack(row):
    label, ms, ratio, sizes, packed, budget = row
    raw, samples = sizes.removesuffix(")").split(" (")
    synthetic = {"synthetic agent": "agent", "synthetic multi-turn": "multi_turn"}
    name = synthetic.get(label) or re.search(r"`(\w+)`", label)[1]
    (found,) = (other for other in box("pack.txt") if other[:4] == [name, samples, raw, budget])
    assert packed == f"{found[5]} ({found[4]})"
    assert rounds(ms, found[9])
    assert rounds(ratio, found[12])


def test_pack_sentences():
    agent, multi_turn = ([row for row in box("pack.txt") if row[0] == name] for name in ("agent", "multi_turn"))
    assert says(README, f"TRL 1.16 takes {agent[1][6]} and {multi_turn[1][6]} times as long")
    assert says(BENCHES, f"TRL's `TreeRow` {agent[1][6]} and {multi_turn[1][6]} times less time")
    for name, where in (("tau_airline_turns", "the agent's turns"), ("swe_gemini_comb", "the coding agent")):
        (first_fit,) = (row[5] for row in box("pack.txt") if row[0] == name)
        shared = packed_tokens(name, "32,768").split()[0]
        assert says(README, f"{shared} instead of {first_fit} on {where}")


@pytest.mark.parametrize("row", rows(BENCHES, "Packing on the host"), ids=lambda row: row[0])
def test_placement(row):
    found = next(other for other in box("placement.txt") if other[0] == row[0])  # the first box is that of the tokens
    peers = sorted(found[1:4], key=lambda cell: number(cell.split()[0]))
    assert row[1:] == [found[7], peers[0], found[8]]


def test_scaling():
    text = (RESULTS / "scaling.txt").read_text(encoding="utf-8")
    growth = re.findall(r"^(?:low sharing|groups of 8): .* ns per token x([\d.]+) ", text, re.MULTILINE)
    memory = [number(row[12]) for row in box("scaling.txt") if row[0] in ("low sharing", "groups of 8")]
    assert len(growth) == 2
    assert len(memory) == 6
    assert says(BENCHES, f"ns per token grow by {min(growth)} to {max(growth)},")
    assert says(BENCHES, f"{min(memory):.2f} to {max(memory):.2f} times the arrays given on large trees")


TREES = ("chain16k", "agent9k", "agent2x16k", "docs16k", "multiturn", "swe_gemini_comb")
PEERS = {
    "**`triton`**: Hopper kernels": ("gpu_attention.txt", "triton"),
    "`triton_plain`": ("gpu_attention.txt", "triton_plain"),
    "`fa4`": ("gpu_peers.txt", "fa4"),
    "`flex`, compiled, our tile lists": ("gpu_peers.txt", "flex"),
    "AReaL's kernel (bit mask)": ("gpu_peers.txt", "areal"),
    "K/V gathered per path, FA2 varlen": ("gpu_peers.txt", "gathered"),
    "each sample alone, FA2 varlen": ("gpu_peers.txt", "alone"),
}


@pytest.mark.parametrize("row", rows(BENCHES, "Attention on a GPU")[1:], ids=lambda row: row[0])
def test_peers(row):
    file, name = PEERS[row[0]]
    text = (RESULTS / file).read_text(encoding="utf-8")
    for tree, cell in zip(TREES, row[1:], strict=True):
        # The last run of a shape is the newest.
        section = re.findall(rf"^{tree}  D 128  heads 32/8 .*\n((?:  .*\n)+)", text, re.MULTILINE)[-1]
        line = re.search(rf"^  {name} +(.*)$", section, re.MULTILINE)[1]
        if "/" not in cell:
            assert line.startswith("no time"), (tree, cell)
            continue
        times = re.findall(r"([\d.]+) \([\d. ]+\)", line)
        assert all(map(rounds, cell.split(" / "), times)), (tree, cell, times)


@pytest.mark.parametrize(
    "row", rows(TRL, "The switch: AsyncGRPOTrainer of TRL 1.16.0", "rollouts"), ids=lambda row: row[0]
)
def test_trl(row):
    found = [f"{other[2]} / {other[4]} ms" for other in box("trl.txt") if other[0] == row[0].strip("`")]
    assert row[1:] == found


def test_step_sentences():
    steps = {row[0]: row for row in rows(DECIDE, "A whole training step")}
    times = {name: f"{float(row[1]):.1f}" for name, row in steps.items()}
    peaks = steps["comb60"][3].split(" / ")
    assert says(README, f"{times['comb60']} times faster on 60 samples")
    assert says(README, f"with {peaks[0]} instead of {peaks[1]} GiB at the peak")
    assert says(README, f"{times['agent9k']} times on 8 answers")
    assert says(
        README, f"{times['multiturn']} times on multi-turn rollouts, {times['docs16k']} where nothing is shared"
    )
    most = max(times.values(), key=float)
    assert says(BENCHES, f"{times['docs16k']} to {most} times faster")
    assert says(ROOT / "docs" / "integrations.md", f"{times['docs16k']} to {most} times, by how much is shared")
    text = (RESULTS / "gpu_model.txt").read_text(encoding="utf-8")
    padded = [float(row[2]) for row in steps.values()]
    assert says(DECIDE, f"takes {min(padded):.2f} to {max(padded):.2f} times as long as the packed step")
    host = re.findall(r"pack ([\d.]+) \+ copy ([\d.]+) ms = ([\d.]+)%", text)
    pack, copy, share = ([float(row[i]) for row in host] for i in range(3))
    spans = f"{min(pack):.2f} to {max(pack):.2f} ms of host time, the transfer {min(copy):.2f} to {max(copy):.2f} ms"
    assert says(DECIDE, spans)
    assert says(DECIDE, f"together at most {max(share):.2f} % of a step")


@pytest.mark.parametrize("row", rows(AREAL, "What it saves"), ids=lambda row: f"{row[0]}-{row[-1]}")
def test_areal(row):
    name, budget, *figures, trees, sizes = row
    raw, samples = sizes.removesuffix(")").split(" (")
    host = [other for other in box("areal.txt") if len(other) == 17]
    masks = [other for other in box("areal.txt") if len(other) == 9]
    (index,) = (i for i, other in enumerate(host) if other[:2] == [name.strip("`"), samples])
    found, mask = host[index], masks[index]
    assert [raw, budget, trees] == found[2:5]
    assert figures == [
        f"{found[6]} s / {found[7]} ms",
        f"{found[14]} s / {found[15]} ms",
        f"{mask[3]} MiB / {mask[4]} KiB",
    ]


def test_areal_sentences():
    host = [other for other in box("areal.txt") if len(other) == 17]
    tries, nodes, spans = ([int(row[i]) for row in host] for i in (8, 10, 13))
    assert says(AREAL, f"Tries are {min(tries)} to {max(tries)} times faster.")
    assert says(AREAL, f"it is {min(nodes)} to {max(nodes)} times;")
    assert says(AREAL, f"ask for, {min(spans)} to {max(spans)} times.")


@pytest.mark.parametrize("column", columns(OFFLINE, "Cost"), ids=lambda column: column[0])
def test_offline(column):
    (found,) = (other for other in box("offline.txt") if other[0] == column[0].replace("`", "") and len(other) > 8)
    assert column[1:] == [found[i] for i in (3, 5, 7, 9, 10, 13, 2, 1)]


@pytest.mark.parametrize("column", columns(OFFLINE, "Windows"), ids=lambda column: column[0])
def test_offline_windows(column):
    (found,) = (other for other in box("offline.txt") if other[0] == column[0].replace("`", "") and len(other) == 8)
    assert column[1:] == [*found[2:], found[1]]


def test_offline_memory():
    text = " ".join((RESULTS / "offline.txt").read_text(encoding="utf-8").split())
    line = r"([\d,]+) tokens generated \((\d+) MB of Parquet\).*? in ([\d.]+) s; .*?, (\d+) MiB at most"
    (few, _, _, less), (many, size, seconds, memory) = re.findall(line, text)
    took = f"took {float(seconds):.0f} s and {memory} MiB of memory at most, {few} took {less} MiB"
    assert says(OFFLINE, f"{many} generated tokens ({size} MB of Parquet) {took}.")


def compiled(gpu, triton):
    """{(kernel, head size, dtype, features): (tile, registers, spilled bytes, shared memory, of)} for one GPU."""
    lines = []
    for file in ("gpu_compile.txt", "gpu_compile_two_sizes.txt"):
        text = (RESULTS / file).read_text(encoding="utf-8")
        (section,) = re.findall(rf"^triton {re.escape(triton)}, .*\n((?:(?!triton ).*\n)+)", text, re.MULTILINE)
        lines += [line.split() for line in section.splitlines() if line.startswith(f"{gpu} ")]
    return {tuple(line[1:5]): (line[5], *map(int, line[6:])) for line in lines}


def most(gpu, place, feature=""):
    """The largest of one figure over every kernel, under the oldest and the newest Triton."""
    kernels = [compiled(gpu, triton) for triton in (tritons.RELEASES[0], tritons.RELEASES[-1])]
    assert [len(found) for found in kernels] == [4 * 2 * 8] * 2  # kernels, features, head sizes and float16 at one
    return " / ".join(f"{max(row[place] for key, row in found.items() if feature in key[3]):,}" for found in kernels)


@pytest.mark.parametrize("row", rows(KERNEL, "Other GPUs"), ids=lambda row: row[0])
def test_other_gpus(row):
    gpu = row[0].split()[0]
    (memory,) = {figures[4] for figures in compiled(gpu, tritons.RELEASES[0]).values()}
    spilled = [most(gpu, 2, "plain"), most(gpu, 2, "all")]
    assert row[1:] == [most(gpu, 3), f"{memory:,}", *spilled, most(gpu, 1)]


@pytest.mark.parametrize("row", rows(KERNEL, "Portable kernels", "Triton"), ids=lambda row: f"{row[0]}-{row[1]}")
def test_portable_on_hopper(row):
    kernels = compiled("sm_90", row[1])
    for size in row[0].split(", "):
        for cell, name in zip(row[2:], ("forward", "dkv", "dq"), strict=True):
            tile, registers, spills, shared, _ = kernels[name, size.replace(" ", ""), "bf16", "plain"]
            block_m, block_n, warps, stages = tile.split(",")
            assert cell == f"{block_m}x{block_n} w{warps} s{stages}: {registers}, {spills}, {shared:,}"


@pytest.mark.parametrize("column", columns(BUDGET, "What a budget takes"), ids=lambda column: column[0])
def test_peaks(column):
    model, weights, *peaks = column
    text = (RESULTS / "gpu_memory.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines()]
    assert [model, weights, *peaks] in lines
    (head,) = (line for line in lines if line[:2] == ["model", "weights"])
    assert [row[0] for row in rows(BUDGET, "What a budget takes")][1:] == head[3:]


def test_what_ranges_save():
    """Every row of the page is one of the kept output, figure for figure."""
    measured = {(row[0], row[1]): row[2:8] for row in box("ranges.txt")}
    shown = rows(RANGES, "What it costs", column="distinct")
    assert len(shown) == 12
    for name, fewer, tokens, distinct, *figures in shown:
        assert [tokens, distinct, fewer, *figures] == measured[tuple(name.replace("`", "").split(", "))], name


@pytest.mark.parametrize("row", rows(RANGES, "On a GPU"), ids=lambda row: row[0])
def test_ranges_on_a_gpu(row):
    name, cut, packed, alone, faster, of_flops, than_alone, peaks, ancestors = row
    title, budget = name.replace("`", "").split(", ")
    text = (RESULTS / "gpu_ranges.txt").read_text(encoding="utf-8")
    section = re.search(rf"^{title}, budget {budget}: .*\n(?:  .*\n)+", text, re.MULTILINE)[0]
    for way, seconds, peak in zip(("cut", "packed", "alone"), (cut, packed, alone), peaks.split(" / "), strict=True):
        assert re.search(rf"^  {way} +{seconds} +[\d.]+ +{peak} ", section, re.MULTILINE)
    assert f"cut is {faster}x as fast as packed: {of_flops} of the FLOP ratio" in section
    assert f"cut is {than_alone}x as fast as alone" in section
    assert f" ancestors {ancestors} GiB" in section


def shards(columns):
    """{(set, ranks): cells} of the box with so many columns."""
    found = [row for row in box("shards.txt") if len(row) == columns]
    place = {13: 2, 11: 3}[columns]
    return {(row[0], row[place]): row for row in found}


def test_rows_over_ranks():
    """Both tables of the page are lines of the kept output, for 8 ranks."""
    counted, passed = shards(13), shards(11)
    shown = rows(SHARDS, "What it costs", column="received")
    assert len(shown) == 6
    for name, *figures in shown:
        row = counted[name.strip("`"), "8"]
        assert figures == [row[at] for at in (1, 4, 5, 6, 9, 10, 12)], name
    shown = rows(SHARDS, "What it costs", column="Ulysses")
    assert len(shown) == 6
    for name, *figures in shown:
        row = passed[name.strip("`"), "8"]
        assert figures == [row[at] for at in (2, 4, 5, 7, 8)], name
    worst = max((row[at] for row in counted.values() for at in (3, 11)), key=float)
    assert says(SHARDS, f"The slowest rank has at most {worst} times the mean work")


SHAPES = rows(KERNEL, "Two sets of kernels", "portable")


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_two_sets(number):
    _, tree, *cells = SHAPES[number]
    named = next(row[0] for row in SHAPES[number::-1] if row[0] != "the same")
    shape = named.removeprefix("D ").split(", ")
    head = rf"^{tree}  D {shape[0]}  heads {shape[1].removesuffix(' heads').replace(' ', '')}  "
    head += "".join(f"{option}  " for option in shape[2:])
    text = (RESULTS / "gpu_shapes.txt").read_text(encoding="utf-8")
    section = re.search(head + r"N \d+.*\n((?:  .*\n)+)", text, re.MULTILINE)[1]
    times = dict(re.findall(r"^  (\w+) .*\)\s+\d+\s+([\d.]+)\s+[\d.]+", section, re.MULTILINE))
    assert cells == [times["triton_plain"], times["gluon"]]


def recurrent(kind, tree):
    """(the numbers of the head line, {contender: (forward / backward, over the chain)}) of a section of the results."""
    text = (RESULTS / "gpu_recurrent.txt").read_text(encoding="utf-8")
    head = re.search(rf"^{kind} {tree}: N (\d+)(?:, raw (\d+), (\d+) segments)?.*\n((?:   .*\n)+)", text, re.MULTILINE)
    found = re.findall(r"^   (\w+) +([\d.]+) / +([\d.]+) ms +([\d.]+) of", head[4], re.MULTILINE)
    sizes = [int(x) for x in head.groups()[:3] if x]
    return sizes, {name: (f"{forward} / {backward}", ratio) for name, forward, backward, ratio in found}


SCANS = [
    (kind, row)
    for kind, heading in (("delta", "Gated delta rule"), ("linear", "Linear attention"))
    for row in rows(RECURRENT, heading)
]


@pytest.mark.parametrize(("kind", "row"), SCANS, ids=lambda x: x if isinstance(x, str) else x[0])
def test_recurrent(kind, row):
    tree, sizes, *cells, over = row
    shown, times = recurrent(kind, tree)
    assert [int(number(x)) for x in sizes.split(" / ")] == shown
    assert cells == [times[name][0] for name in ("treepack", "chain", "alone", "levels")]
    assert over == times["treepack"][1]


def test_recurrent_chunks():
    text = (RESULTS / "gpu_recurrent_chunks.txt").read_text(encoding="utf-8")
    totals = dict(re.findall(r"^== chunk (\d+) total ([\d.]+)", text, re.MULTILINE))
    ms = {size: f"{float(total):.3f}" for size, total in totals.items()}
    assert says(RECURRENT, f"{ms['16']} ms in 882 chunks of 16, {ms['32']} in 657 of 32, {ms['64']} in 640 of 64")
    assert says(RECURRENT, f"and {ms['0']} on the chain")


@pytest.mark.parametrize("row", rows(RECURRENT, "Convolution"), ids=lambda row: row[0])
def test_recurrent_convolution(row):
    tree, n, *cells, over = row
    shown, times = recurrent("conv", tree)
    assert [int(number(n))] == shown
    assert cells == [times[name][0] for name in ("treepack", "chain")]
    assert over == times["treepack"][1]


@pytest.mark.parametrize("row", rows(RECURRENT, "A training step"), ids=lambda row: row[0])
def test_hybrid_step(row):
    name, tokens, packed, alone, faster, flops, of_it, memory, shares = row
    text = (RESULTS / "gpu_hybrid.txt").read_text(encoding="utf-8")
    section = re.search(rf"^{name}: .*\n(?:  .*\n)+", text, re.MULTILINE)[0]
    assert f"N {tokens} raw," in section
    assert section.count(f"FLOP ratio {flops}\n") == 1
    assert f"  {faster}x = {of_it} of the FLOP ratio" in section
    ours, theirs = memory.split(" / ")
    for way, ms, peak in (("packed", packed, ours), ("alone", alone, theirs)):
        assert re.search(rf"^  {way} +{ms} ms .* {peak} GiB", section, re.MULTILINE)
    lines = section.splitlines()
    after = lines[next(i for i, line in enumerate(lines) if line.startswith("  packed  ")) + 1]
    assert re.findall(r"= (\d+)%", after) == re.findall(r"(\d+) %", shares)
