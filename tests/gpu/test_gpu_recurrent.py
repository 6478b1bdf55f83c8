"""Recurrent layers on a GPU: as right as flash-linear-attention on every sample alone, bit-equal, compiled once."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("fla", reason="needs flash-linear-attention: treepack[recurrent]")

import forests
import recurrent_compare as compare

from treepack import recurrent
from treepack.recurrent import chunked, tree_segments

KINDS = tuple(compare.SHAPES)
COMB = [(3, [(1, []), (200, [(4, []), (2, [(17, []), (35, [(5, []), (1, [])])])])]), (1, [])]
TREES = {
    "one token": ([(1, [])], 0),
    "a chain": ([(130, [])], 0),
    "a comb, padding": (COMB, 7),
    "a wide fork": ([(70, [(3, [])] * 40)], 0),
    "agent": ([(300, [(100, [])] * 3)], 0),
    "drawn": (forests.random_nests(random.Random(3), 400), 5),
}


def float64(kind, leaves, tree, paths):
    """Output and gradients of the reference in float64, of the same loss as `compare.tree_results`."""
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    out = compare.on_tree(kind, wide, tree, "reference")
    count = compare.samples_through(paths, out.shape[1])[None, :, None, None]
    weight = compare.signs(out.new_empty(out.shape, dtype=torch.bfloat16)).double() * count
    gradients = torch.autograd.grad(out, list(wide.values()), weight)
    return {"o": out.detach(), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_as_right_as_alone(kind, name):
    """Norm of the error at most 1.2 times that of flash-linear-attention on every sample alone, and half a unit in the
    last place of bf16: a sum over samples is rounded once more here, there it is float32, and errors partly cancel."""
    forest = forests.layout(*TREES[name])
    tree, n = compare.tree_of(forest.subtree_end), forest.tokens
    leaves = compare.inputs(kind, n)
    want = float64(kind, leaves, tree, forest.paths)
    got = compare.tree_results(kind, leaves, tree, forest.paths)
    peer = compare.alone_results(kind, leaves, forest.paths)
    for result, x in want.items():
        size = max(float(x.norm()), 0.1 * x.numel() ** 0.5)  # the gate of a root has no gradient
        error, allowed = (float((y - x).norm()) for y in (got[result].double(), peer[result].double()))
        assert error <= 1.2 * allowed + 2**-9 * size, (result, error, allowed, size)
    padding = TREES[name][1]
    if padding:
        assert not any(x[:, n - padding :].any() for x in got.values())


@pytest.mark.parametrize("kind", KINDS)
def test_level_by_level_agrees(kind):
    forest = forests.layout(COMB)
    tree = compare.tree_of(forest.subtree_end)
    leaves = compare.inputs(kind, forest.tokens)
    got = compare.tree_results(kind, leaves, tree, forest.paths, "levels")
    want = compare.tree_results(kind, leaves, tree, forest.paths, "triton")
    for result, x in want.items():
        assert compare.distance(got[result], x) < 2e-2, result


@pytest.mark.parametrize("kind", KINDS)
def test_bits_compilations_and_no_waiting(kind):
    """Equal bits from run to run; nothing compiles for another tree with chunks of the same size and blocks of the same
    width; nothing waits for the device."""
    from treepack.recurrent.triton import walk

    forest = forests.layout(forests.random_nests(random.Random(5), 3000, branching=4))
    tree = compare.tree_of(forest.subtree_end)
    leaves = compare.inputs(kind, forest.tokens)
    first = compare.tree_results(kind, leaves, tree, forest.paths)
    count = [len(next(iter(f.device_caches.values()))[0]) for f in (walk.walk_forward, walk.walk_backward)]
    for _ in range(5):
        again = compare.tree_results(kind, leaves, tree, forest.paths)
        assert all(torch.equal(x, again[name]) for name, x in first.items())

    def form(tree):
        segments = tree_segments(tree)
        size = chunked.chunk_size(segments, compare.chunk_sizes(kind))
        return size, chunked.walk(segments, size).narrow

    compared = 0
    for seed in range(20):
        other = forests.layout(forests.random_nests(random.Random(seed), 500 + 37 * seed, branching=2))
        other_tree = compare.tree_of(other.subtree_end)
        if form(other_tree) == form(tree):
            compare.tree_results(kind, compare.inputs(kind, other.tokens), other_tree, other.paths)
            compared += 1
    assert compared > 2
    assert count == [len(next(iter(f.device_caches.values()))[0]) for f in (walk.walk_forward, walk.walk_backward)]
    out = compare.on_tree(kind, leaves, tree)
    dout = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = compare.on_tree(kind, leaves, tree)
        torch.autograd.grad(out, list(leaves.values()), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_convolution(name, silu):
    """Errors at most those of the reference computed in bf16's place: float32, rounded once."""
    forest = forests.layout(*TREES[name])
    tree = compare.tree_of(forest.subtree_end)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(forest.tokens, 1000, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1000, 4, generator=generator, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1000, generator=generator, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(x.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    activation = "silu" if silu else None
    results = []
    for impl, dtype in (("triton", torch.bfloat16), ("reference", torch.float64), ("reference", torch.bfloat16)):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, weight, bias)]
        y = recurrent.tree_conv1d(*leaves, tree=tree, activation=activation, impl=impl)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))])
    for got, want, peer in zip(*results, strict=True):
        assert compare.distance(got, want) <= max(1.2 * compare.distance(peer, want), 4e-3)
    again = recurrent.tree_conv1d(x, weight, bias, tree=tree, activation=activation)
    assert torch.equal(results[0][0], again)


def test_a_convolution_reads_rows_of_any_distance():
    forest = forests.layout(COMB)
    tree = compare.tree_of(forest.subtree_end)
    wide = torch.randn(forest.tokens, 300, device="cuda")
    weight = torch.randn(100, 4, device="cuda")
    for x in (wide[:, 100:200], wide.T.contiguous().T[:, :100]):
        got = recurrent.tree_conv1d(x, weight, tree=tree)
        assert compare.distance(got, recurrent.tree_conv1d(x, weight, tree=tree, impl="reference")) < 1e-6


def test_mamba2():
    forest = forests.layout(COMB, 3)
    tree, n = compare.tree_of(forest.subtree_end), forest.tokens
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, dt, B, C = normal(n, 128, 64), normal(n, 128), normal(n, 8, 128), normal(n, 8, 128) / 128**0.5
    A, D, dt_bias = -torch.rand(128, device="cuda"), torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True}
    got = recurrent.tree_mamba2(x, dt, A, B, C, tree=tree, **options)
    wide = [y.double() for y in (x, dt, A, B, C)]
    want = recurrent.tree_mamba2(*wide, tree=tree, **{**options, "D": D.double(), "dt_bias": dt_bias.double()},
                                 impl="reference")  # fmt: skip
    assert compare.distance(got, want) < 1e-2


def test_the_installed_version_is_known():
    assert chunked.reason() is None
