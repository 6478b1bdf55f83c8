"""Values of the terms that the model's own LM head makes while it runs: equal to those made after it."""

import pytest
from tiny_models import shared_samples, tiny, weights_of
from torch import nn

import treepack
from treepack.distributed import dummy_tree, formats_of
from treepack.integrations.transformers.inside import InsideHead


def inside(model, tree, **options):
    run = InsideHead(model, tree, **options)
    with run:
        output = model(**run.inputs)
    return run.values(output)


def gradients(model, values):
    model.zero_grad()
    (values.log_probs @ weights_of(len(values.log_probs)) + values.entropy.sum()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


# Heads with a scale before or after a cap, and with none.
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2", "granite", "cohere2"])
def test_equal_to_term_log_probs(family):
    model = tiny(family)
    (tree,) = treepack.pack(shared_samples(), max_tokens=256)
    tree = tree.to("cpu")
    of_samples = [0.7 + 0.1 * i for i in range(tree.num_samples)]
    for temperature in (0.7, of_samples):  # the first run looks at what becomes of the logits
        wanted = treepack.term_log_probs(model, tree, temperature=temperature, entropy=True)
        expected = gradients(model, wanted)
        found = inside(model, tree, temperature=temperature, entropy=True)
        for name in ("log_probs", "entropy"):
            assert (getattr(found, name) - getattr(wanted, name)).abs().max() < 1e-12
        for gradient, other in zip(gradients(model, found), expected, strict=True):
            assert (gradient - other).abs().max() < 1e-12
    assert "forward" not in model.get_output_embeddings().__dict__


def test_a_dummy_reaches_every_parameter():
    model = tiny("qwen2")
    packed = treepack.pack(shared_samples(), max_tokens=256)
    values = inside(model, dummy_tree(formats_of(packed[0])).to("cpu"), entropy=True)
    assert values.log_probs.shape == values.entropy.shape == (0,)
    assert all((gradient == 0).all() for gradient in gradients(model, values))


def test_an_error_leaves_the_head_as_it_was():
    model = tiny("qwen2")
    (tree,) = treepack.pack(shared_samples(), max_tokens=256)
    run = InsideHead(model, tree.to("cpu"))
    with pytest.raises(RuntimeError, match="stop"), run:
        raise RuntimeError("stop")
    assert "forward" not in model.get_output_embeddings().__dict__


def test_refusals(monkeypatch):
    model = tiny("qwen2")
    (tree,) = treepack.pack(shared_samples(), max_tokens=256)
    tree = tree.to("cpu")
    run = InsideHead(model, tree)
    with run, pytest.raises(ValueError, match="without calling its LM head"):
        run.values(None)

    forward = type(model).forward

    def louder(self, *arguments, **keywords):
        output = forward(self, *arguments, **keywords)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(type(model), "forward", louder)
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        inside(model, tree)
    monkeypatch.undo()

    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"the LM head is torch\.nn\.modules\.container\.Sequential"):
        InsideHead(model, tree)
