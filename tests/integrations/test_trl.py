"""TRL's batchers and collator give the same bytes with treepack installed as without."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")

from helpers import id_lists
from trl_rows import (
    SYNTHETIC,
    TheirRow,
    assert_equal_both_ways,
    assert_same_batch,
    from_lists,
    installed,
    load,
    packing,
    rollouts,
    trainer,
)

from treepack import PackError
from treepack.integrations import trl as ours
from treepack.integrations.trl import TreeRow, switch

DATA = [
    "qwen_math_n8",
    "gsm8k_4models",
    "game24_cot_n100",
    "tau_airline_turns",
    "swe_gemini_comb",
    "crosswords_tot_dfs",
]


def two_rows(samples):
    """(theirs, ours) after the same calls; every answer on the way is equal."""
    theirs, mine = TheirRow(), TreeRow()
    for sample in samples:
        size = len(theirs.tokens)
        for budget in (size, size + 1, size + len(sample["input_ids"]), theirs.trained + 1, 10**6):
            assert mine.fits(sample, budget) == theirs.fits(sample, budget)
        theirs.add(sample)
        mine.add(sample)
        assert (mine.trained, mine.load, mine.groups) == (theirs.trained, theirs.load, theirs.groups)
        assert len(mine.tokens) == len(theirs.tokens)
    assert mine.tokens == theirs.tokens
    assert list(mine.tokens) == theirs.tokens
    assert mine.samples == theirs.samples
    return theirs, mine


@st.composite
def small_rollouts(draw):
    ids = draw(id_lists(max_samples=9))
    masks = [draw(st.lists(st.integers(0, 1), min_size=len(x), max_size=len(x))) for x in ids]
    return from_lists(ids, masks, draw(st.integers(1, 4)))


def test_three_samples_by_eye():
    """A position is shared by samples that agree on what follows: `1` by all, `2` twice, as another token follows.

    1 - 2 - 3 - 4      A       1 2 3 4 | 2 5 | 2, N = 7
      - 2 - 5          B
      - 2              C
    """
    row = TreeRow()
    for sample in from_lists([[1, 2, 3, 4], [1, 2, 5], [1, 2]], [[1, 1, 1, 1], [0, 0, 1], [0, 1]]):
        row.add(sample)
    packed = row.pack()
    assert row.tokens == [1, 2, 3, 4, 2, 5, 2]
    assert row.load == 1 + 2 + 3 + 4 + 2 + 3 + 2
    assert row.trained == 6  # token 0 of A counts against the budget, and is no loss term
    assert packed["input_ids"].tolist() == [1, 2, 3, 4, 2, 5, 2]
    assert packed["shift_labels"].tolist() == [2, 3, 4, -100, 5, -100, -100]
    assert packed["token_index"].tolist() == [0, 1, 2, 4, 0]
    assert packed["segment_id"].tolist() == [0, 0, 0, 1, 2]
    assert packed["tree_cu_seqlens_q"].tolist() == [0, 1, 4, 6, 7]
    assert packed["tree_kv_index"].tolist() == [0, 0, 1, 2, 3, 0, 4, 5, 0, 6]


@given(small_rollouts())
def test_row_equals_theirs(samples):
    theirs, mine = two_rows(samples)
    assert_same_batch(mine.pack(), theirs.pack())
    assert_same_batch(mine.pack(), theirs.pack())  # packing changes nothing


@given(small_rollouts(), st.integers(1, 3), st.integers(3, 20))
def test_token_budget(samples, ranks, budget):
    """Rows that a stream leaves open are never emitted, so the stream goes on with samples that share nothing."""
    longer = [
        s | {"input_ids": s["input_ids"] + 3 * k, "group_id": (s["group_id"], k)} for k in range(5) for s in samples
    ]
    assert_equal_both_ways(longer, ranks, budget=budget)


@given(small_rollouts(), st.integers(1, 3), st.integers(0, 3))
def test_fixed_count(samples, ranks, more):
    assert_equal_both_ways(samples * 4, ranks, count=ranks + more)


@pytest.mark.parametrize("shape", SYNTHETIC)
@pytest.mark.parametrize("ranks", [1, 2])
def test_synthetic(shape, ranks):
    samples = rollouts(SYNTHETIC[shape](), group=4)
    longest = max(len(sample["input_ids"]) for sample in samples)
    assert assert_equal_both_ways(samples, ranks, count=len(samples) // 2 // ranks * ranks)
    assert assert_equal_both_ways(samples, ranks, budget=longest + longest // 20)


@pytest.mark.parametrize("name", DATA)
def test_real_rollouts(name, treepack_data):
    samples = load(treepack_data, name, 60)
    longest = max(len(sample["input_ids"]) for sample in samples)
    assert assert_equal_both_ways(samples, 2, count=len(samples) // 2 // 2 * 2)
    assert_equal_both_ways(samples, 1, budget=longest + 50)


def test_tensors_and_other_dtypes():
    """What TRL reads with `.tolist()` and `.sum()`: tensors, booleans, doubles, NumPy scalars."""
    samples = from_lists([[1, 2, 3], [1, 2, 4], [1, 2, 4]], [[0, 1, 1]] * 3)
    samples[0] |= {name: torch.tensor(samples[0][name]) for name in ("input_ids", "completion_mask", "old_log_probs")}
    samples[1] |= {"completion_mask": samples[1]["completion_mask"] > 0, "advantage": np.float64(0.1)}
    samples[2] |= {"input_ids": samples[2]["input_ids"].astype(np.int32), "advantage": torch.tensor(0.3)}
    samples[2] |= {"old_log_probs": samples[2]["old_log_probs"].astype(np.float64) / 3}
    theirs, mine = two_rows(samples)
    assert_same_batch(mine.pack(), theirs.pack())


def test_no_trained_token():
    theirs, mine = two_rows(from_lists([[1, 2], [3]], [[0, 0], [1]]))
    assert_same_batch(mine.pack(), theirs.pack())
    assert mine.pack()["token_index"].shape == (0,)


def test_nothing_to_pack_is_refused():
    """TRL raises a ValueError of Python's own for both."""
    with pytest.raises(PackError, match="every rank needs a sample"):
        TreeRow().pack()
    for row in (TreeRow(), TheirRow()):
        for call in (row.add, lambda sample, row=row: row.fits(sample, 5)):
            with pytest.raises(ValueError):  # noqa: PT011
                call(*from_lists([[]], [[]]))


def test_the_switch_goes_both_ways():
    attention, call = packing.tree_attention, trainer.DataCollatorForRollout.torch_call
    with installed():
        ours.install()
        assert trainer.TreeRow is packing.TreeRow is TreeRow
        assert packing.tree_attention is ours.tree_attention
    ours.uninstall()
    assert trainer.TreeRow is packing.TreeRow is TheirRow
    assert (packing.tree_attention, trainer.DataCollatorForRollout.torch_call) == (attention, call)


@pytest.mark.parametrize("missing", ["packing", "async_grpo_trainer"])
def test_a_trl_without_the_module(missing, monkeypatch):
    name = f"trl.experimental.async_grpo.{missing}"

    def fail(module):
        if module == name:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return trainer if module.endswith("trainer") else packing

    monkeypatch.setattr(switch.importlib, "import_module", fail)
    monkeypatch.setattr(switch.metadata, "version", lambda _: "2.0.0")
    with pytest.raises(ImportError, match=r"trl 2\.0\.0 has no .*known to work with trl 1\.16\.0.*DataCollatorForTree"):
        ours.install()
    assert not switch._before


def test_a_trl_that_packs_otherwise(monkeypatch):
    class Other(TheirRow):
        def pack(self):
            return super().pack() | {"more": torch.zeros(1)}

    monkeypatch.setattr(packing, "TreeRow", Other)
    with pytest.raises(ImportError, match="packs otherwise"):
        ours.install()
    assert trainer.TreeRow is TheirRow


def test_no_trl(monkeypatch):
    def version(_):
        raise switch.metadata.PackageNotFoundError

    monkeypatch.setattr(switch.metadata, "version", version)
    with pytest.raises(ImportError, match=r"TRL is not installed.*1\.16\.0"):
        ours.install()
