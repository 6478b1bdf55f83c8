"""Mini-batches of verl as trees: as many as another rank needs, and the places of their values; and what is said
without verl. `make test-verl` runs the former, beside verl."""

import importlib
import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treepack
from treepack.testing import check_packed

pytestmark = pytest.mark.filterwarnings("ignore")  # of what verl imports
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed here: make test-verl")


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed here")
def test_without_verl_the_error_names_the_versions():
    sys.modules.pop("treepack.integrations.verl", None)
    said = "verl is not installed; treepack.integrations.verl is known to work with verl 0.9.1"
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)) as caught:
        importlib.import_module("treepack.integrations.verl")
    assert caught.value.name == "verl"


@pytest.fixture(scope="module")
def batch():
    return importlib.import_module("treepack.integrations.verl.batch")


@st.composite
def samples(draw):
    """Token ids of up to 9 samples of a small alphabet, with how many of the last are a response."""
    many = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9))
    return [(ids, draw(st.integers(0, len(ids) - 1))) for ids in many]


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def data_of(some):
    """What verl has, as far as it is read here."""
    return {
        "input_ids": jagged([ids for ids, _ in some]),
        "prompts": jagged([ids[: len(ids) - n] for ids, n in some]),
        "responses": torch.nested.nested_tensor_from_jagged(
            torch.tensor([i for ids, n in some for i in ids[len(ids) - n :]], dtype=torch.int64),
            torch.tensor([0, *np.cumsum([n for _, n in some]).tolist()]),
        ),
    }


@needs_verl
@settings(max_examples=60)
@given(samples(), st.integers(0, 9))
def test_trees_of_a_rank(batch, some, more):
    rows = batch.rows_of(data_of(some))
    assert rows.trained.tolist() == [int(t >= len(ids) - n) for ids, n in some for t in range(len(ids))]
    alone, _ = batch.trees_of_rank(rows, 12, None, "cpu")
    wanted = min(len(some), len(alone) + more)
    parts = [(tree, tree.sample_index.tolist()) for tree in alone]
    while len(parts) < wanted:
        parts = batch._cut_largest(parts, rows, 12, None)
    assert len(parts) == wanted
    assert sorted(i for _, mine in parts for i in mine) == list(range(len(some)))
    for tree, mine in parts:
        plain = [
            {"input_ids": np.array(some[i][0]), "completion_mask": rows.take([i]).trained.astype(np.uint8)}
            for i in mine
        ]
        # The tree has its samples in the order named, whichever call packed it.
        check_packed(treepack.pack(plain, max_tokens=12), plain)
        assert tree.num_tokens <= 12
        flat = np.concatenate([sample["input_ids"] for sample in plain])
        places = batch.entries(tree)
        assert flat[places + 1].tolist() == tree.term_target.tolist()
        ends = np.cumsum([len(sample["input_ids"]) for sample in plain]) - 1
        assert not set(places.tolist()) & set(ends.tolist())
        assert tree.input_ids[batch.token_positions(tree)].tolist() == flat.tolist()


@needs_verl
def test_what_is_trained(batch):
    """By responses, padded or jagged; by a jagged mask; else everything."""
    ids = jagged([[1, 2, 3], [4, 5]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    padded = {"input_ids": ids, "prompts": torch.zeros(2, 3), "responses": torch.zeros(2, 2), "attention_mask": mask}
    assert batch.rows_of(padded).trained.tolist() == [0, 0, 1, 0, 0]
    by_mask = {"input_ids": ids, "loss_mask": jagged([[0, 0, 1], [0, 1]])}
    assert batch.rows_of(by_mask).trained.tolist() == [0, 0, 1, 0, 1]
    assert batch.rows_of({"input_ids": ids}).trained.tolist() == 5 * [1]


@needs_verl
def test_refusals_name_the_setting():
    refusals = importlib.import_module("treepack.integrations.verl.refusals")
    model = SimpleNamespace(use_fused_kernels=False, hf_config=SimpleNamespace(vision_config=1, model_type="qwen2_vl"))
    engine = SimpleNamespace(ulysses_sequence_parallel_size=1, use_fused_kernels=False)
    with pytest.raises(ValueError, match="qwen2_vl takes images"):
        refusals.refuse_engine(model, engine)
    engine.ulysses_sequence_parallel_size = 2
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size is 2: .*allowed is 1\. .*mesh=.*shards"):
        refusals.refuse_engine(model, engine)
