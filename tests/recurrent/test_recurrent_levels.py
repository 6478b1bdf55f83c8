"""Level by level, with a function of torch in the place of flash-linear-attention's: states go from parents to
children, values and gradients are those of the reference in float64."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import forests  # noqa: E402
import recurrent_paths as alone  # noqa: E402

from treepack.recurrent import levels, reference, tree_segments  # noqa: E402

FORESTS = alone.drawn(4)


def sequences(q, k, v, g, beta=None, *, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, scale,
              use_qk_l2norm_in_kernel=False):  # fmt: skip
    """The contract of chunk_gated_delta_rule, chunk_kda and chunk_simple_gla, token by token."""
    assert output_final_state
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    out, final = [], []
    cuts = cu_seqlens_cpu.tolist()
    for number, (a, b) in enumerate(pairwise(cuts)):
        state = k.new_zeros(v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state[number]
        for t in range(a, b):
            decay = g[0, t].exp()
            state = state * decay.reshape(*decay.shape, *([1] * (3 - decay.dim())))
            key = k[0, t]
            added = v[0, t] if beta is None else beta[0, t][:, None] * (v[0, t] - (state * key[..., None]).sum(1))
            state = state + key[..., None] * added[:, None]
            out.append(scale * (state * q[0, t][..., None]).sum(1))
        final.append(state)
    return torch.stack(out)[None], torch.stack(final)


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("kind", ["delta", "kda", "linear"])
def test_equals_the_reference(kind, name, monkeypatch):
    names = ("chunk_gated_delta_rule", "chunk_kda", "chunk_simple_gla")
    fla = SimpleNamespace(**dict.fromkeys(names, sequences))
    monkeypatch.setattr(levels, "import_module", lambda name: fla)
    forest = forests.layout(*FORESTS[name])
    tree = tree_segments(SimpleNamespace(subtree_end=torch.from_numpy(forest.subtree_end)))
    inputs = alone.random_inputs(kind, forest.tokens)
    operator = {"delta": "tree_gated_delta_rule", "kda": "tree_kda", "linear": "tree_linear_attention"}[kind]
    options = {"scale": 0.3} if kind == "linear" else {"scale": 0.3, "qk_l2norm": True}
    results = []
    for module in (levels, reference):
        out = getattr(module, operator)(**inputs, tree=tree, **options)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        results.append([out, *torch.autograd.grad((out * weight).sum(), list(inputs.values()))])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max())
