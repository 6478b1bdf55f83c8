"""Samples of any names, dtypes, shapes and nulls: the terms that an oracle in plain Python expects, or an error that
says which sample and which column. `pack` and `Packer` say the same, and a refused sample leaves a `Packer` as it was.

The oracle, `Verdict.of`, reads no code of the package. Where it cannot tell (labels, positions, kept sets, columns that
are of one kind here and of another there), only the second half is checked: no other exception.
"""

import itertools
import math
import re
from dataclasses import dataclass, field

import numpy as np
from helpers import image
from hypothesis import event, given, settings
from hypothesis import strategies as st

import treepack
from treepack.errors import PackTypeError

KNOWN = {"input_ids", "completion_mask", "attention_mask"}
MASKS = ["loss_mask", "response_mask", "action_mask", "assistant_masks", "tool_mask", "completion_masks"]
HALVES = ["prompt_ids", "completion_ids", "response_token_ids"]
#: Names whose values the oracle does not judge.
OTHERS = ["labels", "position_ids", "sampling_mask", "sampling_mask_counts", "cu_seqlens", "seq_lens", "identity"]
MEANT = ["old_log_probs", "advantage", "reward", "group_id"]
NEAR = ["Completion_Mask", "completion_mask ", "completionmask", "inputs_ids", "old_logprob", "attention_masks"]
KNOWN_NAMES = ["x", *MASKS, *HALVES, *OTHERS, *MEANT, *NEAR, "", "a.b", "\0", "\ud800"]
OFTEN = st.integers(0, 20).map(lambda x: x != 20)
NAMES = st.one_of(st.sampled_from(KNOWN_NAMES), st.text(max_size=3))
GOOD = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", "?", "f2", "f4", "f8", "O", "U2", "S2"]
ODD = [None, True, 0, 1, 7, -1, -100, 0.5, math.nan, -math.inf, 1e300, "a", b"a", {}, {"a": 1}, [], 2**31, 2**63, 2**70]
ITEMS = {
    "bits": st.integers(0, 1),
    "ids": st.integers(2, 9),
    "labels": st.sampled_from([-100, 5, 6, 7]),
    "booleans": st.booleans(),
    "floats": st.floats(width=32),
    "huge": st.sampled_from([2**31 - 1, 2**31, 2**62, 2**63, -1, -(2**63), 2**64, 1e39, 0, 2**53 + 1]),
    "odd": st.sampled_from(ODD),
}


@st.composite
def rows(draw, length):
    """A value for each of about `length` tokens: a list, of lists now and then, or an array of any dtype."""
    count = draw(st.sampled_from([length, length, length, length, length, 0, 1, length + 1]))
    kind = draw(st.sampled_from(["bits", "ids", "labels", "booleans", "floats", "huge", "odd"]))
    values = draw(st.lists(ITEMS[kind], min_size=count, max_size=count))
    shape = draw(st.sampled_from(["list", "list", "array", "array", "tuple", "table", "nested", "ragged", "0-d"]))
    if shape in ("list", "tuple"):
        return values if shape == "list" else tuple(values)
    if shape in ("nested", "ragged"):
        return [[value] * (2 if shape == "nested" else 1 + at % 2) for at, value in enumerate(values)]
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    numbers = draw(st.lists(st.integers(0, 100 if draw(st.booleans()) else 1), min_size=count, max_size=count))
    array = np.array(numbers).astype(dtype)
    if shape == "table":
        return np.stack([array, array], 1)
    return array.reshape(-1)[:1].reshape(()) if shape == "0-d" and count else array


@st.composite
def samples(draw):
    """One sample: ids that are right mostly, a mask or none, one or two further columns."""
    length = draw(st.integers(1, 5))
    right = st.lists(st.integers(5, 7), min_size=length, max_size=length)
    bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    of_bits = st.sampled_from(["u1", "i8", "?", "u8"]).flatmap(lambda dtype: bits.map(lambda x: np.array(x, dtype)))
    anything = st.one_of(rows(length), st.sampled_from(ODD))
    sample = {"input_ids": draw(st.one_of(right, right, right.map(np.array), anything))} if draw(OFTEN) else {}
    mask = draw(st.sampled_from(["none", "right", "right", "right", "anything"]))
    if mask != "none":
        sample["completion_mask"] = draw(st.one_of(bits, of_bits) if mask == "right" else anything)
    if not draw(st.integers(0, 5)):
        sample["attention_mask"] = draw(st.one_of(bits, of_bits, anything))
    for name in draw(st.lists(NAMES, max_size=2)):
        sample[name] = draw(st.one_of(anything, bits, st.integers(0, 1)))
    return sample


# ------------------------------------------------------------------------------------------------------ the oracle


def cells(value):
    """(kind, values, rows are lists): kind is a letter of "biuf", "" for no numbers, "?" where the oracle cannot tell;
    values is None for a scalar."""
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind if value.dtype.kind in "biuf" else ""
        return (kind, None, False) if value.ndim == 0 else (kind, value.tolist(), value.ndim > 1)
    if not isinstance(value, list | tuple):
        return kind_of([value]), None, False
    nested = any(isinstance(x, list | tuple) for x in value)
    if nested and len({len(x) if isinstance(x, list | tuple) else -1 for x in value}) > 1:
        return "", list(value), True
    if nested and any(isinstance(x, list | tuple) for row in value for x in row):
        return "?", list(value), True
    return kind_of([x for row in value for x in row] if nested else value), list(value), nested


def kind_of(items):
    if any(not isinstance(x, bool | int | float) for x in items):
        return "?" if all(isinstance(x, str | bool | int | float) for x in items) and len(items) > 1 else ""
    types = {type(x) for x in items}
    if types <= {float}:
        return "" if any(math.isfinite(x) and abs(x) > 3.4e38 for x in items) else "f" if items else "i"
    if types == {int}:
        low, high = min(items), max(items)
        return "i" if low >= -(2**63) and high < 2**63 else "u" if low >= 0 and high < 2**64 else ""
    return "b" if types == {bool} else "?"


@dataclass
class Verdict:
    """What is right for one sample: `wrong`, the columns of which one has to be named (`hard`: in any company); or ids
    and terms, exactly; or, with `unsure`, any answer that is no crash."""

    wrong: set = field(default_factory=set)
    hard: bool = False
    unsure: bool = False
    ids: list = field(default_factory=list)
    trained: list = field(default_factory=list)
    terms: dict = field(default_factory=dict)

    @classmethod
    def of(cls, sample):
        out = cls(set() if "input_ids" in sample else {"input_ids"})
        for name, value in sample.items():
            out._column(name, value, sample)
        if out.wrong and "attention_mask" in sample:
            out.wrong.add("input_ids")  # of which padding may leave nothing
        items = {name: cells(value)[1] for name, value in sample.items()}
        if not (out.wrong or out.unsure):
            real = items.get("attention_mask", [1] * len(items["input_ids"]))
            items = {name: values and list(itertools.compress(values, real)) for name, values in items.items()}
            if not items["input_ids"]:
                out.wrong = {"input_ids"}
        out.hard = bool(out.wrong)
        if out.wrong or out.unsure:
            return out
        out.ids = items["input_ids"]
        mask = items.get("completion_mask", [1] * len(out.ids))
        out.trained = [i for i, x in enumerate(mask) if x and i]
        for name in sample.keys() - KNOWN:
            if items[name] is not None:
                out._disguise(name, items[name], mask, cells(sample[name]), "completion_mask" in sample)
                out.terms[name] = [items[name][i] for i in out.trained]
            elif name != "group_id":
                out.terms[name] = [np.asarray(sample[name], object).item()] * len(out.trained)
        return out

    def _column(self, name, value, sample):
        """What can be said of the column alone: its kind, its rows, its range."""
        kind, items, nested = cells(value)
        ids = cells(sample.get("input_ids"))[1]
        if any("\ud800" <= x <= "\udfff" for x in name):
            self.wrong.add(name)
        if name in OTHERS or (name == "group_id" and not isinstance(value, int)):
            self.unsure = True
            return
        self.unsure |= kind == "?"
        if name in KNOWN:
            right = items is not None and not nested and kind in ("iu?" if name == "input_ids" else "biu?") and kind
            if right and kind != "?":
                right = all(0 <= x < (2**31 if name == "input_ids" else 2) for x in items)
                if not right and "attention_mask" in sample and name != "attention_mask":
                    right = self.unsure = True  # what lies under padding is cut before anybody looks at it
            right = right and (items or name != "input_ids")
        else:
            right = kind and (items is None or "completion_mask" in sample or name not in MASKS + HALVES)
        if not right:
            self.wrong.add(name)
        if items is not None and ids is not None and len(items) != len(ids):
            self.wrong |= {name, "input_ids"}

    def _disguise(self, name, values, mask, form, masked):
        """Columns that change what is trained, or would be lost as one that does."""
        kind, _, nested = form
        binary = not nested and all(x in (0, 1) for x in values)
        packed = re.search("pos|seq|doc|seg|pack|cu", name.lower())  # a name that tells what numbers are, mask or not
        self.unsure |= bool(packed and not nested and kind in "iu")
        if masked:
            if name in MASKS and binary and not all(mask) and list(map(bool, values[1:])) != list(map(bool, mask[1:])):
                self.wrong.add(name)
        elif not nested and kind in "biu" and name not in MEANT:
            if binary and not all(values[1:]):
                self.wrong.add(name)
            elif not (binary or all(x >= 2 for x in values)):
                self.unsure = True


# ----------------------------------------------------------------------------------------------------- the checks


MORE = settings(max_examples=2 * settings().max_examples)  # a sample costs a millisecond


def terms_of(packed):
    """For each sample: ids, indexes of its trained tokens, and its columns there."""
    ids = [x.tolist() for x in packed.unpack([tree.input_ids for tree in packed])]
    starts = np.cumsum([0, *map(len, ids)])
    out = [(one, [], {}) for one in ids]
    for tree in packed:
        for row, place in enumerate(tree.term_sample.tolist()):
            at = int(tree.sample_index[place])
            out[at][1].append(int(tree.term_source[row] - starts[at]))
            for name in tree.terms:
                out[at][2].setdefault(name, []).append(tree.terms[name][row].tolist())
    return out


def same(one, other):
    if isinstance(one, list | tuple) or isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    floats = isinstance(one, float) and isinstance(other, float)
    return one == other or (floats and bool(np.array_equal(np.float32(one), np.float32(other), equal_nan=True)))


def assert_terms(verdict, found):
    ids, trained, terms = found
    assert (ids, trained) == (verdict.ids, verdict.trained)
    assert not trained or terms.keys() == verdict.terms.keys()
    assert all(same(values, verdict.terms[name]) for name, values in terms.items())


def refusal(call):
    """(result, None), or (None, text) of an error that users are meant to see."""
    try:
        return call(), None
    except (treepack.PackError, PackTypeError) as error:
        return None, str(error)


class Trees(list):
    """Trees as `image` takes a result."""

    skipped = ()


@MORE
@given(samples())
def test_one_sample(sample):
    verdict = Verdict.of(sample)
    packed, text = refusal(lambda: treepack.pack([sample], max_tokens=64))
    event("unsure" if verdict.unsure else "refused" if verdict.wrong else "packed")
    if verdict.wrong:
        assert text is not None, verdict
        # Of two faults, that of a column beside the known ones may be named: where nothing says what is trained.
        second = set(sample) - KNOWN if verdict.hard and "completion_mask" not in sample else set()
        named = verdict.wrong | second
        assert verdict.unsure or any(name in text or repr(name) in text for name in named), (text, verdict)
    elif not verdict.unsure:
        assert text is None, text
        assert_terms(verdict, terms_of(packed)[0])
    packer, fresh = treepack.Packer(max_tokens=64), treepack.Packer(max_tokens=64)
    closed, said = refusal(lambda: packer.add(sample))
    assert said == text or (said and text and "group_id" in said)  # which a stream looks at first
    if said is None:
        assert closed == []
        assert [tree.input_ids.tolist() for (tree,) in packer.flush()] == [t.input_ids.tolist() for t in packed]
        return
    assert "sample 0" in text
    assert "\n" not in text
    assert repr(packer) == repr(fresh)
    assert packer.add(GOOD) == fresh.add(GOOD) == []
    assert image(Trees(itertools.chain(*packer.flush()))) == image(Trees(itertools.chain(*fresh.flush())))


@MORE
@given(st.lists(samples(), min_size=2, max_size=4), st.booleans())
def test_some_samples(drawn, alike):
    if alike:  # the columns of the first: more lists get as far as their values
        drawn = [{name: {**drawn[0], **one}[name] for name in drawn[0]} for one in drawn]
    verdicts = [Verdict.of(sample) for sample in drawn]
    packed, text = refusal(lambda: treepack.pack(drawn, max_tokens=64))
    if packed is None:
        assert re.search(r"\bsample \d", text), text
    else:  # what is packed is right, whatever stands beside it
        assert not any(verdict.hard for verdict in verdicts)
        for verdict, found in zip(verdicts, terms_of(packed), strict=True):
            if not verdict.unsure and not verdict.wrong:
                assert_terms(verdict, found)
    both, few = treepack.Packer(max_tokens=16), treepack.Packer(max_tokens=16)
    for sample in drawn:
        before = repr(both)
        closed, said = refusal(lambda sample=sample: both.add(sample))
        if said is None:  # as if those that were refused had never been
            assert image(Trees(itertools.chain(*closed))) == image(Trees(itertools.chain(*few.add(sample))))
        else:
            assert repr(both) == before
            assert re.search(r"\bsample \d", said), said
    assert image(Trees(itertools.chain(*both.flush()))) == image(Trees(itertools.chain(*few.flush())))


def test_the_oracle_itself():
    assert Verdict.of({**GOOD, "x": 1}) == Verdict(ids=[5, 6, 7], trained=[1, 2], terms={"x": [1, 1]})
    bare = {"input_ids": [5, 6, 7]}
    for sample, wrong in [
        ({**bare, "Completion_Mask": [0, 0, 1]}, "Completion_Mask"),
        ({**GOOD, "loss_mask": [1, 0, 1]}, "loss_mask"),
        ({**GOOD, "x": [1, None, 2]}, "x"),
        ({**bare, "attention_mask": [0, 0, 0]}, "input_ids"),
    ]:
        assert Verdict.of(sample).wrong == {wrong}
