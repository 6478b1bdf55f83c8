"""The reference of tree attention: by hand on a forest of 8 tokens, and against every root-to-leaf path run alone
(float64)."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

import forests  # noqa: E402

from treepack.attention import reference  # noqa: E402
from treepack.attention.reference import tree_attention, tree_depth, tree_mask  # noqa: E402

#   0 - 1 -+- 2 - 3         two branches under a shared run, a second tree, one row of padding
#          +- 4 - 5
#   6                       7 = padding
SMALL = [(2, [(2, []), (2, [])]), (1, [])]
SEES = ["0", "01", "012", "0123", "014", "0145", "6", ""]


def small():
    forest = forests.layout(SMALL, padding=1)
    return forest, torch.from_numpy(forest.subtree_end)


def inputs(n, heads, kv_heads, size, seed=0, dtype=torch.float64, values=None):
    """q, k and v; `values`: the head size of v where it is another."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, values or size))
    q, k, v = (torch.randn(n, *shape, generator=g, dtype=dtype) for shape in shapes)
    return q, k, v


def alone(q, k, v, path, *, scale=None, window=None, softcap=None, sinks=None):
    """Causal attention of one path, written with loops over heads so that it shares nothing with the reference."""
    q, k, v = (x[path] for x in (q, k, v))
    length, heads, size = q.shape
    group = heads // k.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (window or length))
    out, lses = [], []
    for h in range(heads):
        s = q[:, h] @ k[:, h // group].T * (1 / math.sqrt(size) if scale is None else scale)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        s = torch.where(visible, s, -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[h].expand(length, 1)], dim=1)
        out.append(torch.softmax(s, dim=1)[:, :length] @ v[:, h // group])
        lses.append(torch.logsumexp(s, dim=1))
    return torch.stack(out, dim=1), torch.stack(lses)


def test_mask_by_hand():
    _, end = small()
    assert end.tolist() == [6, 6, 4, 4, 6, 6, 7, 7]
    assert ["".join(str(i) for i in row.nonzero().flatten().tolist()) for row in tree_mask(end)] == SEES


def test_window_by_hand():
    _, end = small()
    seen = ["".join(str(i) for i in row.nonzero().flatten().tolist()) for row in tree_mask(end, sliding_window=2)]
    assert seen == ["0", "01", "12", "23", "14", "45", "6", ""]  # the token above 4 is 1, not 3


def test_depth_from_subtree_end():
    rng = random.Random(3)
    for tokens in (1, 2, 17, 200):
        forest = forests.layout(forests.random_nests(rng, tokens), padding=3)
        assert tree_depth(torch.from_numpy(forest.subtree_end))[:tokens].tolist() == forest.depth[:tokens].tolist()


def test_values_by_hand():
    """Equal scores: every token averages what it sees."""
    _, end = small()
    q, k = torch.zeros(8, 1, 4, dtype=torch.float64), torch.randn(8, 1, 4, dtype=torch.float64)
    v = torch.arange(8.0, dtype=torch.float64)[:, None, None].expand(8, 1, 4)
    out, lse = tree_attention(q, k, v, end, return_lse=True)
    assert out[:, 0, 0].tolist() == pytest.approx([0, 0.5, 1, 1.5, 5 / 3, 2.5, 6, 0])
    assert lse[0].exp().tolist() == pytest.approx([1, 2, 3, 4, 3, 4, 1, 1])  # the log of padding is 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "values"),
    [(1, 1, 8, 8), (4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 8, 8), (2, 2, 192, 128), (6, 2, 6, 4), (4, 1, 4, 12)],
)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 5},
        {"softcap": 1.5},
        {"sinks": True},
        {"scale": -0.3},
        {"window": 1, "softcap": 2.0, "sinks": True, "scale": 0.7},
    ],
    ids=str,
)
def test_every_path_alone(heads, kv_heads, size, values, features):
    """Values equal each path alone; gradients equal the sum over paths, each token's upstream gradient split over
    its paths."""
    forest = forests.layout(forests.random_nests(random.Random(heads), 57), padding=2)
    end = torch.from_numpy(forest.subtree_end)
    n = forest.tokens
    leaves = [x.requires_grad_() for x in inputs(n, heads, kv_heads, size, values=values)]
    features = dict(features)
    if features.get("sinks"):
        features["sinks"] = torch.randn(heads, dtype=torch.float64, requires_grad=True)
        leaves.append(features["sinks"])
    ours = {("sliding_window" if key == "window" else key): value for key, value in features.items()}
    out, lse = tree_attention(*leaves[:3], end, return_lse=True, **ours)

    g = torch.Generator().manual_seed(1)
    passing = torch.zeros(n, dtype=torch.float64)  # paths through each token
    for path in forest.paths:
        passing[path] += 1
    loss_paths = 0.0
    loss_tree = torch.zeros((), dtype=torch.float64)
    for path in forest.paths:
        weight = torch.randn(len(path), heads, values, generator=g, dtype=torch.float64)
        weight_lse = torch.randn(heads, len(path), generator=g, dtype=torch.float64)
        o, s = alone(*leaves[:3], torch.from_numpy(path), **features)
        torch.testing.assert_close(out[path], o)
        torch.testing.assert_close(lse[:, path], s)
        loss_paths = loss_paths + (o * weight).sum() + (s * weight_lse).sum()
        loss_tree = loss_tree + (out[path] * weight).sum() + (lse[:, path] * weight_lse).sum()
    for ours_grad, want in zip(
        torch.autograd.grad(loss_tree, leaves), torch.autograd.grad(loss_paths, leaves), strict=True
    ):
        torch.testing.assert_close(ours_grad, want)


def test_gradcheck():
    forest = forests.layout([(2, [(1, []), (2, [])])], padding=1)
    end = torch.from_numpy(forest.subtree_end)
    q, k, v = (x.requires_grad_() for x in inputs(forest.tokens, 2, 1, 3, values=2))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: tree_attention(q, k, v, end, softcap=2.0, sinks=s, return_lse=True), (q, k, v, sinks)
    )


@pytest.mark.parametrize("sinks", [None, torch.ones(2)])
def test_padding_is_zero(sinks):
    """One fully masked row must not poison anything: outputs and gradients there are 0, all others finite."""
    forest = forests.layout([(3, [(2, [])])], padding=4)
    end = torch.from_numpy(forest.subtree_end)
    q, k, v = (x.requires_grad_() for x in inputs(forest.tokens, 2, 2, 4, dtype=torch.float32))
    out, lse = tree_attention(q, k, v, end, sinks=sinks, return_lse=True)
    (out.square().sum() + lse.sum()).backward()
    assert (out[5:] == 0).all()
    assert (lse[:, 5:] == 0).all()
    for x in (q, k, v):
        assert (x.grad[5:] == 0).all()
        assert x.grad.isfinite().all()
        assert (x.grad[:5] != 0).any()


@pytest.mark.parametrize("values", [8, 12, 6])
def test_layouts_agree(values):
    forest = forests.layout(SMALL)
    end = torch.from_numpy(forest.subtree_end)
    q, k, v = inputs(forest.tokens, 4, 2, 8, values=values)
    out, lse = tree_attention(q, k, v, end, return_lse=True)
    hf = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out4, lse4 = tree_attention(*hf, end, return_lse=True)
    assert out4.shape == (1, 4, forest.tokens, values)
    assert lse4.shape == (1, 4, forest.tokens)
    assert torch.equal(out4[0].transpose(0, 1), out)
    assert torch.equal(lse4[0], lse)


def test_low_precision_is_upcast():
    forest = forests.layout(SMALL)
    end = torch.from_numpy(forest.subtree_end)
    q, k, v = (x.bfloat16() for x in inputs(forest.tokens, 2, 2, 8))
    out, lse = tree_attention(q, k, v, end, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, tree_attention(q.float(), k.float(), v.float(), end).bfloat16())
    eager = tree_attention(q, k, v, end, upcast=False)
    assert eager.dtype == torch.bfloat16
    torch.testing.assert_close(eager.float(), out.float(), atol=0.05, rtol=0.05)


def test_single_token_and_chain():
    for n in (1, 9):
        q, k, v = inputs(n, 1, 1, 4)
        out = tree_attention(q, k, v, torch.full((n,), n, dtype=torch.int32))
        torch.testing.assert_close(out, alone(q, k, v, torch.arange(n))[0])


def test_errors_name_the_shapes():
    q, k, v = inputs(4, 3, 2, 4)
    end = torch.full((4,), 4)
    with pytest.raises(ValueError, match="3 heads, k has 2"):
        tree_attention(q, k, v, end)
    with pytest.raises(ValueError, match="4 tokens"):
        tree_attention(k, k, v, end[:3])
    with pytest.raises(ValueError, match="batch size 2"):
        tree_attention(q.expand(2, 4, 3, 4), k, v, end)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 7},
        {"softcap": 1.5},
        {"sinks": True},
        {"sliding_window": 9, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("values", [6, 4, 9])
def test_both_passes_are_those_of_autograd(options, with_lse, values):
    """The equations of docs/kernel.md against autograd, in float64; padding rows among them."""
    options = dict(options)
    g = torch.Generator().manual_seed(4)
    end = torch.from_numpy(forests.layout(forests.random_nests(random.Random(4), 40), padding=3).subtree_end)
    shapes = ((4, 6), (2, 6), (2, values), (4, values))
    q, k, v, dout = (torch.randn(43, *shape, generator=g, dtype=torch.float64) for shape in shapes)
    dlse = torch.randn(4, 43, generator=g, dtype=torch.float64) if with_lse else None
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(4, generator=g, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = reference.tree_attention(*leaves, end, scale=0.3, return_lse=True, **options)
    loss = (out * dout).sum() + (0.0 if dlse is None else (lse * dlse).sum())
    want = [out, lse, *torch.autograd.grad(loss, leaves)]
    for a, b in zip(reference.both_passes(q, k, v, end, dout, dlse, scale=0.3, **options), want, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
