"""Samples in every container, padded and flat batches, tables of pandas and pyarrow, columns of lists: the terms that
plain Python says, or an error that names the column, and the sample where it is of one.
"""

import itertools
import re

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from test_door_fuzz import MORE, Verdict, refusal, rows, same, terms_of

import treepack

BITS = st.integers(0, 1)


@st.composite
def alike(draw):
    """A few samples with the same columns, all of them right."""
    names = draw(st.sets(st.sampled_from(["completion_mask", "old_log_probs", "advantage", "depth"])))
    if "depth" in names:
        names.add("completion_mask")  # integers for each token are known to be no mask by it
    out = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 5))

        def each(values, length=length):
            return draw(st.lists(values, min_size=length, max_size=length))

        full = {
            "input_ids": each(st.integers(5, 7)),
            "completion_mask": each(BITS),
            "old_log_probs": each(st.floats(-4, 0, width=16)),
            "advantage": draw(st.floats(-2, 2, width=16)),
            "depth": list(range(length)),
        }
        out.append({name: value for name, value in full.items() if name == "input_ids" or name in names})
    return out


def assert_right(samples, packed):
    """Each sample has its ids, its trained tokens and its values there."""
    for sample, (ids, trained, terms) in zip(samples, terms_of(packed), strict=True):
        verdict = Verdict.of(sample)
        assert not verdict.unsure
        assert (ids, trained) == (verdict.ids, verdict.trained)
        assert all(same(values, verdict.terms[name]) for name, values in terms.items())
        assert not trained or terms.keys() == verdict.terms.keys()


@st.composite
def padded(draw, samples):
    """The batch and its right columns: padding on either side, or all over, with anything in it."""
    spare = draw(st.integers(0, 3))
    width = max(len(x["input_ids"]) for x in samples) + spare
    places = []
    for sample in samples:
        free = width - len(sample["input_ids"])
        side = draw(st.sampled_from(["left", "right", "around", "holes"]))
        if side == "holes":
            holes = draw(st.permutations(range(width)))[:free]
            places.append([at for at in range(width) if at not in holes])
        else:
            start = {"left": free, "right": 0, "around": free // 2}[side]
            places.append(list(range(start, start + len(sample["input_ids"]))))
    dtype = draw(st.sampled_from(["u1", "i4", "i8", "?", "u8"]))
    batch = {"attention_mask": np.zeros((len(samples), width), dtype)}
    for row, at in enumerate(places):
        batch["attention_mask"][row, at] = 1
    for name, value in samples[0].items():
        if not isinstance(value, list):
            batch[name] = np.array([x[name] for x in samples], np.float32)
            continue
        kind = np.float32 if name == "old_log_probs" else np.int64
        fill = draw(st.sampled_from([0, 1, -1, -100, 2**40] if kind == np.int64 else [0, np.nan, -np.inf]))
        batch[name] = np.full((len(samples), width), fill, kind)
        for row, at in enumerate(places):
            batch[name][row, at] = samples[row][name]
    return batch, places


def flat(samples):
    batch = {"cu_seqlens": np.cumsum([0, *(len(x["input_ids"]) for x in samples)])}
    for name, value in samples[0].items():
        values = [x[name] for x in samples]
        batch[name] = np.concatenate(values) if isinstance(value, list) else np.array(values, np.float32)
    return batch


PER = {"per_token": ["depth"]}


def of_flat(batch):
    return {name: [x for x in listed if x in batch] for name, listed in PER.items()}


@MORE
@given(alike(), st.data())
def test_every_container_gives_the_same_terms(samples, data):
    batch, _ = data.draw(padded(samples))
    assert_right(samples, treepack.pack(batch, max_tokens=64))
    if data.draw(st.booleans()):
        batch = {name: value.tolist() for name, value in batch.items()}
        assert_right(samples, treepack.pack(batch, max_tokens=64))
    one = flat(samples)
    assert_right(samples, treepack.pack(one, max_tokens=64, **of_flat(one)))
    packer = treepack.Packer(max_tokens=64)
    closed = [packer.add(sample) for sample in samples]
    assert closed == [[]] * len(samples)
    ((tree,),) = packer.flush()
    assert [x.tolist() for x in tree.unpack(tree.input_ids)] == [x["input_ids"] for x in samples]
    trained = [[x["input_ids"][i] for i in Verdict.of(x).trained] for x in samples]
    assert [x.tolist() for x in tree.unpack_terms(tree.term_target)] == trained


@MORE
@given(alike())
def test_every_table_gives_the_same_terms(samples):
    columns = {name: [x[name] for x in samples] for name in samples[0]}
    if len({len(x["input_ids"]) for x in samples}) > 1:
        assert_right(samples, treepack.pack(columns, max_tokens=64))
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    table = pyarrow.table(columns)
    frames = [pandas.DataFrame(samples), pandas.DataFrame(columns), table.to_pandas(), table, table.to_batches()[0]]
    for frame in frames:
        assert_right(samples, treepack.pack(frame, max_tokens=64))


@MORE
@given(alike(), st.data())
def test_a_table_with_anything_in_it(samples, data):
    """As the rows that Arrow and pandas make of it in Python."""
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    at, name = data.draw(st.integers(0, len(samples) - 1)), data.draw(st.sampled_from([*samples[0], "loss_mask", "x"]))
    values = rows(len(samples[at]["input_ids"]))
    value = data.draw(st.one_of(values, st.sampled_from([None, 0, "a", [], {"a": 1}, 2**70])))
    if name not in samples[0]:
        samples = [{**x, name: [1] * len(x["input_ids"])} for x in samples]
    samples[at] = {**samples[at], name: value}
    tables = [pandas.DataFrame(samples)]
    try:
        tables.append(pyarrow.Table.from_pylist([{n: listed(v) for n, v in x.items()} for x in samples]))
    except (pyarrow.ArrowException, OverflowError, TypeError):
        event("no table")
    for table in tables:
        plain = table.to_pylist() if hasattr(table, "to_pylist") else table.to_dict("records")
        packed, text = refusal(lambda table=table: treepack.pack(table, max_tokens=64))
        wanted, said = refusal(lambda plain=plain: treepack.pack(plain, max_tokens=64))
        event("packed" if text is None else "refused")
        if said is not None and text is None and re.search("Python floats become float32|has dtype object", said):
            continue  # a column of a table has a dtype of its own: floats keep it, objects are read as what they are
        assert (text is None) == (said is None), (text, said)
        if text is None:
            assert all(map(same, terms_as_lists(packed), terms_as_lists(wanted)))
        else:
            assert "\n" not in text
            assert "sample " in text


def listed(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def terms_as_lists(packed):
    return [[ids, trained, *(terms[name] for name in sorted(terms))] for ids, trained, terms in terms_of(packed)]


def with_cell(column, at, value):
    out = column.copy()
    out[at] = value
    return out


@MORE
@given(alike(), st.data())
def test_a_batch_with_a_fault(samples, data):
    """What is wrong of a column is said with its name; of one value, with the sample as well."""
    (batch, places), draw = data.draw(padded(samples)), data.draw
    call = {}
    if draw(st.booleans()):
        batch = flat(samples)
        cuts = batch["cu_seqlens"].tolist()
        places = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
        call = of_flat(batch)
    is_flat = "cu_seqlens" in batch
    row = draw(st.integers(0, len(samples) - 1))
    cell = draw(st.sampled_from(places[row]))
    at = cell if is_flat else (row, cell)
    name, sample = draw(st.sampled_from(list(batch))), None
    fault = draw(st.sampled_from(["value", "dtype", "shape", "kind", "missing"]))
    column = batch[name]
    if fault == "value":
        name, value, sample = draw(
            st.sampled_from([("input_ids", -1, row), ("input_ids", 2**31, row), ("completion_mask", 2, row)])
        )
        if name not in batch:
            return
        batch[name] = with_cell(batch[name], at, value)
    elif fault == "dtype":
        if name in ("old_log_probs", "advantage", "depth"):
            batch[name] = column.astype(draw(st.sampled_from(["U3", "O", "M8[s]"])), casting="unsafe")
            if batch[name].dtype.kind == "O":
                batch[name].flat[0] = None
        else:
            batch[name] = column.astype(draw(st.sampled_from(["f4", "U3", "c8"])))
    elif fault == "shape":
        batch[name] = draw(st.sampled_from([column[:-1], np.concatenate([column, column[:1]])]))
    elif fault == "kind":
        batch[name] = draw(st.sampled_from([None, "abc", {}, object(), 3.5, [[1], [1, 2], [[3]]], np.array(None)]))
    else:
        name = draw(st.sampled_from([n for n in ("input_ids", "attention_mask", "cu_seqlens") if n in batch]))
        del batch[name]
        if is_flat and name == "cu_seqlens":
            name = "input_ids"  # of one axis, which is no padded batch
    if fault in ("shape", "kind") and name in ("input_ids", "attention_mask", "cu_seqlens"):
        name = ""  # said of what does not fit to it
    _, text = refusal(lambda: treepack.pack(batch, max_tokens=64, **call))
    event(fault)
    assert text is not None
    assert "\n" not in text
    assert name in text
    assert sample is None or f"sample {sample}" in text


@MORE
@given(alike(), st.data())
def test_offsets_that_are_none(samples, data):
    batch = flat(samples)
    total, cuts = len(batch["input_ids"]), batch["cu_seqlens"]
    at = data.draw(st.integers(0, len(cuts) - 1))
    changed = cuts.copy()
    changed[at] = data.draw(st.integers(-2, total + 2) | st.sampled_from([2**31, 2**62, -(2**63)]))
    batch["cu_seqlens"] = data.draw(st.sampled_from([changed, changed.tolist(), changed[::-1], cuts[:-1], cuts[1:]]))
    given_ = np.asarray(batch["cu_seqlens"]).tolist()
    right = given_[:1] == [0] and given_[-1] == total and all(a < b for a, b in itertools.pairwise(given_))
    batch.pop("advantage", None)  # one for each sample
    packed, text = refusal(lambda: treepack.pack(batch, max_tokens=64, **of_flat(batch)))
    assert (text is None) == right, text
    if right:
        found = [x.tolist() for x in packed.unpack([tree.input_ids for tree in packed])]
        assert found == [batch["input_ids"][a:b].tolist() for a, b in itertools.pairwise(given_)]
    else:
        assert "cu_seqlens" in text or "sample " in text
