"""How the kernels behave in a program: bits, memory, compilation, autograd, graphs, offsets (CASES 20-24, 27, 30,
32)."""

from __future__ import annotations

import forests
import pytest
import torch
from compare import check, evaluate, leaves, random_tree, tree
from torch.utils.checkpoint import checkpoint

from treepack.attention import operator as triton_op
from treepack.attention import reference, tree_attention, tree_tiles
from treepack.attention import rule as triton_rule

pytestmark = pytest.mark.parametrize("kernels", ["hopper", "portable"], indirect=True)


def attend(end, **options):
    return lambda q, k, v: tree_attention(q, k, v, subtree_end=end, return_lse=True, **options)


@pytest.mark.parametrize("split", [False, True], ids=["looped", "split"])
def test_bit_equal_from_run_to_run(split):
    triton_op.split_heads_override = split
    end, tensors = random_tree(4099, padding=50), leaves(4149, 12, 2, 128)
    first = evaluate(attend(end), tensors)
    for _ in range(4):
        for a, b in zip(first, evaluate(attend(end), tensors), strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def nan_memory():
    """Fresh memory is full of NaN (and of the largest integer)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("split", [False, True], ids=["looped", "split"])
def test_every_cell_is_written(nan_memory, size, split):
    triton_op.split_heads_override = split
    for n, padding in ((137, 0), (100, 200), (64, 0), (1, 130)):
        check(random_tree(n, padding=padding), leaves(n + padding, 4, 2, size))
    check(random_tree(300, padding=90), leaves(390, 4, 2, size), sliding_window=50, sinks=True, softcap=2.0)


@pytest.mark.parametrize(
    ("size", "values", "layout"),
    [
        (64, 64, "columns"),
        (80, 80, "columns"),
        (128, 128, "columns"),
        (128, 128, "rows"),
        (64, 64, "strided"),
        (192, 128, "columns"),
        (192, 128, "latent"),
    ],
)
def test_guard_regions(monkeypatch, size, values, layout):
    """Nothing is written outside a buffer, and nothing read outside an input reaches a result."""
    guard, sentinel, buffers = 4096, 123.0, []

    def guarded(like, *shape, dtype=None):
        count = torch.Size(shape).numel()
        whole = torch.full((count + 2 * guard,), sentinel, device=like.device, dtype=dtype or like.dtype)
        whole[guard : guard + count] = float("nan")
        buffers.append((whole, count))
        return whole[guard : guard + count].view(shape)

    def inside_nan(x):
        """The same view in the middle of memory full of NaN."""
        dense = x.detach()
        span = sum((s - 1) * t for s, t in zip(dense.shape, dense.stride(), strict=True)) + 1
        whole = torch.full((span + 2 * guard,), float("nan"), device="cuda", dtype=x.dtype)
        view = whole.as_strided(dense.shape, dense.stride(), guard)
        view.copy_(dense)
        return view.requires_grad_()

    end = random_tree(205, padding=9)
    tensors = leaves(214, 4, 2, size, layout=layout, values=values)
    triton_op.split_heads_override = False
    want = evaluate(attend(end), tensors)
    monkeypatch.setattr(triton_op, "_empty", guarded)
    for split in (False, True):
        triton_op.split_heads_override = split
        got = evaluate(attend(end), [inside_nan(x) for x in tensors])
        torch.cuda.synchronize()
        if not split:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(x.isfinite().all() for x in got)
    assert len(buffers) >= 14
    for whole, count in buffers:
        assert (whole[:guard] == sentinel).all()
        assert (whole[guard + count :] == sentinel).all()


@pytest.mark.parametrize("values", [None, 48])
def test_one_compilation_for_all_lengths(kernels, values):
    import triton

    from treepack.attention.hopper import launch as gluon_launch
    from treepack.attention.triton import launch as triton_launch

    size = 64 if kernels == "hopper" else 32
    for module in (gluon_launch, triton_launch):  # forget what was compiled, as in a fresh process
        for found in vars(module).values():
            if isinstance(found, triton.runtime.JITFunction):
                found.device_caches.clear()
            elif hasattr(found, "compiled"):
                found.compiled.clear()
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*args, fn=None, **kwargs):
        compiled.append(getattr(fn, "name", str(fn)))

    triton.knobs.runtime.jit_post_compile_hook = hook
    try:

        def run(n):
            for kernel in ("forward_launch", "dq_launch", "dkv_launch"):
                # Else their own path would launch what it has, and Triton would not be asked whether it fits.
                getattr(gluon_launch, kernel).compiled.clear()
            evaluate(attend(random_tree(n)), leaves(n, 4, 4, size, values=values))

        run(1000)
        first = list(compiled)
        for n in (1, 2, 16, 17, 63, 64, 100, 129, 555, 2048):
            run(n)
        assert 1 <= len(first) <= 4, first
        assert compiled == first, f"compiled again: {compiled[len(first) :]}"
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def test_operators():
    end = random_tree(200)
    q, k, v = (x.detach().squeeze(0).transpose(0, 1).requires_grad_() for x in leaves(200, 4, 2, 64))
    tiles = tree_tiles(end)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    lists = (*tiles.lists(128), *tiles.lists(64), None, None, tiles.schedule(), tiles.dkv_items(4, 2))
    plain = (q, k, v, None, end, None, *lists, 0.125, 0, 0.0, triton_rule.AUTO)
    every = (
        q,
        k,
        v,
        sinks,
        end,
        tiles.depth(),
        *tiles.lists(128, 50),
        *tiles.lists(64, 50),
        *tiles.lists(64, 50, True),
        None,
        None,
        0.125,
        50,
        2.0,
        triton_rule.PLAIN,
    )
    for arguments in (plain, every):
        # A bfloat16 kernel is compared with itself here, so the tolerance may be loose.
        torch.library.opcheck(triton_op.tree_attention_forward, arguments, rtol=1e-2, atol=1e-2)
    for operator, arguments in (
        (triton_op.tile_lists, (end, None, 64, 0, False)),
        (triton_op.tile_schedule, (end, tiles.lists(128)[0])),
        (triton_op.backward_items, (tiles.schedule(), 4, 2)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("prepared", [False, True], ids=["subtree_end", "tiles"])
def test_torch_compile(prepared):
    """The whole graph, dynamic lengths, no recompilation per length; and equal bits."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def model(q, k, v, end):
        return tree_attention(q * 1.5, k, v, subtree_end=end) + 1.0

    def with_tiles(q, k, v, tiles):
        return tree_attention(q * 1.5, k, v, tiles) + 1.0

    function = with_tiles if prepared else model
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for n in (300, 513, 700, 1024):
        end, tensors = random_tree(n), leaves(n, 4, 2, 64)
        mask = tree_tiles(end) if prepared else end
        want = torch.autograd.grad(function(*tensors, mask).square().sum(), tensors)
        got = torch.autograd.grad(compiled(*tensors, mask).square().sum(), tensors)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    end, tensors = tree_tiles(random_tree(500)), leaves(500, 4, 2, 64)
    want = torch.autograd.grad(tree_attention(*tensors, end).square().sum(), tensors)
    out = checkpoint(lambda q, k, v: tree_attention(q, k, v, end), *tensors, use_reentrant=reentrant)
    out.square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(tensors, want, strict=True))


@pytest.mark.parametrize("prepared", [False, True], ids=["subtree_end", "tiles"])
def test_cuda_graph(prepared):
    """Forward and backward in one graph, replayed on new values."""
    end = random_tree(600, padding=40)
    tensors = leaves(640, 4, 2, 64)
    mask = {"tree": tree_tiles(end)} if prepared else {"subtree_end": end}

    def step():
        return torch.autograd.grad(tree_attention(*tensors, **mask).square().sum(), tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (9, 10):
        with torch.no_grad():
            for x, new in zip(tensors, leaves(640, 4, 2, 64, seed=seed), strict=True):
                x.copy_(new)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


def test_offsets_past_2_31_elements():
    """N x H x D = 2^31 + 2^24: documents of 512 tokens, the last ones checked for the first and the last head."""
    n, heads, size, length = 131_072 + 1024, 128, 128, 512
    end = ((torch.arange(n, device="cuda") // length + 1) * length).to(torch.int32)
    assert n * heads * size > 2**31
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.empty(n, heads, size, device="cuda", dtype=torch.bfloat16).normal_(generator=g) for _ in range(4)
    )
    leaves_ = [x.requires_grad_() for x in (q, k, v)]
    out = tree_attention(*leaves_, subtree_end=end)
    gradients = torch.autograd.grad(out, leaves_, dout)
    for rows in (slice(0, length), slice(n - length, n)):
        for head in (0, heads - 1):
            small = [x.detach()[rows, head : head + 1].double().requires_grad_() for x in leaves_]
            want = reference.tree_attention(*small, torch.full((length,), length, device="cuda"))
            pairs = zip(
                [out, *gradients],
                [want, *torch.autograd.grad(want, small, dout[rows, head : head + 1].double())],
                strict=True,
            )
            for a, b in pairs:
                torch.testing.assert_close(a[rows, head : head + 1].double(), b, rtol=3e-2, atol=3e-2)


def test_refusals():
    q, k, v = leaves(64, 4, 2, 64)
    end = random_tree(64)
    with pytest.raises(ValueError, match="made for another packed tree"):
        tree_attention(q, k, v, subtree_end=random_tree(63))
    with pytest.raises(ValueError, match="on cpu"):
        tree_attention(q, k, v, subtree_end=end.cpu())
    with pytest.raises(TypeError, match="float64"):
        tree_attention(q.double(), k.double(), v.double(), subtree_end=end)
    with pytest.raises(ValueError, match="multiples of 8"):
        tree_attention(q[..., :60], k[..., :60], v[..., :60], subtree_end=end)
    with pytest.raises(ValueError, match="256"):
        tree_attention(*leaves(64, 2, 2, 512), subtree_end=end)


def test_metadata_is_small():
    """At most 16 bytes a token from the compact lists (here: what the device builder's triangle really holds)."""
    for name, nests in forests.gpu_trees().items():
        forest = forests.layout(nests)
        tiles = tree_tiles(torch.from_numpy(forest.subtree_end).cuda())
        used = 4 * forest.tokens
        for block in (128, 64):
            rows, _ = tiles.lists(block)
            used += 4 * rows.numel() + 4 * int(2 * rows[:, 1].sum() + rows[:, 3].sum())
        assert used <= 16 * forest.tokens, name
        assert tree(nests).shape[0] == forest.tokens
