"""The two functions of docs/migrating-verl.md on padded batches of all shapes: there and back."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import alone_log_probs, largest_difference, tiny

import treepack
from treepack.testing import check_packed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating-verl.md"


@pytest.fixture(scope="module")
def page():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(block, PAGE.name, "exec"), names)
    return names


@st.composite
def padded_batches(draw, alphabet=3):
    """Prompts against the right edge of their part, responses against the left edge of theirs; holes in the mask."""
    size, prompt, response = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    width = prompt + response
    ids = draw(st.lists(st.integers(0, alphabet - 1), min_size=size * width, max_size=size * width))
    batch = {
        "input_ids": torch.tensor(ids).reshape(size, width),
        "attention_mask": torch.zeros(size, width, dtype=torch.int64),
        "response_mask": torch.zeros(size, response, dtype=torch.int64),
    }
    for i in range(size):
        before, after = draw(st.integers(1, prompt)), draw(st.integers(0, response))
        batch["attention_mask"][i, prompt - before : prompt + after] = 1
        trained = draw(st.lists(st.integers(0, 1), min_size=after, max_size=after))
        batch["response_mask"][i, :after] = torch.tensor(trained, dtype=torch.int64)
    value = torch.arange(1, size * response + 1, dtype=torch.float32).reshape(size, response)
    return batch | {"old_log_probs": -value / 8, "advantages": value}


@given(padded_batches(), st.integers(1, 2))
def test_round_trip(page, batch, ranks):
    packed = page["tree_batch"](batch, max_tokens=16, ranks=ranks)
    mask = batch["response_mask"]
    assert packed.stats.terms == int(mask.sum())
    assert packed.stats.raw_tokens == int(batch["attention_mask"].sum())
    for name in ("old_log_probs", "advantages"):
        back = page["to_padded"](packed, [torch.as_tensor(tree.terms[name]) for tree in packed], batch)
        assert torch.equal(back, batch[name] * mask)
    samples = []
    for ids, real, trained in zip(batch["input_ids"], batch["attention_mask"], mask, strict=True):
        full = torch.zeros_like(real)
        full[len(ids) - len(trained) :] = trained
        samples.append({"input_ids": ids[real > 0].numpy(), "completion_mask": full[real > 0].numpy().astype(np.uint8)})
    if ranks == 1:
        check_packed(packed, samples, max_tokens=16)


def test_log_probs_come_back_differentiably(page):
    """New log-probs in verl's shape equal those of each row alone, and their gradient reaches the model."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (4, 9), generator=generator)
    ids[1:, :5] = ids[0, :5]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones(4, 9, dtype=torch.int64),
        "response_mask": torch.ones(4, 4, dtype=torch.int64),
    }
    batch["attention_mask"][1, :2] = 0
    batch["attention_mask"][2, 8:] = batch["response_mask"][2, 3:] = 0
    model = tiny("qwen2", torch.float32)
    packed = page["tree_batch"](batch, max_tokens=64)
    values = [treepack.term_log_probs(model, tree.to("cpu")) for tree in packed]
    back = page["to_padded"](packed, values, batch)
    samples = []
    for row, real in zip(ids, batch["attention_mask"], strict=True):
        samples.append(
            {"input_ids": row[real > 0], "completion_mask": (torch.arange(9) >= 5)[real > 0].to(torch.uint8)}
        )
    alone = alone_log_probs(model, samples, "sdpa")
    found = [row[mask > 0] for row, mask in zip(back, batch["response_mask"], strict=True)]
    assert largest_difference(found, alone) < 1e-4
    back.sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_mask_at_padding_counts_for_nothing(page):
    batch = {
        "input_ids": torch.ones(1, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1]]),
    }
    (tree,) = page["tree_batch"](batch, max_tokens=16)
    assert tree.term_target.tolist() == [1]
    assert tree.num_tokens == 3
