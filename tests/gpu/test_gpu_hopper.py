"""What only the Hopper kernels have: their rule on a real device, persistent programs, sections, a launch path of their
own."""

from __future__ import annotations

import threading

import forests
import pytest
import torch
from compare import check, evaluate, leaves, random_tree, tree

from treepack.attention import TreeTiles, tree_attention, tree_tiles
from treepack.attention import operator as triton_op
from treepack.attention import rule as triton_rule

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or bool(triton_rule.version_objection()),
    reason="needs an H100 or H200, and a Triton that the Hopper kernels were tested with",
)


def attend(end, impl="gluon", **options):
    return lambda q, k, v: tree_attention(q, k, v, subtree_end=end, return_lse=True, impl=impl, **options)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The Hopper kernels that ran, by name."""
    from treepack.attention.hopper import launch as gluon_launch

    ran: list[str] = []
    original = gluon_launch._Kernel.launch

    def launch(self, *arguments):
        ran.append(self.function.fn.__name__)
        original(self, *arguments)

    monkeypatch.setattr(gluon_launch._Kernel, "launch", launch)
    return ran


SIZES = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
EVERY = ["forward_kernel", "dq_kernel", "dkv_kernel", "sum_kernel"]
WIDE = ["forward_kernel", "dq_kernel", "wide_dkv_kernel", "sum_kernel"]


@pytest.mark.parametrize(
    ("impl", "change", "expected"),
    [
        ("triton", {}, EVERY),
        ("gluon", {}, EVERY),
        ("triton_plain", {}, []),
        ("triton", {"layout": "rows"}, EVERY),
        ("triton", {"layout": "fused", "size": 128, "dtype": torch.float16}, EVERY),
        ("triton", {"layout": "strided"}, []),
        ("triton", {"layout": "misaligned"}, []),
        ("triton", {"size": 72}, []),
        ("gluon", {"size": 96}, EVERY),
        ("gluon", {"size": 80, "layout": "fused"}, EVERY),
        ("gluon", {"size": 192, "values": 128, "layout": "latent"}, WIDE),
        ("gluon", {"size": 128, "values": 64}, EVERY),
        ("triton", {"dtype": torch.float32}, []),
        ("triton", {"sliding_window": 20}, EVERY),
        ("triton", {"softcap": 2.0}, EVERY),
        ("triton", {"size": 256}, WIDE),
        ("gluon", {"size": 256}, WIDE),
        ("gluon", {"sliding_window": 20}, EVERY),
        ("gluon", {"softcap": 2.0}, EVERY),
        ("gluon", {"sliding_window": 20, "softcap": 2.0, "size": 128, "layout": "rows"}, EVERY),
        ("triton", {"scale": -0.1}, []),
    ],
    ids=str,
)
def test_what_runs(launches, impl, change, expected):
    """The table of docs/kernel.md; without this, every other test here could pass on the portable kernels."""
    change = dict(change)
    shape = {key: change.pop(key) for key in ("layout", "dtype", "values") if key in change}
    tensors = leaves(200, 4, 2, change.pop("size", 64), **shape)
    evaluate(attend(random_tree(200), impl, **change), tensors)
    assert launches == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 72}, "head sizes 64, 80, 96, 128, 192, 256, not 72"),
        ({"size": 64, "values": 128}, "v of the head size of q and k or a smaller one"),
        ({"dtype": torch.float32}, "bfloat16 and float16, not torch.float32"),
        ({"softcap": 1e-25}, "a softcap of at least"),
        ({"scale": -0.1}, "a scale of at least"),
        ({"layout": "strided"}, "not strides"),
        ({"layout": "misaligned"}, "rows start on 16 bytes"),
    ],
    ids=str,
)
def test_gluon_says_what_it_does_not_take(change, message):
    change = dict(change)
    shape = {key: change.pop(key) for key in ("layout", "dtype", "values") if key in change}
    tensors = leaves(200, 4, 2, change.pop("size", 64), **shape)
    with pytest.raises(ValueError, match=f'impl="gluon" .*{message}.*impl="triton" takes'):
        evaluate(attend(random_tree(200), **change), tensors)


def test_an_untested_triton_runs_the_portable_kernels(monkeypatch, launches):
    monkeypatch.setattr(triton_rule.triton, "__version__", "3.99.1")
    triton_rule._say.cache_clear()
    end, tensors = random_tree(100), leaves(100, 4, 2, 64)
    with pytest.warns(RuntimeWarning, match=r"tested with Triton .*, this is 3\.99\.1: pin torch"):
        check(end, tensors)
    assert launches == []
    with pytest.raises(RuntimeError, match=r'impl="gluon" cannot run here: .* this is 3\.99\.1'):
        tree_attention(*tensors, subtree_end=end, impl="gluon")


def test_the_launch_of_triton_itself(monkeypatch):
    """What runs where a launch is not as known gives the same bits."""
    from treepack.attention.hopper import launch as gluon_launch

    assert gluon_launch.KNOWN
    end, tensors = random_tree(700, padding=30), leaves(730, 8, 2, 64)
    want = evaluate(attend(end), tensors)
    monkeypatch.setattr(gluon_launch, "KNOWN", False)
    assert all(torch.equal(a, b) for a, b in zip(evaluate(attend(end), tensors), want, strict=True))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_without_a_gradient_of_lse(size, sinks, dtype):
    """How training calls it: elsewhere every check also sends a gradient into lse, another form of dQ."""
    end = random_tree(1100, padding=40)
    check(end, leaves(1140, 8, 2, size, dtype), impl="gluon", sinks=sinks, with_lse=False)


def test_a_gradient_of_lse_alone():
    """No gradient of the output: delta is that of lse and nothing else; rows of padding send one too."""
    end, tensors = random_tree(500, padding=30), leaves(530, 4, 2, 64)

    def gradients(impl, tensors):
        lse = tree_attention(*tensors, subtree_end=end, return_lse=True, impl=impl)[1]
        weights = torch.linspace(-1, 1, lse.shape[-1], device="cuda", dtype=lse.dtype)
        return torch.autograd.grad((lse * weights).sum(), tensors[:2])

    want = gradients("reference", [x.detach().double().requires_grad_() for x in tensors])
    for a, b in zip(gradients("gluon", tensors), want, strict=True):
        assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max()


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("layout", ["columns", "rows", "fused"])
def test_layouts_at_odd_lengths(size, layout):
    """With (H N, D), tiles past N hold the next head's rows."""
    for n, padding in ((1, 0), (130, 0), (250, 3), (385, 140)):
        check(random_tree(n, padding=padding), leaves(n + padding, 6, 2, size, layout=layout), impl="gluon")


@pytest.mark.parametrize(("size", "values"), [(192, 128), (192, 192), (128, 64), (256, 96)])
@pytest.mark.parametrize("layout", ["columns", "latent"])
def test_two_sizes_at_odd_lengths(size, values, layout):
    for n, padding in ((1, 0), (130, 0), (385, 140)):
        tensors = leaves(n + padding, 6, 2, size, layout=layout, values=values)
        check(random_tree(n, padding=padding), tensors, impl="gluon")


@pytest.mark.parametrize(("size", "values"), SIZES)
def test_who_computes_an_item_does_not_change_its_bits(monkeypatch, size, values):
    """One program that walks every item (each ring wraps at every phase), seven, more than there are items; one
    group of heads side by side, or two."""
    from treepack.attention.hopper import launch as gluon_launch

    end = tree([*forests.agent(2, 5, 700, 150), (3, [(1, []), (200, [])])], padding=300)
    tensors = [x.detach() for x in leaves(len(end), 8, 2, size, values=values)]
    shared = triton_op.device_limits(0)[0]
    want = attend(end)(*tensors)
    for programs in (1, 7, 10_000):
        for section in (0, 1 << 40):
            monkeypatch.setattr(triton_op, "device_limits", lambda index, programs=programs: (shared, programs))
            monkeypatch.setattr(gluon_launch, "SECTION_BYTES", section)
            assert all(torch.equal(a, b) for a, b in zip(attend(end)(*tensors), want, strict=True))


@pytest.mark.parametrize("split", [False, True], ids=["looped", "split"])
def test_upstream_gradients_off_16_bytes(split):
    """They are copied, so that impl="gluon" takes them too."""
    triton_op.split_heads_override = split
    end, tensors = random_tree(300), leaves(300, 4, 2, 64)
    out = tree_attention(*tensors, subtree_end=end, impl="gluon")
    dout = torch.randn(out.numel() + 1, device="cuda", dtype=out.dtype)[1:].view(1, 300, 4, 64).transpose(1, 2)
    want = torch.autograd.grad(out, tensors, dout.clone(), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, tensors, dout), want, strict=True))


@pytest.mark.parametrize(("size", "values"), SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (12, 2), (16, 8)])
def test_some_key_tiles_split(heads, kv_heads, size, values):
    """By the rule, on this device: the tiles of the prompt alone, and the same bits from every run."""
    end = tree([(300, [(70, [])] * 60)], padding=200)
    split = int(tree_tiles(end).dkv_items(heads, kv_heads)[0])
    assert 0 < split < 5
    tensors = leaves(len(end), heads, kv_heads, size, values=values)
    check(end, tensors, impl="gluon")
    first = evaluate(attend(end), tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, evaluate(attend(end), tensors), strict=True))


def test_a_graph_replayed_many_times():
    """Every replay starts its own count of items."""
    end = tree_tiles(random_tree(2000, padding=100))
    q, k, v = (x.detach() for x in leaves(2100, 8, 2, 128))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tree_attention(q, k, v, end)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tree_attention(q, k, v, end)
    for _ in range(5):
        q.mul_(-0.7)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, tree_attention(q, k, v, end))


def test_scored_under_inference_mode_then_trained():
    """The schedule that a first pass leaves with the tree must be one that training can save."""
    end, tensors = random_tree(400), leaves(400, 4, 2, 64)
    shared = TreeTiles(end)
    with torch.inference_mode():
        tree_attention(*tensors, shared)
    got = torch.autograd.grad(tree_attention(*tensors, shared).square().sum(), tensors)
    want = torch.autograd.grad(tree_attention(*tensors, TreeTiles(end)).square().sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_first_calls_from_several_threads():
    """Triton shows a kernel to other threads before it is loaded."""
    from treepack.attention.hopper import launch as gluon_launch

    end, tensors = tree_tiles(random_tree(700)), [x.detach() for x in leaves(700, 4, 2, 128)]
    want = tree_attention(*tensors, end, impl="gluon")
    gluon_launch.forward_launch.compiled.clear()
    gluon_launch.forward_launch.function.device_caches.clear()
    torch.cuda.synchronize()
    found, start = [], threading.Barrier(4)

    def work():
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            out = tree_attention(*tensors, end, impl="gluon")
            torch.cuda.current_stream().synchronize()
        found.append(torch.equal(out, want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    end, tensors = random_tree(600, padding=20), leaves(620, 8, 2, 64)
    want = evaluate(attend(end), tensors)
    moved = [x.detach().to("cuda:1").requires_grad_() for x in tensors]
    out, lse = attend(end.to("cuda:1"))(*moved)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), want[0])
    assert torch.equal(lse.to("cuda:0"), want[1])
    torch.autograd.grad(out.sum() + lse.sum(), moved)
