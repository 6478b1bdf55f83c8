"""Drawn arguments for the functions of Rust that look at lists, masks and tiles, against plain Python."""

import itertools

import naive
import numpy as np
from border_draws import ANYTHING, BITS, DTYPES, MORE, NUMBERS, ODD, arrays, attempt
from helpers import sample_lists
from hypothesis import given
from hypothesis import strategies as st

from treepack import _core

KEYS = st.sampled_from(["a", "b", "", "\n", "\ud800", 1, None, (1, 2), b"a"])


@given(
    st.lists(st.dictionaries(KEYS, st.integers(), max_size=3) | st.sampled_from(ODD), max_size=4),
    st.lists(KEYS, max_size=2, unique=True),
)
def test_columns_of_dicts(samples, optional):
    found, refused = attempt(lambda: _core.columns(samples, optional))
    if not samples:
        assert found == {}
        return
    names = [*samples[0], *(x for x in optional if x not in samples[0])] if isinstance(samples[0], dict) else []
    right = all(type(x) is dict and {*names}.difference(optional) <= x.keys() <= {*names} for x in samples)
    assert refused != right
    if right:
        used = [name for name in names if any(name in x for x in samples)]
        assert found == {name: [x.get(name) for x in samples] for name in used}


@given(
    st.lists(arrays() | st.sampled_from(ODD), max_size=4),
    st.sampled_from(DTYPES).map(np.dtype),
    st.lists(NUMBERS, max_size=2),
    NUMBERS,
)
def test_the_first_that_is_not_ready(values, dtype, tail, start):
    found, refused = attempt(lambda: _core.first_unready(values, dtype, tail, start))
    if start < 0 or start >= 2**64 or any(x < 0 or x >= 2**64 for x in tail):
        assert refused
        return

    def is_ready(x):
        if type(x) is not np.ndarray or x.ndim == 0 or x.dtype != dtype or x.shape[1:] != tuple(tail):
            return False
        return x.flags.c_contiguous and x.flags.aligned

    assert found == next((i for i in range(start, len(values)) if not is_ready(values[i])), len(values))


# ------------------------------------------------------------------------------------------------- masks and tiles


@st.composite
def masks(draw):
    """Rows of 0 and 1 of any integer dtype, most of them without a hole; now and then another value."""
    rows, width = draw(st.integers(0, 4)), draw(st.sampled_from([0, 1, 2, 5, 33, 70]))
    mask = np.zeros((rows, width), draw(st.sampled_from(BITS)))
    for row in mask:
        start, end = sorted(draw(st.tuples(st.integers(0, width), st.integers(0, width))))
        row[start:end] = 1
    for _ in range(draw(st.sampled_from([0, 0, 1])) if mask.size else 0):
        mask.flat[draw(st.integers(0, mask.size - 1))] = draw(st.sampled_from([0, 1, 2, 127]))
    return mask


def spans_of(mask):
    """(start, end) of the tokens of each row, in plain Python; None where there is none."""
    out = []
    for at, row in enumerate(mask.tolist()):
        ones = [i for i, x in enumerate(row) if x]
        if any(x not in (0, 1) for x in row) or (ones and ones[-1] - ones[0] + 1 != len(ones)):
            return None
        first = at * len(row) + (ones[0] if ones else len(row))
        out.append((first, first + len(ones)))
    return out if not len(mask) or mask.shape[1] else None


@MORE
@given(masks() | arrays(), st.data())
def test_masks(mask, data):
    plain = mask.dtype.kind in "iub" and mask.flags.c_contiguous and mask.flags.aligned and mask.dtype.isnative
    found, refused = attempt(lambda: _core.token_spans(mask))
    assert refused != plain
    if plain and mask.ndim == 2 and mask.size < 1000 and len(mask) < 1000:
        assert (found and list(zip(*map(np.ndarray.tolist, found), strict=True))) == spans_of(mask)
    flat = mask.reshape(-1) if plain else mask
    cuts = data.draw(st.lists(st.integers(0, max(flat.size, 1)), max_size=6).map(sorted))
    starts, ends = np.array(cuts[: len(cuts) // 2 * 2 : 2], np.int64), np.array(cuts[1::2], np.int64)
    if data.draw(st.integers(0, 5)) == 0:
        starts, ends = data.draw(st.tuples(ANYTHING, ANYTHING))
        attempt(lambda: _core.mask_bytes(flat, starts, ends))
        return
    found, refused = attempt(lambda: _core.mask_bytes(flat, starts, ends))
    inside = all(b <= flat.size for b in ends.tolist())
    assert refused != (plain and inside)
    if not refused:
        values = [x for a, b in zip(starts, ends, strict=True) for x in flat[a:b].tolist()]
        assert (None if found is None else found.tolist()) == (values if all(x in (0, 1) for x in values) else None)


@MORE
@given(sample_lists(columns=False, sets=False), st.sampled_from([1, 2, 3, 8, 64, 2**63, 2**64 - 1]), st.integers(0, 5))
def test_tile_lists_by_brute_force(samples, tile, padding):
    forest = naive.pack(samples, max_tokens=1000)
    cuts, ends = forest.trees[0]["cu_segments"], forest.trees[0]["subtree_end"]
    real = len(ends)
    ends = [*ends, *range(real, real + padding)]
    rows, items = _core.tile_lists(np.array(cuts, np.int32), np.array(ends, np.int32), tile)
    rows, items = rows.reshape(-1, 4).tolist(), items.tolist()
    tiles = [range(first, min(first + tile, len(ends))) for first in range(0, len(ends), tile)]
    assert len(rows) == len(tiles)
    for queries, (start, runs, fulls, partials) in zip(tiles, rows, strict=True):
        of_runs = [n for r in range(runs) for n in range(*items[start + 2 * r : start + 2 * r + 2])]
        others = items[start + 2 * runs : start + 2 * runs + partials]
        assert len(of_runs) == fulls
        assert of_runs == sorted(of_runs)
        assert others == sorted(others)
        cells = [[[k <= q < ends[k] and q < real for k in keys] for q in queries] for keys in tiles]
        visible = [n for n, of in enumerate(cells) if any(map(any, of))]
        assert set(visible) <= {*of_runs, *others}
        assert all(all(map(all, cells[n])) for n in of_runs)
        assert not set(of_runs) & set(others)


ENDS = st.integers(-3, 12) | st.sampled_from([2**31 - 1, -(2**31)])


@MORE
@given(ANYTHING | arrays(), ANYTHING | arrays(), NUMBERS)
def test_tile_lists_of_anything(cuts, ends, tile):
    attempt(lambda: _core.tile_lists(cuts, ends, tile))


@MORE
@given(
    st.lists(st.integers(-3, 12), max_size=6),
    st.lists(st.integers(-3, 12) | st.sampled_from([2**31 - 1, -(2**31)]), max_size=12),
    NUMBERS,
)
def test_tile_lists_of_any_numbers(cuts, ends, tile):
    lists, refused = attempt(lambda: _core.tile_lists(np.array(cuts, np.int32), np.array(ends, np.int32), tile))
    rising = cuts[:1] == [0] and all(a <= b for a, b in itertools.pairwise(cuts)) and cuts[-1] <= len(ends)
    assert refused != (rising and 0 < tile < 2**64)
    if lists is not None:
        assert len(lists[0]) == 4 * -(-len(ends) // tile)


@given(NUMBERS, NUMBERS)
def test_the_work(pairs, tokens):
    found, refused = attempt(lambda: _core.work(pairs, tokens))
    right = all(0 <= x < 2**64 for x in (pairs, tokens))
    assert refused != right
    assert not right or found == min(pairs + 8192 * tokens, 2**64 - 1)


@st.composite
def segment_trees(draw):
    """`cu_segments` and `segment_parent` of a forest."""
    lengths = draw(st.lists(st.integers(1, 6), max_size=6))
    parents = [draw(st.integers(-1, segment - 1)) for segment in range(len(lengths))]
    return np.cumsum([0, *lengths]).astype(np.int32), np.array(parents, np.int32)


@given(segment_trees() | st.tuples(arrays(), arrays()) | st.tuples(*2 * [st.sampled_from(ODD)]), NUMBERS, NUMBERS)
def test_cuts_into_ranges(tree, max_rows, max_ancestors):
    found, refused = attempt(lambda: _core.cut_rows(*tree, max_rows, max_ancestors))
    if not refused and found[0] is not None:
        cuts, rows = found[0].tolist(), int(tree[0][-1])
        assert (cuts[0], cuts[-1]) == (0, rows)
        assert all(0 < b - a <= max_rows for a, b in itertools.pairwise(cuts))


def test_every_name_is_drawn_for():
    """A function that is exported tomorrow gets its arguments here or in test_border_fuzz.py."""
    drawn = {
        "columns",
        "cut_rows",
        "first_unready",
        "mask_bytes",
        "pack",
        "pack_ready",
        "tile_lists",
        "token_spans",
        "work",
    }
    drawn |= {"Formats", "PackStream", "PackedTrees"}
    exported = {name for name in dir(_core) if not name.startswith("_")}
    assert exported - {"ALIGN", "ARRAYS", "TILE_SIZES", "PackError"} == drawn
    assert {x for x in dir(_core.PackStream) if x[0] != "_"} == {"add", "add_columns", "flush"}
    assert {x for x in dir(_core.PackedTrees) if x[0] != "_"} == {
        "buffer",
        "fields",
        "disagreements",
        "stats",
        "skipped",
    }
