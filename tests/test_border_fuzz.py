"""Drawn samples and options for the functions of Rust that pack: what the oracle packs, or an ordinary error, never a
panic (which is no `Exception`). What fuzz/fuzz_targets/pack.rs draws, and what only Python can hand over: wrong types,
dtypes, shapes and strides, numbers that are negative or huge.
"""

from time import perf_counter
from types import SimpleNamespace

import naive
import numpy as np
import pytest
from border_draws import ANYTHING, DTYPES, MORE, NUMBERS, attempt, change
from helpers import as_arrays, assert_same, sample_lists
from hypothesis import event, given
from hypothesis import strategies as st

from treepack import PackError, _core
from treepack.packing.options import PackOptions
from treepack.tree.packed import Packed


@st.composite
def options(draw):
    given = {
        "max_tokens": draw(st.integers(1, 30)),
        "max_terms": draw(st.none() | st.integers(1, 12)),
        "max_kept": draw(st.none() | st.integers(1, 20)),
        "branching": draw(st.sampled_from(["token", "label"])),
        "order": draw(st.sampled_from(["largest_first", "first_seen"])),
        "overlong": draw(st.sampled_from(["raise", "skip", "skip"])),
    }
    multiple = draw(st.sampled_from([None, *(x for x in (1, 3) if x <= given["max_tokens"])]))
    return given, PackOptions(**given, placement="first_fit", pad_to_multiple_of=multiple)


NAMES = ("old_log_probs", "table", "depth")


def formats_of(samples):
    """Row format of each gathered column, by name."""
    arrays = as_arrays(samples)[0]
    found = {name: (arrays[name].dtype, arrays[name].shape[1:]) for name in ("identity", *NAMES) if name in arrays}
    return found | {
        name: (np.dtype(dtype), ()) for name, dtype in (("advantage", "f4"), ("weight", "i8")) if name in arrays
    }


def ready(sample):
    """A sample as `inputs` makes it ready."""
    (arrays,) = as_arrays([sample])
    if "table" in arrays:
        arrays["table"] = arrays["table"].reshape(-1, 2)
    return {name: np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


def columns_of(samples, flat):
    """`Inputs` by its attributes: a list of arrays for each column, or one array with the samples' starts and ends."""
    arrays = list(map(ready, samples))

    def rows(name):
        values = [x[name] for x in arrays]
        if not flat:
            return values
        ends = np.cumsum([0, *map(len, values)])
        return np.concatenate(values), ends[:-1].copy(), ends[1:].copy()

    formats = formats_of(samples)
    widths = {name: dtype.itemsize * int(np.prod(tail)) for name, (dtype, tail) in formats.items()}
    tokens = {name: (name, widths[name], rows(name)) for name in ("identity", *NAMES) if name in formats}
    scalars = [(n, np.array([x[n] for x in arrays], formats[n][0])) for n in ("advantage", "weight") if n in formats]
    kept = "sampling_mask" in arrays[0]
    return SimpleNamespace(
        ids=rows("input_ids"),
        mask=rows("completion_mask") if "completion_mask" in arrays[0] else None,
        identity=tokens.get("identity"),
        kept=(rows("sampling_mask"), rows("sampling_mask_counts")) if kept else None,
        token_columns=list(tokens.values()),
        sample_columns=[(name, widths[name], values, True) for name, values in scalars],
    )


def arguments_of_formats(samples):
    """What `Formats` takes."""
    one, formats = ready(samples[0]), formats_of(samples)
    listed = {name: (name, dtype, list(tail)) for name, (dtype, tail) in formats.items()}
    tokens = [name for name in ("identity", *NAMES) if name in formats]
    kept = (("sampling_mask", np.dtype("i4"), []), ("sampling_mask_counts", np.dtype("i4"), []))
    return (
        ("input_ids", np.dtype("i8"), []),
        ("completion_mask", np.dtype("u1"), []) if "completion_mask" in one else None,
        kept if "sampling_mask" in one else None,
        [listed[name] for name in tokens],
        [(listed[name], True) for name in ("advantage", "weight") if name in formats],
        tokens.index("identity") if "identity" in tokens else None,
    )


def expected(samples, given, options):
    """What the oracle says: a forest, or the sample that is too long."""
    try:
        return naive.pack(samples, **given, pad_to_multiple_of=options.pad_to_multiple_of)
    except naive.TooLong as error:
        return error


def check_trees(trees, samples, given, options):
    wanted = expected(samples, given, options)
    assert not isinstance(wanted, naive.TooLong)
    assert_same(Packed(trees, formats_of(samples), options, perf_counter()), wanted, given["branching"])


def look(trees):
    """Read everything that trees have."""
    for index in range(len(trees)):
        size = len(trees.buffer(index))
        assert all(0 <= offset <= size for offset, _ in trees.fields(index).values())
        trees.disagreements(index)
    trees.stats(), trees.skipped()
    for index in (len(trees), -1, 2**63, 2**64, None, "0"):
        for method in (trees.buffer, trees.fields, trees.disagreements):
            with pytest.raises((IndexError, OverflowError, TypeError)):
                method(index)


@MORE
@given(sample_lists(), options(), st.booleans())
def test_columns_agree_with_the_oracle(samples, drawn, flat):
    given, options = drawn
    wanted = expected(samples, given, options)
    if isinstance(wanted, naive.TooLong):
        with pytest.raises(PackError) as caught:
            _core.pack(columns_of(samples, flat), options.for_rust())
        assert (caught.value.sample, caught.value.budget) == (wanted.sample, wanted.budget)
        return
    trees = _core.pack(columns_of(samples, flat), options.for_rust())
    check_trees(trees, samples, given, options)
    look(trees)


@MORE
@given(sample_lists(), options())
def test_dicts_agree_with_the_oracle(samples, drawn):
    given, options = drawn
    dicts, formats = list(map(ready, samples)), _core.Formats(*arguments_of_formats(samples))
    wanted = expected(samples, given, options)
    trees, refused = attempt(lambda: _core.pack_ready(dicts, formats, options.for_rust()))
    assert refused == isinstance(wanted, naive.TooLong)
    if trees is not None:
        check_trees(trees, samples, given, options)
    stream = _core.PackStream(options.for_rust())
    seen = skipped = 0
    for sample in dicts:
        added, refused = attempt(lambda sample=sample: stream.add(sample, formats))
        if refused:
            continue
        assert added is not None  # every column is ready
        closed, left_out = added
        skipped += left_out is not None
        seen += closed.stats()["samples"] if closed is not None else 0
    closed = stream.flush()
    seen += closed.stats()["samples"] if closed is not None else 0
    too_long = [bool(expected([s], {**given, "overlong": "skip"}, options).skipped) for s in samples]
    assert seen == len(samples) - sum(too_long)
    assert skipped == (sum(too_long) if given["overlong"] == "skip" else 0)
    assert stream.flush() is None


@MORE
@given(st.data())
def test_columns_with_anything_in_them(data):
    samples = data.draw(sample_lists(max_samples=3))
    (_, options_), flat = data.draw(options()), data.draw(st.booleans())
    columns, keywords = columns_of(samples, flat), options_.for_rust()
    replacement = data.draw(st.one_of(ANYTHING, NUMBERS))
    if data.draw(st.integers(0, 4)):
        columns = change(data.draw, columns, replacement)
    else:
        keywords = change(data.draw, keywords, replacement)
    trees, refused = attempt(lambda: _core.pack(columns, keywords))
    event("refused" if refused else "packed")
    if trees is not None:
        look(trees)
    stream, refused = attempt(lambda: _core.PackStream(keywords))
    if stream is not None:
        _, refused = attempt(lambda: stream.add_columns(columns))
        closed = stream.flush()
        assert closed is None or not refused
        if closed is not None:
            look(closed)


@MORE
@given(st.data())
def test_dicts_with_anything_in_them(data):
    samples = data.draw(sample_lists(max_samples=3))
    _, options_ = data.draw(options())
    dicts, arguments, keywords = list(map(ready, samples)), arguments_of_formats(samples), options_.for_rust()
    replacement = data.draw(st.one_of(ANYTHING, NUMBERS, st.sampled_from(DTYPES).map(np.dtype)))
    if data.draw(st.booleans()):
        dicts = change(data.draw, dicts, replacement)
    else:
        arguments = change(data.draw, arguments, replacement)
    formats, refused = attempt(lambda: _core.Formats(*arguments))
    if formats is None:
        return
    trees, refused = attempt(lambda: _core.pack_ready(dicts, formats, keywords))
    event("refused" if refused else "not ready" if trees is None else "packed")
    if trees is not None:
        look(trees)
    stream = _core.PackStream(keywords)
    for sample in dicts if isinstance(dicts, list) else [dicts]:
        attempt(lambda sample=sample: stream.add(sample, formats))
    closed = stream.flush()
    if closed is not None:
        look(closed)
