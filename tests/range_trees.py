"""What the tests of `RangeRunner` share: exact models, drawn samples, trees that are cut anywhere, gradients."""

import types

import numpy as np
import torch
from tiny_models import VOCABULARY, largest_difference, shared_samples, weights_of
from tiny_models import tiny as tiny_model

import treepack
from treepack.integrations.transformers import RangeRunner


def tiny(family):
    """A model whose norms compute in float64: those of transformers round to float32, one way or the other."""
    model = tiny_model(family)
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            module.forward = types.MethodType(norm, module)
    return model


def norm(module, x):
    kind = type(module).__name__
    x = x - x.mean(-1, keepdim=True) if "LayerNorm" in kind else x
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    weight = 1 + module.weight if "Gemma" in kind else module.weight
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def drawn_samples(rng, sets=False):
    """Between one and nine samples on up to three roots; samples end within others, and some are there twice."""
    if rng.random() < 0.2:
        return shared_samples(seed=int(rng.integers(100)), sets=sets)
    roots = [rng.integers(0, VOCABULARY, rng.integers(1, 30)) for _ in range(rng.integers(1, 4))]
    samples = []
    for _ in range(rng.integers(1, 10)):
        stem = roots[rng.integers(len(roots))]
        tail = rng.integers(0, VOCABULARY, rng.integers(0, 20))
        ids = np.concatenate([stem[: rng.integers(1, len(stem) + 1)], tail])
        roots.append(ids)
        mask = (rng.random(len(ids)) < 0.6).astype(np.uint8)
        samples.append({"input_ids": ids, "completion_mask": mask, "advantage": float(rng.standard_normal())})
    return samples


def whole(samples, **options):
    return treepack.pack(samples, max_tokens=10_000, **options)[0].to("cpu")


def cut_at(tree, *places):
    """The tree, cut before these rows, wherever they are."""
    tree._cuts = np.array(sorted({0, tree.num_tokens, *(int(x) for x in places)}), np.int32)
    return tree


def every_row(tree):
    """Ranges of one row, where that does not take too long."""
    return cut_at(tree, *range(min(tree.num_tokens, 25)))


def drawn_cut(rng, tree):
    return cut_at(tree, *rng.integers(0, tree.num_tokens + 1, rng.integers(1, 8)))


def gradients(model):
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def relative_difference(found, wanted):
    assert found.keys() == wanted.keys()
    scale = max(float(x.abs().max()) for x in wanted.values())
    return largest_difference(found, wanted) / max(scale, 1e-9)


def uncut(model, tree, loss_of=None, **options):
    """(values, gradients) of the tree in one pass."""
    out = treepack.term_log_probs(model, tree, **options)
    loss = (out * weights_of(len(out))).sum() if loss_of is None else loss_of(out, tree, torch.arange(tree.num_terms))
    loss.backward()
    return out, gradients(model)


def by_range(model, tree, loss_of=None, **options):
    """The same range by range."""
    weights, log_probs = weights_of(tree.num_terms), torch.full((tree.num_terms,), torch.nan, dtype=torch.float64)
    for part in RangeRunner(model, tree):
        out = part.term_log_probs(**options)
        if loss_of is None:
            log_probs[part.term_index] = out.detach()
            loss = (out * weights[part.term_index]).sum()
        else:
            loss = loss_of(out, part, part.term_index)
        part.backward(loss)
    return log_probs, gradients(model)
