"""What a report holds, against naive loops: segments and their colours, bars, masks, tiles, histograms, totals."""

import struct
import zlib

import numpy as np
import pytest
import report_naive as naive
from helpers import as_arrays, plain, sample_lists
from hypothesis import given
from hypothesis import strategies as st

import treepack
from treepack import synthetic
from treepack.reports.bars import bars_of
from treepack.reports.histograms import length_histogram, nice_width, sharing_histogram
from treepack.reports.pictures import grey, mask_of, tiles_of
from treepack.reports.png import png
from treepack.reports.segments import segments_of, terms_at_positions
from treepack.reports.totals import totals_of

branchings = st.sampled_from(["token", "label"])
# The prompt and its two answers; the second is also a sample of its own up to its first two tokens.
SMALL = [
    {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 0, 0, 1, 1]},
    {"input_ids": [1, 2, 3, 6, 7, 8], "completion_mask": [0, 0, 0, 1, 0, 1]},
    {"input_ids": [1, 2, 3, 6], "completion_mask": [0, 0, 0, 0]},
]


def expand(bars):
    """The flags of each bar of one segment, the number of trained tokens of each merged one."""
    runs = iter(bars.runs.tolist())
    out = []
    for tokens, segments in zip(bars.tokens.tolist(), bars.segments.tolist(), strict=True):
        flags = []
        while len(flags) < tokens:
            run = next(runs)
            flags += [run < 0] * abs(run)
        out.append(flags if segments == 1 else sum(flags))
    assert next(runs, None) is None
    return out


def rows(bars):
    columns = (bars.parent, bars.segments, bars.tokens, bars.samples, bars.trained, bars.reach)
    return [(*row, colours) for *row, colours in zip(*(c.tolist() for c in columns), expand(bars), strict=True)]


def test_by_hand():
    (tree,) = treepack.pack(SMALL, max_tokens=16, order="first_seen")
    segments = segments_of(tree)
    assert segments.tokens.tolist() == [3, 2, 1, 2]  # [1 2 3] [4 5] [6] [7 8]
    assert segments.depth.tolist() == [0, 3, 3, 4]
    assert segments.samples.tolist() == [3, 1, 2, 1]
    assert segments.subtree_end.tolist() == [4, 2, 4, 4]
    assert segments.trained.tolist() == [False, False, False, True, True, True, False, True]
    assert segments.trained_tokens.tolist() == [0, 2, 1, 1]
    bars = bars_of(segments, 4, 99)
    assert bars.runs.tolist() == [3, -2, -1, 1, -1]
    # Two bars of their own: the prompt, and the child below which 4 sample tokens lie. The other child stands alone.
    assert rows(bars_of(segments, 2, 99)) == [
        (-1, 1, 3, 3, 0, 3, [False] * 3),
        (0, 1, 2, 1, 2, 5, [True, True]),
        (0, 1, 1, 2, 1, 4, [True]),
        (2, 1, 2, 1, 1, 6, [False, True]),
    ]
    assert rows(bars_of(segments, 1, 99))[1:] == [(0, 3, 5, 3, 4, 6, 4)]


@given(sample_lists(), branchings)
def test_trained_positions(samples, branching):
    for tree in treepack.pack(as_arrays(samples), max_tokens=12, branching=branching):
        assert (terms_at_positions(tree) > 0).tolist() == naive.trained(tree, samples)


@given(sample_lists(), branchings, st.integers(0, 8))
def test_bars(samples, branching, limit):
    for tree in treepack.pack(as_arrays(samples), max_tokens=30, branching=branching):
        bars = bars_of(segments_of(tree), limit, 10**6)
        assert bars.grain == 1
        assert rows(bars) == naive.bars(tree, samples, limit)
        assert len(bars.parent) <= 3 * limit + 1


@given(sample_lists(), st.integers(0, 4))
def test_short_runs(samples, more):
    """Few runs keep what is drawn right in sum of tokens, and each chunk has the colour of its majority."""
    for tree in treepack.pack(as_arrays(samples), max_tokens=30):
        exact = bars_of(segments_of(tree), 99, 10**6)
        bars = bars_of(segments_of(tree), 99, more)
        assert len(bars.runs) <= len(bars.tokens) + more
        assert bars.trained.tolist() == exact.trained.tolist()
        for drawn, flags in zip(expand(bars), expand(exact), strict=True):
            for at in range(0, len(flags), bars.grain):
                chunk = flags[at : at + bars.grain]
                assert drawn[at : at + bars.grain] == [2 * sum(chunk) > len(chunk)] * len(chunk)


@given(sample_lists(), st.integers(1, 12), st.sampled_from([None, 8]))
def test_mask(samples, pixels, multiple):
    packed = treepack.pack(plain(as_arrays(samples)), max_tokens=24, pad_to_multiple_of=multiple)
    for tree in packed:
        mask = mask_of(tree.subtree_end, pixels)
        assert mask.pairs.tolist() == naive.mask_pairs(tree, mask.step)
        assert len(mask.pairs) <= pixels
        assert mask.step == 1 or tree.num_tokens > pixels  # nothing is merged that need not be
        assert mask.shares.max(initial=0) <= 1
        assert ((grey(mask.shares) > 0) == (mask.pairs > 0)).all()


TREES = {
    "agent": synthetic.agent(prompt=700, answers=6, answer=150),
    "multi_turn": synthetic.multi_turn(rollouts=2, turns=3, prompt=300),
    "nothing shared": [{"input_ids": np.arange(700) + 1000 * i} for i in range(3)],
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("pixels", [512, 5, 2, 1])
def test_tiles(name, pixels):
    (tree,) = treepack.pack(TREES[name], max_tokens=65536, pad_to_multiple_of=64)
    kinds = np.array(naive.tiles(tree))
    tiles = tiles_of(tree, pixels)
    assert tiles.side == len(kinds)
    assert (tiles.full, tiles.partial) == ((kinds == "full").sum(), (kinds == "partial").sum())
    assert tiles.full > 0  # else this test would look at nothing
    for share, kind in ((tiles.full_shares, "full"), (tiles.partial_shares, "partial")):
        cuts = range(0, len(kinds), tiles.step)
        cells = [[(kinds[q : q + tiles.step, k : k + tiles.step] == kind).mean() for k in cuts] for q in cuts]
        np.testing.assert_allclose(share, cells, rtol=1e-12)


@given(sample_lists())
def test_histograms(samples):
    packed = treepack.pack(plain(as_arrays(samples)), max_tokens=24)
    lengths = length_histogram(packed)
    for i, value in enumerate(lengths.values):
        bin_of = range(lengths.first + i * lengths.width, lengths.first + (i + 1) * lengths.width)
        assert value == sum(len(sample["input_ids"]) in bin_of for sample in samples)
    assert sum(lengths.values) == len(samples)
    shared = sharing_histogram(packed)
    np.testing.assert_allclose(shared.values, naive.sharing(packed, shared.width), rtol=1e-12)


def test_sharing_in_bins():
    """More depths than bars: several depths to a bar."""
    packed = treepack.pack(synthetic.agent(prompt=300, answers=3, answer=40), max_tokens=4096)
    shared = sharing_histogram(packed)
    assert (shared.width, len(shared.values)) == (10, 34)
    np.testing.assert_allclose(shared.values, naive.sharing(packed, shared.width), rtol=1e-12)


def test_nice_width():
    assert [nice_width(span, 10) for span in (1, 10, 11, 20, 21, 50, 51, 100, 101, 10**6)] == [
        *(1, 1, 2, 2, 5, 5, 10, 10, 20),
        10**5,
    ]


@given(sample_lists(), st.sampled_from([None, 8]))
def test_totals_of_a_list_are_those_of_the_call(samples, multiple):
    packed = treepack.pack(as_arrays(samples), max_tokens=24, pad_to_multiple_of=multiple)
    totals = totals_of(packed, list(packed))
    assert totals_of(list(packed), list(packed)) == totals
    assert totals.packing_ratio == packed.stats.packing_ratio
    assert totals.largest_tree == max((tree.position_source >= 0).sum() for tree in packed)
    assert totals.fill == packed.stats.packed_tokens / len(packed) / totals.largest_tree


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3), (1, 1)])
def test_png(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    data = png(pixels)
    assert data[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + body)
        chunks[name] = body
        at += 12 + length
    height, width, depth, colour = (*struct.unpack(">II", chunks[b"IHDR"][:8])[::-1], *chunks[b"IHDR"][8:10])
    assert (height, width, depth, colour) == (*shape[:2], 8, 2 if len(shape) == 3 else 0)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert (lines[:, 0] == 0).all()
    assert lines[:, 1:].reshape(shape).tolist() == pixels.tolist()


def test_dummy_trees_have_no_segment():
    dummy = treepack.pack([{"input_ids": [1, 2]}], max_tokens=8, ranks=2)[1]
    segments = segments_of(dummy)
    assert len(segments.start) == len(bars_of(segments, 9, 9).parent) == 0
    assert mask_of(dummy.subtree_end, 8).pairs.tolist() == [[0]]
    assert (tiles_of(dummy, 8).full, tiles_of(dummy, 8).partial) == (0, 0)
