"""`RangeRunner` in float64: gradients of the whole tree from ranges that are cut anywhere, each row run once."""

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from range_trees import (
    by_range,
    cut_at,
    drawn_cut,
    drawn_samples,
    every_row,
    gradients,
    relative_difference,
    tiny,
    uncut,
    whole,
)
from tiny_models import largest_difference, shared_samples, weights_of

import treepack
from treepack.integrations.transformers import RangeRunner
from treepack.integrations.transformers.ranges import host, runner

CHECKPOINTING = [None, {"use_reentrant": False}, {"use_reentrant": True}]


class Rows:
    """Counts the rows that go through the layers of a model."""

    def __init__(self, model):
        self.rows = [0] * len(model.model.layers)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(self.hook(number))

    def hook(self, number):
        def count(module, arguments):
            self.rows[number] += arguments[0].shape[1]

        return count


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_oss", "youtu"])
def test_drawn_trees_and_cuts(family, checkpointing):
    rng = np.random.default_rng(0)
    model = tiny(family).train()
    for case in range(4):
        samples = drawn_samples(rng, sets=case == 3)
        values, wanted = uncut(model, whole(samples))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        for tree in (drawn_cut(rng, whole(samples)), drawn_cut(rng, whole(samples)), every_row(whole(samples))):
            log_probs, found = by_range(model, tree)
            assert largest_difference([log_probs], [values]) < 1e-12
            assert relative_difference(found, wanted) < 1e-12
        model.gradient_checkpointing_disable()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_every_token_passes_every_layer_once(checkpointing):
    rng = np.random.default_rng(1)
    model = tiny("qwen2").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    by_range(model, whole(drawn_samples(rng)))  # the first use runs two samples of its own
    counter, total = Rows(model), 0
    for _ in range(4):
        tree = drawn_cut(rng, whole(drawn_samples(rng)))
        by_range(model, tree)
        total += tree.num_tokens
    assert counter.rows == [total * (2 if checkpointing else 1)] * 2


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_what_waits_may_lie_on_the_host(checkpointing, monkeypatch):
    rng, model = np.random.default_rng(4), tiny("qwen2").train()
    parameters, moved, fetched = {x.data_ptr() for x in model.parameters()}, [], []
    save, fetch = host._Saved.__init__, host._Saved.fetch
    monkeypatch.setattr(runner, "_OFFLOADED", ("cpu",))
    monkeypatch.setattr(host, "_LEAST_BYTES", 1)
    monkeypatch.setattr(
        host._Saved, "__init__", lambda self, x, *more: moved.append(x.data_ptr()) or save(self, x, *more)
    )
    monkeypatch.setattr(host._Saved, "fetch", lambda self: fetched.append(self) or fetch(self))
    for _ in range(4):
        samples = drawn_samples(rng)
        values, wanted = uncut(model, whole(samples))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        log_probs, found = by_range(model, drawn_cut(rng, whole(samples)))
        assert largest_difference([log_probs], [values]) < 1e-12
        assert relative_difference(found, wanted) < 1e-12
        model.gradient_checkpointing_disable()
    assert fetched
    assert not parameters.intersection(moved)


@pytest.mark.parametrize("max_tokens", [1, 5, 9, 40, 1000])
def test_what_pack_cuts(max_tokens):
    model = tiny("qwen2").train()
    for branching in ("token", "label"):
        samples = shared_samples(sets=branching == "token")
        _, wanted = uncut(model, whole(samples, branching=branching))
        (tree,) = treepack.pack(samples, max_tokens=max_tokens, cut=True, branching=branching)
        assert relative_difference(by_range(model, tree.to("cpu"))[1], wanted) < 1e-12


def everything(out, tree, index):
    """A loss of all that `term_log_probs` gives."""
    loss = (out.log_probs + out.entropy - 0.5 * out.full_log_probs) @ weights_of(10_000)[index]
    value = out.hidden_states.tanh().sum(-1)[tree.row_position.long()[tree.term_row.long()]]
    return loss + (value * tree.terms["advantage"]).sum()


def test_options():
    model, rng = tiny("cohere2"), np.random.default_rng(2)
    samples = shared_samples(sets=True)
    options = {"entropy": True, "full_log_probs": True, "hidden_states": True, "temperature": 0.7}
    _, wanted = uncut(model, whole(samples), everything, **options)
    for _ in range(3):
        _, found = by_range(model, drawn_cut(rng, whole(samples)), everything, **options)
        assert relative_difference(found, wanted) < 1e-12


def test_temperatures_by_sample():
    model, rng = tiny("qwen2"), np.random.default_rng(7)
    samples = shared_samples(sets=True)
    heat = {"temperature": 0.5 + rng.random(len(samples)).round(1)}
    _, wanted = uncut(model, whole(samples), **heat)
    for _ in range(3):
        assert relative_difference(by_range(model, drawn_cut(rng, whole(samples)), **heat)[1], wanted) < 1e-12


def test_a_head_of_ones_own():
    model, rng, samples = tiny("qwen2"), np.random.default_rng(3), shared_samples()

    def head(hidden, labels):
        logits = model.lm_head(hidden).log_softmax(-1)
        return logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]

    _, wanted = uncut(model, whole(samples, branching="label"), head=head)
    tree = drawn_cut(rng, whole(samples, branching="label"))
    assert relative_difference(by_range(model, tree, head=head)[1], wanted) < 1e-12


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj", "v_proj", "down_proj"]])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_lora(targets, checkpointing):
    rng = np.random.default_rng(4)
    torch.manual_seed(0)
    model = get_peft_model(tiny("qwen2"), LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).double()
    model.train()
    samples = shared_samples()
    _, wanted = uncut(model, whole(samples))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model.enable_input_require_grads()
    assert relative_difference(by_range(model, drawn_cut(rng, whole(samples)))[1], wanted) < 1e-12


def test_frozen_parts():
    """Only the head, only the last layer, or only the first is trained."""
    rng, samples = np.random.default_rng(5), shared_samples()
    for trained in ("lm_head", "layers.1", "layers.0.self_attn.v_proj", "embed_tokens"):
        model = tiny("qwen2")
        for name, x in model.named_parameters():
            x.requires_grad_(trained in name)
        _, wanted = uncut(model, whole(samples))
        assert wanted
        assert relative_difference(by_range(model, drawn_cut(rng, whole(samples)))[1], wanted) < 1e-12


def test_ranges_without_a_loss():
    """A range that has no terms, or no use for them, still hands back what later ranges leave it."""
    model, samples = tiny("qwen2"), shared_samples()
    tree = cut_at(whole(samples), 3, 9, 14)
    late = tree.row_position.long()[tree.term_row.long()] >= 14
    out = treepack.term_log_probs(model, whole(samples))
    (out * late).sum().backward()
    wanted = gradients(model)
    for part in RangeRunner(model, tree):
        if part.range.start < 9:
            part.backward()
        elif part.range.start == 9:
            part.term_log_probs()
            part.backward()
        else:
            part.backward(part.term_log_probs().sum())
    assert relative_difference(gradients(model), wanted) < 1e-12


def test_dummies():
    """A tree without samples: gradients of 0 for every parameter."""
    model = tiny("qwen2").train()
    packed = treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=2, ranks=2, cut=True)
    assert [tree.num_samples for tree in packed] == [1, 0]
    found = []
    for part in RangeRunner(model, packed[1].to("cpu")):
        log_probs = part.term_log_probs()
        assert log_probs.shape == (0,)
        part.backward(log_probs.sum())
        found = [x.grad for x in model.parameters()]
    assert all(x is not None and not x.any() for x in found)


def test_without_gradients():
    model, rng, samples = tiny("qwen2"), np.random.default_rng(6), shared_samples()
    values, _ = uncut(model, whole(samples))
    for mode in (torch.no_grad, torch.inference_mode):
        tree, found = drawn_cut(rng, whole(samples)), torch.zeros(len(values), dtype=torch.float64)
        with mode():
            for part in RangeRunner(model, tree):
                found[part.term_index] = part.term_log_probs()
        assert largest_difference([found], [values]) < 1e-12
        assert relative_difference(by_range(model, tree)[1], uncut(model, whole(samples))[1]) < 1e-12


def test_nothing_stays():
    """After the loop, and after one that was left, neither graph nor keys are alive."""
    model, samples = tiny("qwen2"), shared_samples()
    for stop in (None, 2):
        alive = []
        with pytest.warns(UserWarning, match="ended at range 2 of 5") if stop else nullcontext():
            runner = iter(RangeRunner(model, cut_at(whole(samples), 3, 5, 9, 14)))
            for part in runner:
                out = part.term_log_probs()
                alive.append(weakref.ref(out.grad_fn))
                if part.index == stop:
                    break
                part.backward(out.sum())
            runner.close()
        del out, part, runner
        gc.collect()
        assert all(x() is None for x in alive)
