"""Hugging Face models on packed trees against each sample alone, values and the gradient of every parameter."""

import contextlib

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCABULARY,
    KeepDouble,
    alone_log_probs,
    gradients,
    largest_difference,
    packed_log_probs,
    shared_samples,
    tiny,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import treepack
from treepack import term_log_probs
from treepack.integrations.transformers import model_inputs, router_aux_loss
from treepack.logprobs import head_log_probs


def parity(model, samples, double=True, pack=None, **options):
    """(largest difference of log-probs, of gradients) between packed and alone."""
    with KeepDouble() if double else contextlib.nullcontext():
        packed = packed_log_probs(model, samples, pack, **options)
        ours = gradients(model, packed)
        alone = alone_log_probs(model, samples, temperature=options.get("temperature", 1.0))
        theirs = gradients(model, alone)
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-3
    return largest_difference(packed, alone), largest_difference(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """CASES 16 to 18: every layer type of every family, one row per tree, several trees; windows are shorter than the
    samples and counted in depth; caps, sinks and scales are the model's."""
    log_probs, gradient = parity(tiny(family), shared_samples())
    assert log_probs < 1e-12
    assert gradient < 2e-12  # zamba2, whose attention comes back in several layers, was 1.1e-12 off


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_families_as_they_are(family):
    """The same with the casts to float32 that the models make: their own rounding is what remains."""
    model = tiny(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "sinks" not in name:
                parameter.mul_(0.25)
    log_probs, gradient = parity(model, shared_samples(), double=False)
    assert log_probs < 1e-9
    assert gradient < 1e-7


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite", "cohere2"])
def test_kept_sets_and_temperature(family):
    """Rows with sets are normalised over them after the model's own scale and cap, and the temperature."""
    log_probs, gradient = parity(tiny(family), shared_samples(sets=True), temperature=0.6)
    assert log_probs < 1e-12
    assert gradient < 2e-12  # zamba2, whose attention comes back in several layers, was 1.1e-12 off


@pytest.mark.parametrize("pack", [{"max_tokens": 24}, {"branching": "label"}, {"pad_to_multiple_of": 16}])
def test_other_packings(pack):
    """Several trees, label branching, and padding rows: which give nothing and take nothing (CASES 26)."""
    log_probs, gradient = parity(tiny("qwen2_window"), shared_samples(), pack=pack)
    assert log_probs < 1e-12
    assert gradient < 2e-12  # zamba2, whose attention comes back in several layers, was 1.1e-12 off


def test_through_model_call():
    """`model(...)` with the tree as keyword tensors: logits of every position, with and without what kernels derive."""
    model = tiny("mistral")
    samples = shared_samples()
    tree = treepack.pack(samples, max_tokens=256)[0].to("cpu")
    expected = term_log_probs(model, tree)
    plain = {"input_ids": tree.input_ids[None], "position_ids": tree.position_ids[None], "use_cache": False}
    calls = [
        model_inputs(tree),
        plain | {"subtree_end": tree.subtree_end},
        plain | {"subtree_end": tree.subtree_end[None].long(), "impl": "reference"},
    ]
    for inputs in calls:
        logits = model(**inputs).logits[0, tree.row_position.long()].log_softmax(-1)
        got = logits[tree.term_row.long(), tree.term_target.long()]
        assert (got - expected).abs().max() < 1e-12
    for run in (
        lambda **k: model(**(plain | {"subtree_end": tree.subtree_end} | k)),
        lambda **k: term_log_probs(model, tree, **k),
    ):
        with pytest.raises(TypeError, match='impl="triton" takes bfloat16, float16'):
            run(impl="triton")
        with pytest.raises(ValueError, match="unknown; choose one of"):
            run(impl="quick")


def test_everything_on_request():
    """Entropy, full log-probs, hidden states and the value head of docs/integrations.md."""
    model = tiny("qwen2")
    tree = treepack.pack(shared_samples(sets=True), max_tokens=256)[0].to("cpu")
    values = term_log_probs(model, tree, entropy=True, full_log_probs=True, hidden_states=True)
    direct = head_log_probs(values.hidden_states, model.lm_head.weight, tree, entropy=True, full_log_probs=True)
    assert torch.equal(values.log_probs, direct.log_probs)
    assert torch.equal(values.entropy, direct.entropy)
    assert torch.equal(values.full_log_probs, direct.full_log_probs)
    assert values.aux_loss is None
    expected = model.model(**model_inputs(tree)).last_hidden_state[0]
    assert torch.equal(values.hidden_states, expected)
    assert torch.equal(term_log_probs(model, tree), direct.log_probs)


def test_labels_path():
    """A head that takes labels in the shape of the ids, as fused cross-entropies do."""
    model = tiny("llama")
    tree = treepack.pack(shared_samples(), max_tokens=256, branching="label")[0].to("cpu")

    def head(hidden_states, shift_labels):
        logits = model.lm_head(hidden_states)
        return -torch.nn.functional.cross_entropy(logits[0], shift_labels[0], reduction="none", ignore_index=-100)

    expected = term_log_probs(model, tree)
    values = term_log_probs(model, tree, head=head)
    assert (values - expected).abs().max() < 1e-12
    assert largest_difference(gradients(model, [values]), gradients(model, [expected])) < 1e-7
    with pytest.raises(ValueError, match="own business"):
        term_log_probs(model, tree, head=head, temperature=0.5)


def test_a_dummy_tree_takes_part():
    """CASES 33: no samples, no terms; the loss is 0 and every parameter gets a zero gradient."""
    from treepack.distributed import dummy_tree, formats_of

    model = tiny("qwen2")
    some = treepack.pack(shared_samples(), max_tokens=256)[0]
    tree = dummy_tree(formats_of(some)).to("cpu")
    values = term_log_probs(model, tree, entropy=True)
    (values.log_probs.sum() + values.entropy.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) == 0, name


def test_router_loss_is_weighted():
    """The load-balancing loss of the raw tokens: equal to transformers' own on the samples in one unpacked row."""
    model = tiny("mixtral")
    samples = shared_samples()
    tree = treepack.pack(samples, max_tokens=256)[0].to("cpu")
    with KeepDouble():
        values = term_log_probs(model, tree, aux_loss=True)
        model.set_attn_implementation("dense64")
        outputs = [
            model(input_ids=torch.as_tensor(s["input_ids"])[None], use_cache=False, output_router_logits=True)
            for s in samples
        ]
        logits = tuple(torch.cat([o.router_logits[layer] for o in outputs]) for layer in range(2))
        expected = load_balancing_loss_func(logits, 4, 2)
        assert (values.aux_loss - expected).abs() < 1e-7  # transformers counts in float32
        ours = torch.autograd.grad(values.aux_loss, model.model.layers[0].parameters(), allow_unused=True)
        theirs = torch.autograd.grad(expected, model.model.layers[0].parameters(), allow_unused=True)
    ours, theirs = ([g for g in gs if g is not None] for gs in (ours, theirs))
    assert len(ours) == len(theirs) > 3
    assert largest_difference(ours, theirs) < 1e-8


def test_value_far_out_in_the_vocabulary_of_a_half_model():
    """bfloat16 on the CPU: packed is as far from float64 as alone is."""
    samples = shared_samples()
    exact = torch.cat(alone_log_probs(tiny("llama"), samples))
    model = tiny("llama", dtype=torch.bfloat16)
    packed = torch.cat(packed_log_probs(model, samples)).double()
    alone = torch.cat(alone_log_probs(model, samples)).double()
    assert packed.shape == exact.shape
    assert (packed - exact).abs().max() <= 2 * (alone - exact).abs().max()
    assert (packed - exact).abs().mean() <= 1.2 * (alone - exact).abs().mean()
    assert model.lm_head.weight.shape[0] == VOCABULARY


def test_a_router_in_half_precision_counts_exactly():
    """300 samples on one prompt: bfloat16 has 300 and nothing near it, and no 301."""
    tree = treepack.pack([{"input_ids": [7, 8, 9, i + 10]} for i in range(301)], max_tokens=1024)[0].to("cpu")
    logits = torch.zeros(tree.num_tokens, 4, dtype=torch.bfloat16)
    logits[:, 2] = 1
    loss = router_aux_loss((logits,), tree, num_experts=4, top_k=1)
    expected = 4 * logits[0].softmax(-1)[2].float()  # every token chooses the third
    assert loss.dtype == torch.float32
    assert (loss - expected).abs() < 1e-6
