"""What the TRL tests share: TRL's classes, the switch within a block, rollouts, and the same run both ways."""

import contextlib
import os
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch

from treepack import synthetic
from treepack.integrations import trl as ours

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trainer = pytest.importorskip(
        "trl.experimental.async_grpo.async_grpo_trainer", reason="needs trl 1.16.0", exc_type=ImportError
    )
from accelerate import PartialState
from trl.experimental.async_grpo import packing

PartialState()  # TRL's logger asks for it
TheirRow = packing.TreeRow


@contextlib.contextmanager
def installed():
    ours.install()
    try:
        yield
    finally:
        ours.uninstall()


def rollouts(samples, group=None):
    """Samples as TRL's queue dataset yields them."""
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage")
    return [
        {name: sample[name] for name in names}
        | {"group_id": sample["group_id"] if group is None else i // group, "metrics": {"reward": float(i % 5)}}
        for i, sample in enumerate(samples)
    ]


def from_lists(id_lists, masks, group=2):
    rng = np.random.default_rng(len(id_lists))
    return [
        {
            "input_ids": np.array(ids, np.int64),
            "completion_mask": np.array(mask, np.int64),
            "old_log_probs": -rng.random(len(ids), np.float32),
            "advantage": float(rng.standard_normal()),
            "group_id": i // group,
            "metrics": {"reward": float(i), **({"tools/calls": 1.0} if i % 2 else {})},
        }
        for i, (ids, mask) in enumerate(zip(id_lists, masks, strict=True))
    ]


def load(folder, name, count, tokens=60_000):
    """The first samples of a real data set, as long as they have this many tokens."""
    with np.load(folder / "data" / f"{name}.npz") as file:
        offsets, ids, mask, groups = file["offsets"], file["tokens"], file["completion_mask"], file["group_id"]
    count = min(count, int(np.searchsorted(offsets, tokens)))
    cuts = offsets[1:count]
    samples = from_lists(*(np.split(values[: offsets[count]], cuts) for values in (ids, mask)))
    return [sample | {"group_id": int(group)} for sample, group in zip(samples, groups, strict=False)]


SYNTHETIC = {
    "agent": lambda: synthetic.agent(kept_sets=False),
    "multi_turn": lambda: synthetic.multi_turn(rollouts=3, kept_sets=False),
    "agent_small": lambda: synthetic.agent(1, answers=12, prompt=40, answer=20, kept_sets=False),
    "multi_turn_small": lambda: synthetic.multi_turn(
        2, rollouts=4, turns=5, prompt=30, thinking=9, answer=5, tool=7, kept_sets=False
    ),
}


def batches(samples, ranks, *, budget=0, count=0):
    """(batches, metrics, groups) of TRL's planner and collator. One of budget, count."""
    metrics = defaultdict(list)
    if budget:
        planner = trainer.TokenBudgetBatcher(samples, ranks, budget, metrics)
    else:
        planner = trainer.FixedCountBatcher(samples, ranks, count)
    collator = trainer.DataCollatorForRollout(7, ranks, metrics=metrics, token_budget=budget)
    return [collator([rows]) for rows in planner], dict(metrics), collator.groups_trained


def assert_equal_both_ways(samples, ranks, **options):
    """The same bytes with and without treepack; returns the batches."""
    theirs, their_metrics, their_groups = batches(samples, ranks, **options)
    with installed():
        mine, metrics, groups = batches(samples, ranks, **options)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert_same_batch(a, b)
    assert metrics == their_metrics
    assert groups == their_groups
    return mine


def assert_same_batch(a, b):
    assert list(a) == list(b)
    for name in b:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert a[name].contiguous().numpy().tobytes() == b[name].contiguous().numpy().tobytes(), name
        assert torch.equal(a[name], b[name]), name
