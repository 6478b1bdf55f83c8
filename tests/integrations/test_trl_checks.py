"""What TRL's planners and collator promise, checked under `install()`; the sdist of TRL 1.16.0 ships no tests of them.

A prompt of 4 with answers of 2 is written 1 2 3 4 | a b; a sample is (ids, number of trained tokens at its end).
"""

from collections import defaultdict

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")

from trl_rows import installed, trainer

from treepack.integrations.trl import TreeRow

PROMPT = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _installed():
    with installed():
        yield


def sample(ids, trained, group=0, advantage=1.0, reward=0.0, **metrics):
    mask = np.zeros(len(ids), np.int64)
    mask[len(ids) - trained :] = 1
    log_probs = -np.arange(len(ids), dtype=np.float32) / 8
    return {
        "input_ids": np.array(ids),
        "completion_mask": mask,
        "old_log_probs": log_probs,
        "advantage": advantage,
        "group_id": group,
        "metrics": {"reward": reward, **metrics},
    }


def budgeted(samples, ranks, budget, metrics=None):
    metrics = defaultdict(list) if metrics is None else metrics
    return list(trainer.TokenBudgetBatcher(samples, ranks, budget, metrics))


def collate(rows, budget=0, **options):
    metrics = defaultdict(list)
    collator = trainer.DataCollatorForRollout(0, len(rows), metrics=metrics, token_budget=budget, **options)
    return collator([rows]), metrics


def lengths(rows):
    return [len(row.samples) for row in rows]


class TestFixedCount:
    def test_a_batch_has_the_asked_number_of_samples_and_the_rest_waits(self):
        samples = [sample([i, i + 1], 1, group=i) for i in range(7)]
        made = list(trainer.FixedCountBatcher(samples, 2, 3))
        assert [sum(lengths(rows)) for rows in made] == [3, 3]
        assert all(isinstance(row, TreeRow) for rows in made for row in rows)

    def test_a_group_stays_on_one_rank(self):
        samples = [sample([*PROMPT, 10 * g + i], 1, group=g) for i in range(3) for g in range(4)]
        (rows,) = trainer.FixedCountBatcher(samples, 2, 12)
        assert not rows[0].groups & rows[1].groups
        assert rows[0].groups | rows[1].groups == {0, 1, 2, 3}

    def test_costliest_first_into_the_least_loaded(self):
        """Loads of 55, 36, 21, 3 on two ranks: 55 + 3 and 36 + 21."""
        samples = [sample(list(range(100 * g, 100 * g + n)), 1, group=g) for g, n in enumerate([2, 10, 6, 8])]
        (rows,) = trainer.FixedCountBatcher(samples, 2, 4)
        assert [row.load for row in rows] == [58, 57]

    def test_one_group_is_split_until_every_rank_has_a_sample(self):
        (rows,) = trainer.FixedCountBatcher([sample([*PROMPT, i], 1) for i in range(5)], 4, 5)
        assert sorted(lengths(rows)) == [1, 1, 1, 2]


class TestTokenBudget:
    def test_the_budget_is_on_unique_tokens(self):
        """Four answers of 2 on a prompt of 4 are 24 raw tokens and 4 + 4 * 2 + 3 (forks) = 15 unique ones at most."""
        samples = [sample([*PROMPT, 10 + i, 20], 2) for i in range(4)] + [sample([9], 0, group=1)] * 2
        (rows,) = budgeted([*samples, sample([8] * 15, 0, group=2)], 1, 15)[:1]
        assert lengths(rows) == [4]
        assert len(rows[0].tokens) == 15

    def test_the_budget_is_on_trained_tokens_too(self):
        """Duplicates add no token; five of them with 2 trained each fill a budget of 10."""
        rows = budgeted([sample([*PROMPT, 5, 6], 2)] * 11, 1, 10)
        assert [lengths(row) for row in rows] == [[5], [5]]
        assert rows[0][0].trained == 10

    def test_a_mask_of_one_on_token_0_is_charged(self):
        """Three trained tokens of which two are terms: budget 5 holds one sample, not two."""
        rows = budgeted([sample([5, 6, 7], 3)] * 2, 1, 5)
        assert [lengths(row) for row in rows] == [[1]]
        batch, _ = collate(rows[0])
        assert batch["global_n_tokens"].tolist() == [2.0]

    def test_a_sample_goes_where_its_group_is(self):
        samples = [sample([*PROMPT, 1], 1, group=0), sample([7, 8], 1, group=1), sample([*PROMPT, 2], 1, group=0)]
        rows = budgeted([*samples, sample([3] * 20, 1, group=2)], 2, 20)[0]
        assert [row.groups for row in rows] == [{0}, {1}]
        assert lengths(rows) == [2, 1]

    def test_a_group_is_split_only_to_fill_a_rank(self):
        """8 tokens a row, 6 a sample, no sharing: the second goes to the empty rank, the third closes the batch."""
        samples = [sample(list(range(10 * i, 10 * i + 6)), 1) for i in range(5)]
        rows = budgeted(samples, 2, 8)
        assert [lengths(row) for row in rows] == [[1, 1], [1, 1]]

    def test_too_long_is_dropped_and_counted(self):
        metrics = defaultdict(list)
        fitting = [sample([i] * 8, 1, group=i) for i in range(2)]
        (rows,) = budgeted([sample([1] * 9, 1), *fitting], 1, 8, metrics)
        assert metrics["batch/dropped_oversize_total"] == [1.0]
        assert rows[0].samples == fitting[:1]

    def test_no_rank_is_ever_empty(self):
        rng = np.random.default_rng(0)
        samples = [sample(rng.integers(0, 3, rng.integers(1, 9)).tolist(), 1, group=i // 3) for i in range(200)]
        made = budgeted(samples, 3, 12)
        assert len(made) > 5
        for rows in made:
            assert min(lengths(rows)) > 0
            assert max(len(row.tokens) for row in rows) <= 12
        emitted = sum(sum(lengths(rows)) for rows in made)
        assert 200 - 40 < emitted <= 200


class TestCollator:
    def test_rows_are_padded_to_the_longest(self):
        rows = [TreeRow(), TreeRow()]
        rows[0].add(sample([1, 2, 3, 4, 5], 2, advantage=2.0))
        rows[1].add(sample([6, 7], 1, group=1, advantage=-1.0))
        batch, _ = collate(rows)
        assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
        assert batch["shift_labels"].tolist() == [[-100, -100, 4, 5, -100], [7, -100, -100, -100, -100]]
        assert batch["token_index"].tolist() == [[2, 3], [0, -1]]
        assert batch["tree_kv_index"].tolist() == [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]]
        assert batch["tree_cu_seqlens_q"].tolist() == [[0, 5], [0, 2]]
        assert batch["advantages"].tolist() == [[2.0, 2.0], [-1.0, 0.0]]
        assert batch["old_log_probs"].tolist() == [[-0.375, -0.5], [-0.125, 0.0]]
        assert batch["global_n_tokens"].tolist() == [3.0, 3.0]
        assert batch["global_n_forward_tokens"].tolist() == [7.0, 7.0]
        assert batch["mean_seq_len"].tolist() == [3.5, 3.5]

    def test_shared_positions_serve_every_sample(self):
        row = TreeRow()
        for advantage in (1.0, -2.0):
            row.add(sample([1, 2, 3], 2, advantage=advantage))
        batch, _ = collate([row])
        assert batch["input_ids"].tolist() == [[1, 2, 3]]
        assert batch["token_index"].tolist() == [[0, 1, 0, 1]]
        assert batch["segment_id"].tolist() == [[0, 0, 1, 1]]
        assert batch["advantages"].tolist() == [[1.0, 1.0, -2.0, -2.0]]

    def test_every_path_is_the_sample(self):
        rng = np.random.default_rng(1)
        samples = [sample(rng.integers(0, 3, rng.integers(1, 12)).tolist(), 1, group=i) for i in range(40)]
        row = TreeRow()
        for one in samples:
            row.add(one)
        packed = row.pack()
        cuts_q, cuts_k = packed["tree_cu_seqlens_q"].tolist(), packed["tree_cu_seqlens_k"].tolist()
        paths = set()
        for s in range(len(cuts_q) - 1):
            path = packed["tree_kv_index"][cuts_k[s] : cuts_k[s + 1]]
            assert path[-1] == cuts_q[s + 1] - 1
            assert torch.equal(packed["position_ids"][path], torch.arange(len(path)))
            paths.add(tuple(packed["input_ids"][path].tolist()))
        assert {tuple(one["input_ids"].tolist()) for one in samples} <= paths

    def test_metrics_and_groups(self):
        rows = [TreeRow(), TreeRow()]
        rows[0].add(sample([1, 2, 3, 4], 1, group="a", reward=1.0, **{"tools/calls": 2.0}))
        rows[0].add(sample([1, 2, 3, 4], 3, group="a", reward=float("nan")))
        rows[1].add(sample([5, 6], 1, group="b", reward=4.0))
        groups = set()
        _, metrics = collate(rows, budget=8, groups_trained=groups)
        assert groups == {"a", "b"}
        assert metrics["reward"] == [2.5]
        assert metrics["tools/calls"] == [2.0]
        assert metrics["batch/packing_ratio"] == [(10, 6)]
        assert metrics["batch/row_fill_frac"] == [(6, 16)]
        assert metrics["batch/masked_token_frac"] == [(5, 10)]
        assert metrics["batch/row_imbalance"] == [10 / 6.5]
        assert metrics["batch/pad_frac"] == [(2, 8)]
