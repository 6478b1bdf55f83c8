"""What several test files share: samples from hypothesis, their array forms, and the comparison with the oracle."""

from functools import partial

import numpy as np
from hypothesis import strategies as st

import treepack
from treepack import _core

# The placement of the oracle: each sample into the first tree that holds it. What does not depend on the placement
# calls `treepack.pack` with its default.
first_fit = partial(treepack.pack, placement="first_fit")

# The arrays that every tree has, and their dtypes; test_border_core.py compares the list with docs/layout.md.
ARRAYS = {name: np.dtype(dtype) for name, dtype, _, when in _core.ARRAYS if when != "label branching"}
COUNTS = (
    "samples",
    "raw_tokens",
    "packed_tokens",
    "trees",
    "terms",
    "kept_ids",
    "skipped",
    "padding",
    "attention_pairs",
    "attention_pairs_alone",
)

# ------------------------------------------------------------------------------------------------------- samples


@st.composite
def id_lists(draw, max_samples=7, max_length=7, alphabet=3):
    """Token ids that share a lot: fresh ones, prefixes, extensions, forks and duplicates of earlier ones."""
    token = st.integers(0, alphabet - 1)
    out = []
    for _ in range(draw(st.integers(1, max_samples))):
        tail = draw(st.lists(token, max_size=4))
        if out and draw(st.booleans()):
            base = out[draw(st.integers(0, len(out) - 1))]
            ids = base[: draw(st.integers(0, len(base)))] + tail
        else:
            ids = tail
        out.append((ids or [draw(token)])[:max_length])
    return out


@st.composite
def sample_lists(draw, max_samples=7, sets=None, identity=None, columns=True):
    """Samples as dicts of plain lists (what the oracle reads); every column is there in all samples or in none."""
    ids = draw(id_lists(max_samples=max_samples))
    with_mask = draw(st.booleans())
    with_sets = draw(st.booleans()) if sets is None else sets
    width = draw(st.sampled_from([0, 0, 1, 2])) if identity is None else identity
    value = st.integers(-8, 8).map(lambda x: x / 8)
    out = []
    for number, x in enumerate(ids):
        sample = {"input_ids": x}
        n = len(x)
        if with_mask:
            sample["completion_mask"] = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        if width == 1:
            sample["identity"] = draw(st.lists(st.integers(-1, 0), min_size=n, max_size=n))
        if width == 2:
            sample["identity"] = draw(st.lists(st.tuples(st.just(5), st.integers(0, 1)), min_size=n, max_size=n))
        if with_sets and draw(st.integers(0, 4)):
            kept, counts = draw(kept_for(sample))
            sample["sampling_mask"], sample["sampling_mask_counts"] = kept, counts
        elif with_sets:
            sample["sampling_mask"], sample["sampling_mask_counts"] = [], [0] * n
        if columns:
            sample["old_log_probs"] = draw(st.lists(value, min_size=n, max_size=n))
            sample["advantage"] = draw(value)
            sample["table"] = [[i, number] for i in range(n)]
            sample["depth"] = list(range(n))  # samples that share a position always agree on it
            sample["weight"] = number
        out.append(sample)
    return out


@st.composite
def kept_for(draw, sample):
    """Kept ids and counts of one sample: trained tokens carry their target, others now and then a set for nothing."""
    ids = sample["input_ids"]
    mask = sample.get("completion_mask", [1] * len(ids))
    kept, counts = [], []
    for i, token in enumerate(ids):
        others = draw(st.lists(st.integers(0, 4), unique=True, max_size=3))
        if mask[i] and i > 0:
            others = [x for x in others if x != token]
            others.insert(draw(st.integers(0, len(others))), token)
        kept += others
        counts.append(len(others))
    return kept, counts


def plain(samples):
    """Only what the packer knows by name, without further columns."""
    known = ("input_ids", "completion_mask", "identity", "sampling_mask", "sampling_mask_counts")
    return [{name: sample[name] for name in known if name in sample} for sample in samples]


def as_arrays(samples, ids=np.int64, mask=np.uint8, kept=np.int32, counts=np.int32):
    """The same samples as NumPy arrays, with a dtype for each kind of column."""
    dtypes = {
        "input_ids": ids,
        "completion_mask": mask,
        "identity": np.int64,
        "old_log_probs": np.float32,
        "table": np.int16,
        "depth": np.int64,
        "sampling_mask": kept,
        "sampling_mask_counts": counts,
    }
    return [
        {name: np.array(value, dtype=dtypes[name]) if name in dtypes else value for name, value in sample.items()}
        for sample in samples
    ]


# ---------------------------------------------------------------------------------------------------- comparison


def arrays_of(tree):
    """Every array of a tree by name."""
    names = list(ARRAYS)
    if getattr(tree, "shift_labels", None) is not None:
        names.append("shift_labels")
    return {name: getattr(tree, name) for name in names}


def image(packed):
    """All bytes of a result, with dtype and shape: equal images are equal results."""
    out = [tuple(tuple(x) for x in packed.skipped)]
    for tree in packed:
        arrays = dict(arrays_of(tree))
        arrays.update({f"terms.{name}": tree.terms[name] for name in sorted(tree.terms)})
        arrays.update({f"samples.{name}": tree.samples[name] for name in sorted(tree.samples)})
        out.append({name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()})
    return out


def assert_same(packed, forest, branching="token"):
    """Every array, column, count and left-out sample of `packed` against the oracle's `forest`."""
    assert len(packed) == len(forest.trees)
    for tree, expected in zip(packed, forest.trees, strict=True):
        for name, dtype in ARRAYS.items():
            array = getattr(tree, name)
            assert isinstance(array, np.ndarray), name
            assert (array.dtype, array.ndim) == (dtype, 1), name
            assert array.tolist() == expected[name], name
        if branching == "label":
            assert tree.shift_labels.dtype == np.int64
            assert tree.shift_labels.tolist() == expected["shift_labels"]
        assert tree.num_tokens == len(expected["input_ids"])
        for name, values in expected["terms"].items():
            assert tree.terms[name].tolist() == values, f"terms[{name}]"
        for name, values in expected["samples"].items():
            assert tree.samples[name].tolist() == values, f"samples[{name}]"
        for name, values in expected["positions"].items():
            if values is not None:
                assert tree.positions[name][: expected["real"]].tolist() == values, f"positions[{name}]"
    assert [x.sample for x in packed.skipped] == forest.skipped
    assert {name: getattr(packed.stats, name) for name in COUNTS} == forest.stats


def flat(samples, names=("input_ids",)):
    """A flat batch: the named per-token columns end to end, with `cu_seqlens`."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {name: np.concatenate([np.asarray(sample[name]) for sample in samples]) for name in names}
    batch["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return batch


def says(error, *parts):
    """The message of a caught error holds every part: which sample, what it has, what is allowed."""
    message = str(error.value)
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"
