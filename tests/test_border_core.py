"""What Rust exports: the arrays of a tree, tile sizes, the formula of the work. And nothing handed to it panics."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import treepack
from treepack import _core

LAYOUT = next(path for folder in Path(__file__).parents if (path := folder / "docs" / "layout.md").is_file())


def test_the_arrays_are_those_of_the_page():
    """docs/layout.md and the docstrings say of each array what it has a row for and its dtype; Rust makes them so."""
    page = {}
    for line in LAYOUT.read_text().splitlines():
        names, shapes = (
            re.findall(r"`(\w+)`", line.split("|")[1] if line.startswith("| `") else ""),
            line.split("|")[2:3],
        )
        found = re.fullmatch(r" ((?:\([\w+]+,\)(?:, )?)+) (int\d+) ", shapes[0]) if names else None
        lengths = re.findall(r"\(([\w+]+),\)", found[1]) if found else []
        page |= {name: (found[2], lengths[min(at, len(lengths) - 1)]) for at, name in enumerate(names) if found}
    arrays = {name: (dtype, length) for name, dtype, length, _ in _core.ARRAYS}
    assert page == arrays
    assert len(arrays) == 19
    for name, (dtype, length) in arrays.items():
        described = getattr(treepack.PackedTree, name).__doc__.replace(" + ", "+")
        assert described.startswith(f"({length},) {dtype}: "), name


@pytest.mark.parametrize("branching", ["token", "label"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_tree_has_the_arrays_that_rust_names(branching, kept):
    given = [{"input_ids": x, "completion_mask": [0, 1, 0]} for x in ([5, 6, 7], [5, 6, 8], [9, 9, 9])]
    if kept:
        given = [{**x, "sampling_mask": [x["input_ids"][1], 1], "sampling_mask_counts": [0, 2, 0]} for x in given]
    (tree,) = treepack.pack(given, max_tokens=64, branching=branching, pad_to_multiple_of=16)
    there = {"always": True, "label branching": branching == "label", "kept sets": kept}
    wanted = [(name, dtype, length) for name, dtype, length, when in _core.ARRAYS if there[when]]
    assert [name for name in tree._fields if "." not in name] == [name for name, *_ in wanted]
    segments = len(tree.cu_segments) - 1
    sizes = {
        "N": 16,
        "S": segments,
        "n": 3,
        "R": len(tree.row_position),
        "M": 3,
        "T": 2 * len(tree.row_position) * kept,
    }
    sizes |= {"S+1": segments + 1, "n+1": 4}
    for name, dtype, length in wanted:
        array = getattr(tree, name)
        assert (array.dtype, array.shape) == (np.dtype(dtype), (sizes[length],)), name


def test_one_formula_and_one_list_of_tile_sizes():
    assert _core.work(10, 3) == 10 + 8192 * 3
    assert _core.work(2**64 - 1, 2**60) == 2**64 - 1  # and no panic
    assert _core.TILE_SIZES == (128, 64)
    (tree,) = treepack.pack([{"input_ids": np.arange(300)}], max_tokens=300)
    assert tuple(tree.tiles) == _core.TILE_SIZES
    assert tree.input_ids.ctypes.data % _core.ALIGN == 0


ID, BYTE = np.dtype(np.int64), np.dtype(np.uint8)


def columns(ids, **others):
    """What Python hands to Rust, by its attributes."""
    absent = {"mask": None, "identity": None, "kept": None, "token_columns": [], "sample_columns": []}
    return SimpleNamespace(ids=ids, **absent | others)


@pytest.mark.parametrize(
    "arguments",
    [
        (("input_ids", np.dtype(np.int32), []), None, None, [], [], None),
        (("input_ids", ID, [2]), None, None, [], [], None),
        (("input_ids", ID, []), ("completion_mask", ID, []), None, [], [], None),
        (("input_ids", ID, []), None, (("sampling_mask", ID, []), ("sampling_mask_counts", BYTE, [])), [], [], None),
        (("input_ids", ID, []), None, None, [("x", ID, [2**62, 2])], [], None),
        (("input_ids", ID, []), None, None, [("x", ID, [])], [], 1),
    ],
)
def test_formats_that_make_no_sense_are_refused(arguments):
    with pytest.raises(TypeError):
        _core.Formats(*arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (columns([np.arange(8)], token_columns=[("x", 2**61, [np.zeros(0, BYTE)])]), "x has 0 rows; input_ids has 8"),
        (
            columns([np.arange(8)], token_columns=[("x", 3, [np.zeros(8, BYTE)])]),
            "x has 2 rows; input_ids has 8 tokens",
        ),
        (columns([np.arange(8)], mask=[]), "completion_mask has values for 0 samples; the call has 1 samples"),
        (columns([np.arange(8)], mask=[np.ones(7, BYTE)]), "sample 0: completion_mask has 7 rows; input_ids has 8"),
        (
            columns([np.arange(8)], sample_columns=[("x", 0, np.zeros(0), True)]),
            "x has values for 0 samples; the call ",
        ),
        (columns([np.arange(8)], kept=([], [np.zeros(8, np.int32)])), "sampling_mask has values for 0 samples"),
        (columns((np.arange(8), np.array([0, 4]), np.array([4, 9]))), "the samples do not lie within the rows"),
        (columns((np.arange(8), np.array([0, -1]), np.array([4, 8]))), "the samples do not lie within the rows"),
        (columns((np.arange(8), np.array([0]), np.array([4, 8]))), "the samples do not lie within the rows"),
    ],
)
def test_columns_that_do_not_fit_together_never_panic(given, message):
    keywords = dict.fromkeys(("label_branching", "first_seen", "first_fit", "skip_overlong"), False)
    keywords |= {"max_terms": None, "max_kept": None, "vocab_size": None}
    keywords |= {"max_tokens": 16, "pad_to_multiple_of": 1, "ranks": 1}
    with pytest.raises(treepack.PackError, match=re.escape(message)):
        _core.pack(given, keywords)
    stream = _core.PackStream(keywords)
    with pytest.raises(treepack.PackError):
        stream.add_columns(given)


def test_lists_are_lists():
    """Of any other sequence as much memory would be asked for as it says that it is long, and the process ended."""
    many = np.zeros((2**40, 0), np.uint8)
    keywords = treepack.packing.options.PackOptions(max_tokens=16).for_rust()
    none = (("input_ids", ID, []), None, None, [], [], None)
    calls = [
        lambda: _core.pack(columns([np.arange(8)], token_columns=many), keywords),
        lambda: _core.pack(columns([np.arange(8)], sample_columns=many), keywords),
        lambda: _core.pack(columns(many), keywords),
        lambda: _core.pack_ready(many, _core.Formats(*none), keywords),
        lambda: _core.Formats(*none[:3], many, [], None),
        lambda: _core.Formats(*none[:4], many, None),
        lambda: _core.Formats(("input_ids", ID, many), *none[1:]),
        lambda: _core.columns([{"input_ids": 1}], many),
        lambda: _core.first_unready([1], ID, many, 0),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
