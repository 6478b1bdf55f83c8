"""The reference of layers with a state: by hand, and in float64 against every path alone, values and all gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import forests  # noqa: E402
import recurrent_paths as alone  # noqa: E402

from treepack.attention import tree_tiles  # noqa: E402
from treepack.recurrent import (  # noqa: E402
    tree_conv1d,
    tree_gated_delta_rule,
    tree_kda,
    tree_linear_attention,
    tree_mamba2,
)

# operator: (on a tree, on a path, the inputs that are no rows of tokens)
OPERATORS = {
    "conv": (tree_conv1d, alone.conv_alone, ("weight", "bias")),
    "delta": (tree_gated_delta_rule, alone.scan_alone, ()),
    "kda": (tree_kda, alone.scan_alone, ()),
    "linear": (tree_linear_attention, alone.scan_alone, ()),
    "mamba2": (tree_mamba2, alone.mamba2_alone, ("A", "D", "dt_bias")),
}
OPTIONS = {
    "conv": [{}, {"activation": "silu"}, {"activation": "swish"}],
    "delta": [{}, {"qk_l2norm": True, "scale": 0.7}],
    "kda": [{"qk_l2norm": True}],
    "linear": [{}],
    "mamba2": [{"dt_softplus": True}, {"dt_limit": (-0.5, 0.6)}],
}
CASES = [(kind, options) for kind in OPERATORS for options in OPTIONS[kind]]
FORESTS = alone.drawn()


def close(got, want):
    """Equal to 1e-12 of the largest value (or of 1)."""
    assert got.dtype == torch.float64
    assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max())


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=[f"{kind} {options}" for kind, options in CASES])
def test_every_path_alone(kind, options, name):
    nests, padding = FORESTS[name]
    forest = forests.layout(nests, padding)
    on_tree, on_path, shared = OPERATORS[kind]
    inputs = alone.random_inputs(kind, forest.tokens)
    out = on_tree(**inputs, tree=tree_tiles(torch.from_numpy(forest.subtree_end)), **options)
    rows = len(out) - padding
    assert not out[rows:].any()

    loss, loss_alone = 0.0, 0.0
    for number, path in enumerate(forest.paths):
        path = torch.from_numpy(path)
        want = on_path(**{name: x if name in shared else x[path] for name, x in inputs.items()}, **options)
        close(out[path], want)
        weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(number), dtype=want.dtype)
        loss, loss_alone = loss + (out[path] * weight).sum(), loss_alone + (want * weight).sum()
    got = torch.autograd.grad(loss, inputs.values())
    want = torch.autograd.grad(loss_alone, inputs.values())
    for name, a, b in zip(inputs, got, want, strict=True):
        close(a, b)
        assert a.any() or not b.any(), name
        if name not in shared:
            assert not a[rows:].any()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_convolution_of_any_width(width):
    forest = forests.layout([(2, [(1, [(1, [(5, [])]), (3, [])]), (2, [])])])
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(forest.tokens, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 1, width, generator=generator, dtype=torch.float64)  # as torch.nn.Conv1d has it
    out = tree_conv1d(x, weight, tree=tree_tiles(torch.from_numpy(forest.subtree_end)))
    for path in forest.paths:
        close(out[path], alone.conv_alone(x[path], weight[:, 0]))


def test_convolution_by_hand():
    #   0 - 1 -+- 2        each y is the sum of a token and the two above it; token i is 10^i
    #          +- 3 - 4
    end = torch.tensor([5, 5, 3, 5, 5])
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]], dtype=torch.float64)
    out = tree_conv1d(x, torch.ones(1, 3, dtype=torch.float64), tree=tree_tiles(end))
    assert out.flatten().tolist() == [1, 11, 111, 1011, 11010]


def test_states_by_hand():
    # One head, keys of size one, no decay: the state is a sum along the path; with beta 1 the delta rule forgets all.
    end = torch.tensor([4, 2, 4, 4])
    one = torch.ones(4, 1, 1, dtype=torch.float64)
    v = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64).reshape(4, 1, 1)
    g = torch.zeros(4, 1, dtype=torch.float64)
    tree = tree_tiles(end)
    assert tree_linear_attention(one, one, v, g, tree=tree, scale=1.0).flatten().tolist() == [1, 11, 101, 1101]
    half = torch.full((4, 1), 0.5, dtype=torch.float64)
    out = tree_gated_delta_rule(one, one, v, g, half, tree=tree, scale=1.0)
    assert out.flatten().tolist() == [0.5, 5.25, 50.25, 525.125]


def test_padding_is_never_read():
    """NaN in rows of padding reaches neither an output nor a gradient, and padding may lie between trees."""
    end = torch.tensor([2, 2, 2, 5, 5, 5])
    for kind, (on_tree, _, shared) in OPERATORS.items():
        inputs = alone.random_inputs(kind, 6)
        for name, x in inputs.items():
            if name not in shared:
                with torch.no_grad():
                    x[2] = x[5] = torch.nan
        out = on_tree(**inputs, tree=tree_tiles(end))
        out.sum().backward()
        assert not out[2].any()
        assert not out[5].any()
        assert out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs.values())


def test_half_precision_is_computed_in_float32():
    inputs = {name: x.detach() for name, x in alone.random_inputs("delta", 6, dtype=torch.float32).items()}
    tree = tree_tiles(torch.tensor([6, 3, 3, 6, 6, 6]))
    half = {name: x.bfloat16() if name in "qkv" else x for name, x in inputs.items()}
    out = tree_gated_delta_rule(**half, tree=tree)
    want = tree_gated_delta_rule(**{name: x.float() for name, x in half.items()}, tree=tree)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want.bfloat16())


def test_a_batch_of_one_is_a_row():
    tree = tree_tiles(torch.tensor([4, 2, 4, 4]))
    for kind, (on_tree, _, shared) in OPERATORS.items():
        inputs = {name: x.detach() for name, x in alone.random_inputs(kind, 4).items()}
        batched = {name: x if name in shared else x[None] for name, x in inputs.items()}
        assert torch.equal(on_tree(**batched, tree=tree), on_tree(**inputs, tree=tree)[None])


def test_no_tokens():
    tree = SimpleNamespace(subtree_end=torch.zeros(0, dtype=torch.int32))
    for kind, (on_tree, _, _) in OPERATORS.items():
        assert len(on_tree(**alone.random_inputs(kind, 0), tree=tree)) == 0
