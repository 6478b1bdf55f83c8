"""Kept sets and sampler tables per packed position, beyond what TRL's row gives. All but the last test need no TRL."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import kept_for, sample_lists
from hypothesis import given
from hypothesis import strategies as st

from treepack import PackError, synthetic
from treepack.integrations.trl.row import TreeRow

KEPT, COUNTS = "sampling_mask", "sampling_mask_counts"


def row_of(samples):
    row = TreeRow()
    for sample in samples:
        row.add(sample)
    return row


def sample(ids, mask, sets=None, **columns):
    """`sets`: one list of ids for each token."""
    out = {"input_ids": np.array(ids), "completion_mask": np.array(mask), "old_log_probs": -np.ones(len(ids))}
    out |= {"advantage": 1.0, "group_id": 0, **columns}
    if sets is not None:
        out |= {
            KEPT: np.array([x for one in sets for x in one], np.int32),
            COUNTS: np.array([len(one) for one in sets], np.int32),
        }
    return out


def sets_of(sample):
    ends = np.cumsum(sample[COUNTS])
    return [sample[KEPT][end - count : end].tolist() for end, count in zip(ends, sample[COUNTS], strict=True)]


def check(samples, packed, tables=()):
    """Every term of every sample finds its prefix, its target, its set and its tables at its position."""
    cuts_q, cuts_k = packed["tree_cu_seqlens_q"].numpy(), packed["tree_cu_seqlens_k"].tolist()
    counts = packed[COUNTS] if COUNTS in packed else torch.zeros(len(packed["input_ids"]), dtype=torch.int32)
    ends = counts.cumsum(0).tolist()
    terms = iter(zip(packed["token_index"].tolist(), packed["segment_id"].tolist(), strict=True))
    for number, one in enumerate(samples):
        sets = sets_of(one) if one.get(COUNTS) is not None else [[]] * len(one["input_ids"])
        for t in range(1, len(one["input_ids"])):
            if not one["completion_mask"][t]:
                continue
            at, owner = next(terms)
            assert owner == number
            segment = int(np.searchsorted(cuts_q, at, "right")) - 1
            path = packed["tree_kv_index"][cuts_k[segment] : cuts_k[segment + 1]].tolist()
            path = path[: path.index(at) + 1]
            assert packed["input_ids"][path].tolist() == list(one["input_ids"][:t])
            assert packed["shift_labels"][at] == one["input_ids"][t]
            if KEPT in packed:
                ids = packed[KEPT][ends[at] - int(counts[at]) : ends[at]].tolist()
                assert sorted(ids) == sorted(sets[t])
            for name in tables:
                assert packed[name][at].tolist() == one[name][t].tolist()
    assert next(terms, None) is None


def check_counts(row, packed):
    assert len(row.tokens) == len(packed["input_ids"])
    assert sorted(row.tokens) == sorted(packed["input_ids"].tolist())
    assert row.load == int((packed["position_ids"] + 1).sum())


def test_by_eye():
    """Same token, same next token, other set: position `2` is there twice. The set stands where `3` is predicted."""
    samples = [
        sample([1, 2, 3], [0, 0, 1], [[], [], [3, 9]]),
        sample([1, 2, 3], [0, 0, 1], [[], [], [9, 3]]),  # the same ids: the same set
        sample([1, 2, 3], [0, 0, 1], [[], [], [3]]),
        sample([1, 2, 3], [0, 0, 0]),  # context only, goes with the first
    ]
    row = row_of(samples)
    packed = row.pack()
    assert packed["input_ids"].tolist() == [1, 2, 3, 2, 3]
    assert packed[COUNTS].tolist() == [0, 2, 0, 1, 0]
    assert packed[KEPT].tolist() == [3, 9, 3]
    assert packed["token_index"].tolist() == [1, 1, 3]
    assert row.tokens == [1, 2, 3, 2, 3]
    check(samples, packed)
    check_counts(row, packed)


def test_a_fork_is_counted_before_it_is_placed():
    row = row_of([sample([1, 2, 3], [0, 0, 1], [[], [], [3, 9]])])
    other = sample([1, 2, 3], [0, 0, 1], [[], [], [3, 8]])
    assert not row.fits(other, 4)
    assert row.fits(other, 5)
    same = sample([1, 2, 3], [0, 0, 1], [[], [], [9, 3]])
    assert row.fits(same, 3)
    row.add(other)
    elsewhere = sample([4, 5], [0, 0])  # 3 + 2 tokens were it not for the fork, 5 + 2 with it
    assert not row.fits(elsewhere, 6)
    assert row.fits(elsewhere, 7)


@pytest.mark.parametrize("shape", ["agent", "multi_turn"])
def test_synthetic_sets_do_not_fork(shape):
    make = {"agent": synthetic.agent, "multi_turn": synthetic.multi_turn}[shape]
    sizes = {"prompt": 30} | ({"answers": 4, "answer": 9} if shape == "agent" else {"rollouts": 3, "thinking": 9})
    samples = make(**sizes, kept_sets=True)
    row, without = row_of(samples), row_of(make(**sizes, kept_sets=False))
    packed, plain = row.pack(), without.pack()
    check(samples, packed)
    assert set(packed) - set(plain) == {KEPT, COUNTS}
    assert all(torch.equal(packed[name], plain[name]) for name in plain)
    assert row.load == without.load
    assert row.tokens == without.tokens


@given(sample_lists(sets=True, identity=0, columns=False))
def test_sets(samples):
    samples = [
        sample(one["input_ids"], one.get("completion_mask", [1] * len(one["input_ids"])))
        | ({KEPT: np.array(one[KEPT], np.int32), COUNTS: np.array(one[COUNTS], np.int32)})
        for one in samples
    ]
    row = TreeRow()
    for one in samples:
        fits = {budget: row.fits(one, budget) for budget in range(3, 30)}
        row.add(one)
        for budget, answer in fits.items():
            assert answer == (len(row.tokens) <= budget and row.trained <= budget)
    packed = row.pack()
    check(samples, packed)
    check_counts(row, packed)


@st.composite
def fully_trained(draw):
    """Every token trained, with a set and a table: then identity is (token, next, set, table), with no choice."""
    out = []
    for ids in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6)):
        kept, counts = draw(kept_for({"input_ids": ids}))
        one = sample(ids, [1] * len(ids))
        one |= {KEPT: np.array(kept, np.int32), COUNTS: np.array(counts, np.int32)}
        table = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        out.append(one | {"top_k": np.array([[x / 2, 0.5] for x in table], np.float32)})
    return out


@given(fully_trained())
def test_as_few_positions_as_identity_allows(samples):
    nodes = set()
    for one in samples:
        sets, path = sets_of(one), ()
        for t, token in enumerate(one["input_ids"].tolist()):
            last = t + 1 == len(sets)
            following = () if last else (int(one["input_ids"][t + 1]), frozenset(sets[t + 1]), *one["top_k"][t + 1])
            path = (*path, (token, following))
            nodes.add(path)
    row = row_of(samples)
    packed = row.pack()
    assert len(packed["input_ids"]) == len(nodes)
    check(samples, packed, ["top_k"])
    check_counts(row, packed)


def test_tables_without_sets():
    """A table of log-probs and one of ids; a sample without tables counts as one of zeros; trained tokens only."""
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    samples = [
        sample([1, 2, 3], [0, 0, 1], top_logprobs=table, top_ids=table.astype(np.int64)),
        sample([1, 2, 3], [0, 1, 0], top_logprobs=torch.tensor(table) + 9, top_ids=table.astype(np.int64)),
        sample([1, 2, 4], [0, 0, 1]),
    ]
    row = row_of(samples)
    packed = row.pack()
    assert packed["input_ids"].tolist() == [1, 2, 3, 2, 4]
    assert packed["top_ids"].dtype == torch.int64
    assert packed["top_logprobs"].dtype == torch.float32
    assert packed["top_logprobs"][1].tolist() == [4.0, 5.0]  # `2` predicts `3`
    assert packed["top_logprobs"][0].tolist() == [11.0, 12.0]  # `1` predicts `2`
    assert packed["top_logprobs"][2].tolist() == [0.0, 0.0]
    check(samples[:2], row_of(samples[:2]).pack(), ["top_logprobs", "top_ids"])


def test_half_of_a_kept_set_is_refused():
    for name in (KEPT, COUNTS):
        with pytest.raises(PackError, match=r"sample 0 of the row.*kept sets need both"):
            row_of([sample([1, 2], [0, 1], [[], [2]]) | {name: None}])


def test_what_is_no_table_is_left_alone():
    """As TRL leaves it: an image, a column of one axis, a text."""
    one = sample([1, 2], [0, 1], pixels=np.zeros((3, 4, 4)), log_probs=np.zeros(2), text="a", sampling_mask=None)
    row = row_of([one])
    assert row.extras == {}
    assert "pixels" not in row.pack()


def test_tables_of_other_widths_are_refused():
    row = row_of([sample([1, 2], [0, 1], table=np.zeros((2, 3)))])
    with pytest.raises(PackError, match=r"table has rows of .*2.*samples before it have"):
        row.add(sample([1, 2], [0, 1], table=np.zeros((2, 2))))
    assert len(row.samples) == 1


def test_trl_is_imported_by_install_alone():
    code = "import sys, treepack.integrations.trl; sys.exit(any(name.split('.')[0] == 'trl' for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_collator_brings_rows_together():
    pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")
    from trl_rows import installed, trainer

    samples = [
        sample([1, 2, 3], [0, 1, 1], [[], [2, 7], [3]], metrics={}, top=np.ones((3, 2), np.float32)),
        sample([5, 6], [0, 1], metrics={}, group_id=1),
    ]
    rows = [row_of(samples[1:]), row_of(samples[:1])]
    with installed():
        batch = trainer.DataCollatorForRollout(0, 2)([rows])
    assert batch[COUNTS].tolist() == [[0, 0, 0], [2, 1, 0]]
    assert batch[KEPT].tolist() == [[0, 0, 0], [2, 7, 3]]
    assert batch["top"].tolist() == [[[0, 0]] * 3, [[1, 1], [1, 1], [0, 0]]]
    assert batch["shift_labels"].tolist() == [[6, -100, -100], [2, 3, -100]]
