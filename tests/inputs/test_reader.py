"""A reader knows samples again: those like others before are borrowed without a look at their columns."""

import threading
from unittest.mock import ANY

import numpy as np
import pytest

import treepack
from treepack import _core
from treepack.inputs.reader import Reader, Readers

WEIGHTS = [{"input_ids": np.array([1, 2]), "weight": np.array([1, 5], np.int16)}]
MASKS = [{"input_ids": np.array([1, 2]), "completion_mask": np.array([0, 1], np.uint8), "advantage": 0.5}]


@pytest.fixture
def looks(monkeypatch):
    """The calls in which columns were looked at."""
    seen, columns = [], _core.columns
    monkeypatch.setattr(_core, "columns", lambda samples, optional: seen.append(samples) or columns(samples, optional))
    return seen


def test_callers_do_not_make_each_other_forget(looks):
    for samples in (WEIGHTS, MASKS):
        treepack.pack(samples, max_tokens=8)
    looks.clear()
    for _ in range(3):
        (tree,), (other,) = (treepack.pack(samples, max_tokens=8) for samples in (WEIGHTS, MASKS))
    assert looks == []
    assert tree.terms["weight"].dtype == np.int16
    assert other.terms["advantage"].tolist() == [0.5]


def test_other_dtypes_under_the_same_names_are_looked_at_once(looks):
    wide = [{"input_ids": np.array([1, 2]), "weight": np.array([1.5, 2.5])}]
    for samples in (WEIGHTS, wide, WEIGHTS, wide):
        (tree,) = treepack.pack(samples, max_tokens=8)
        assert tree.terms["weight"].tolist() == [samples[0]["weight"][1]]
    looks.clear()
    treepack.pack(wide, max_tokens=8)
    assert looks == []


def test_what_is_wrong_is_said_where_more_is_known(looks):
    treepack.pack(MASKS, max_tokens=8)
    looks.clear()
    with pytest.raises(treepack.PackError, match="sample 0"):
        treepack.pack([MASKS[0] | {"completion_mask": np.array([0, 7], np.uint8)}], max_tokens=8)
    assert len(looks) == 1


def test_a_reader_of_one_kind():
    reader = Reader()
    assert reader.borrow(MASKS, lambda samples, formats: "borrowed") is None
    columns = reader.read(MASKS)
    reader.learn(columns)
    assert reader.borrow(MASKS, lambda samples, formats: (samples, formats)) == ((MASKS, ANY), columns.formats)
    assert reader.borrow(MASKS, lambda samples, formats: None) is None
    reader.learn(reader.read({"input_ids": np.array([[1, 2]]), "attention_mask": np.ones((1, 2), int)}))
    assert reader.borrow(MASKS, lambda samples, formats: "borrowed") == ("borrowed", columns.formats)


def test_kinds_go_by_the_names_of_columns():
    readers = Readers()
    turned = [dict(reversed(MASKS[0].items()))]
    assert readers.get_reader(MASKS) is readers.get_reader(turned) is not readers.get_reader(WEIGHTS)
    for other in ([], MASKS[0], [1], None):
        assert readers.get_reader(other) is not readers.get_reader(other)


def test_the_oldest_kind_is_forgotten():
    readers = Readers(most=2)
    kinds = [[{"input_ids": [1], name: [2]}] for name in "abc"]
    a, b, c = map(readers.get_reader, kinds)
    assert [readers.get_reader(kinds[2]), readers.get_reader(kinds[1])] == [c, b]
    assert readers.get_reader(kinds[0]) is not a


def test_threads_make_readers_at_the_same_time():
    readers, wrong = Readers(most=5), []

    def work(thread):
        for i in range(300):
            samples = [{"input_ids": [1], f"column {(thread + i) % 30}": [i]}]
            try:
                readers.get_reader(samples).learn(readers.get_reader(samples).read(samples))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
