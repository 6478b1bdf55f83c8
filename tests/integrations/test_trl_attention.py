"""TRL's attention and its loss on treepack: equal to each sample alone, from TRL's own batch."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")

from tiny_models import alone_log_probs, gradients, largest_difference, shared_samples, tiny
from trl_rows import batches, installed, packing, trainer

import treepack
from treepack.integrations.trl.attention import tiles_of_segments

DATA_KEYS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def trl_samples():
    return [
        sample
        | {"old_log_probs": np.full(len(sample["input_ids"]), -3.0, np.float32), "group_id": 0, "metrics": {"r": 0.0}}
        for sample in shared_samples()
    ]


def one_batch(samples):
    ((batch,), *_) = batches(samples, 1, count=len(samples))
    return batch


def tree_kwargs(batch):
    """As TRL's `compute_loss` makes them."""
    kwargs = {key: batch[key][batch[key] >= 0] for key in DATA_KEYS}
    kwargs["tree_max_seqlen_q"], kwargs["tree_max_seqlen_k"] = batch["tree_max_seqlens"][0].tolist()
    return kwargs


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2"])
def test_log_probs_and_gradients(family):
    """Sliding windows and caps as well; float32, since TRL's cast asks the layer for its dtype."""
    samples = trl_samples()
    model = tiny(family, torch.float32)
    with installed():
        model.set_attn_implementation(packing.TREE_ATTENTION)
        batch = one_batch(samples)
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **tree_kwargs(batch))
        index = batch["token_index"][0]
        target = batch["shift_labels"][0][index]
        packed = [out.logits[0][index].log_softmax(-1)[torch.arange(len(index)), target]]
        packed_gradients = gradients(model, packed)
    alone = alone_log_probs(model, samples, "sdpa" if family != "gemma2" else "eager")
    alone_gradients = gradients(model, alone)
    assert largest_difference(packed, [torch.cat(alone)]) < 1e-4
    scale = max(float(x.abs().max()) for x in alone_gradients.values())
    assert largest_difference(packed_gradients, alone_gradients) < 1e-4 * max(scale, 1)


def test_trl_loss():
    """`AsyncGRPOTrainer.compute_loss` itself, its fused head included, against the loss of each sample alone."""
    from trl.trainer.utils import add_fused_lm_head

    samples = trl_samples()
    model = tiny("qwen2", torch.float32)
    alone = alone_log_probs(model, samples, "sdpa")
    ratio = torch.cat(alone) + 3.0
    advantage = torch.cat([torch.full_like(x, sample["advantage"]) for x, sample in zip(alone, samples, strict=True)])
    clipped = torch.minimum(ratio.exp() * advantage, ratio.exp().clamp(0.8, 1.2) * advantage)
    expected = -clipped.sum() / len(clipped)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    stub = SimpleNamespace(
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0,
        _step_trained_tokens=0,
        _step_seq_len_weighted=0,
        _step_samples=0,
        _step_forward_s=0,
    )
    with installed():
        model.set_attn_implementation(packing.TREE_ATTENTION)
        loss = trainer.AsyncGRPOTrainer.compute_loss(stub, model, one_batch(samples))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_refusals_name_what_a_user_of_trl_can_do():
    """He calls no function of treepack but `install`. The router's loss is one, by the config or by TRL's own keyword;
    a model whose rotary embeddings follow the longest sample is right below their limit."""
    batch = one_batch(trl_samples())
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    calls = (
        (
            tiny("qwen3_moe", torch.float32, output_router_logits=True, router_aux_loss_coef=0.1),
            {},
            "router_aux_loss_coef=0.0",
        ),
        (
            tiny("qwen3_moe", torch.float32),
            {"output_router_logits": True},
            "router_aux_loss_coef=0.0 in AsyncGRPOConfig",
        ),
        (tiny("llama", torch.float32, rope_parameters=rope, max_position_embeddings=6), {}, "max_completion_length"),
    )
    with installed():
        for model, more, remedy in calls:
            model.set_attn_implementation(packing.TREE_ATTENTION)
            with pytest.raises(ValueError, match=remedy) as raised:
                model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **tree_kwargs(batch), **more)
            assert "term_log_probs" not in str(raised.value)
            assert "model_inputs" not in str(raised.value)


def test_the_tree_is_read_off_the_lengths():
    rng = np.random.default_rng(0)
    for seed in range(30):
        samples = [{"input_ids": rng.integers(0, 2, rng.integers(1, 9))} for _ in range(1 + seed % 9)]
        for branching in ("token", "label"):
            tree = treepack.pack(samples, max_tokens=99, branching=branching)[0]
            index = tree.varlen_index()
            tiles = tiles_of_segments(torch.tensor(index.cu_seqlens_q), torch.tensor(index.cu_seqlens_k))
            assert np.array_equal(tiles.subtree_end, tree.subtree_end)
            assert np.array_equal(tiles.position_ids, tree.position_ids)
            for size, lists in tree.tiles.items():
                assert all(np.array_equal(a, b) for a, b in zip(tiles.tiles[size], lists, strict=True))


@pytest.mark.parametrize(
    ("q", "k", "says"),
    [
        ([0, 2], [0, 1], "a path holds its segment"),
        ([0, 2, 2], [0, 2, 4], "at least one token"),
        ([0, 2], [0, 3], "starts at depth 1; what lies above it ends at depth 0"),
        ([0, 2, 3], [0, 2, 4], "segment 1 starts at depth 1; what lies above it ends at depth 0"),
    ],
)
def test_lengths_that_are_no_tree(q, k, says):
    with pytest.raises(ValueError, match=says):
        tiles_of_segments(torch.tensor(q, dtype=torch.int32), torch.tensor(k, dtype=torch.int32))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_the_tree_is_made_once_for_all_layers(monkeypatch):
    from treepack.integrations.trl import attention

    calls = []
    monkeypatch.setattr(attention, "tiles_of_segments", lambda *a: calls.append(a) or tiles_of_segments(*a))
    model = tiny("qwen2", torch.float32)
    model.gradient_checkpointing_enable()
    model.train()
    with installed():
        model.set_attn_implementation(packing.TREE_ATTENTION)
        batch = one_batch(trl_samples())
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **tree_kwargs(batch))
        out.logits.sum().backward()
    assert len(calls) == 1


def test_what_attention_would_ignore_is_refused():
    model = tiny("qwen2", torch.float32, attention_dropout=0.1).train()
    with installed():
        model.set_attn_implementation(packing.TREE_ATTENTION)
        batch = one_batch(trl_samples())
        with pytest.raises(ValueError, match="attention dropout"):
            model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **tree_kwargs(batch))
