"""Cases of `test_attention_triton.py`: run with TRITON_INTERPRET=1, prints one line of JSON."""

from __future__ import annotations

import json
import random
import time
import warnings

import forests

# name -> (tokens, heads, kv heads, head size, padding, options). Small: the interpreter runs about a thousand tile
# steps a second.
CASES = {
    "one token": (1, 1, 1, 16, 0, {}),
    "two tokens": (2, 2, 1, 16, 0, {}),
    "63": (63, 1, 1, 16, 0, {}),
    "65": (65, 1, 1, 16, 0, {"layout": "rows"}),
    "129": (129, 2, 1, 16, 0, {"split": True}),
    "a run": (300, 1, 1, 16, 0, {"nests": [(300, [])]}),
    "two runs and a gap": (460, 1, 1, 16, 0, {"nests": [(130, [(130, []), (200, [])])]}),
    "padding": (90, 2, 1, 16, 50, {"sinks": True}),
    "head size 80": (70, 2, 2, 80, 3, {"layout": "columns"}),
    "head size 24, strided": (70, 2, 2, 24, 0, {"layout": "strided"}),
    "grouped, split": (70, 6, 2, 16, 0, {"split": True}),
    "grouped, looped": (70, 6, 2, 16, 5, {"split": False}),
    "window": (200, 2, 1, 16, 9, {"sliding_window": 20}),
    "window 1": (40, 1, 1, 16, 0, {"sliding_window": 1}),
    "soft cap": (70, 1, 1, 16, 0, {"softcap": 1.5, "scale": 0.5}),
    "last rows": (300, 1, 1, 16, 0, {"queries": 100}),
    "last rows from a tile on": (300, 4, 2, 16, 0, {"queries": 172, "layout": "rows", "split": True}),
    "last rows, many above": (420, 2, 1, 16, 0, {"nests": [(330, [(50, []), (40, [])])], "queries": 33}),
    "last rows, nothing above seen": (300, 1, 1, 16, 5, {"nests": [(200, []), (100, [])], "queries": 105}),
    "last rows, strided": (200, 2, 2, 24, 9, {"queries": 50, "layout": "strided"}),
    "last rows, all": (
        200,
        4,
        2,
        16,
        7,
        {"queries": 70, "sliding_window": 30, "softcap": 3.0, "sinks": True, "split": False},
    ),
    "192 / 128, latent": (50, 2, 2, 192, 3, {"value_size": 128, "layout": "latent"}),
    "64 / 128, split": (70, 2, 1, 64, 5, {"value_size": 128, "layout": "rows", "split": True}),
    "96 / 64": (70, 2, 2, 96, 0, {"value_size": 64}),
    "80 / 96, latent": (40, 2, 1, 80, 3, {"value_size": 96, "layout": "latent", "split": False}),
    "24 / 16, strided": (70, 2, 2, 24, 0, {"value_size": 16, "layout": "strided"}),
    "16 / 32, last rows, latent": (200, 2, 1, 16, 9, {"value_size": 32, "queries": 50, "layout": "latent"}),
    "16 / 24, everything": (
        140,
        4,
        2,
        16,
        7,
        {"value_size": 24, "sliding_window": 30, "softcap": 3.0, "sinks": True, "queries": 120, "layout": "latent"},
    ),
    "everything": (140, 4, 2, 16, 7, {"sliding_window": 30, "softcap": 3.0, "sinks": True, "scale": 0.4}),
}


def make(torch, heads, size, n, layout, generator):
    """A (1, H, N, D) float32 leaf view in one of the layouts that callers have."""
    if layout == "latent":  # beside something else of its head, which nobody may read
        beside = torch.full((1, n, heads, 8 + size), float("nan"))
        beside[..., 8:] = torch.randn(1, n, heads, size, generator=generator)
        return beside[..., 8:].transpose(1, 2)
    if layout == "rows":
        return torch.randn(1, heads, n, size, generator=generator)
    if layout == "strided":  # head size not innermost: no descriptor takes that
        return torch.randn(1, heads, size, n, generator=generator).transpose(2, 3)
    return torch.randn(1, n, heads, size, generator=generator).transpose(1, 2)


def run(torch, tokens, heads, kv_heads, size, padding, options):
    from treepack.attention import operator as triton_op
    from treepack.attention import tree_attention

    options = dict(options)
    nests = options.pop("nests", None) or forests.random_nests(random.Random(tokens), tokens)
    end = torch.from_numpy(forests.layout(nests, padding=padding).subtree_end)
    triton_op.split_heads_override = options.pop("split", None)
    layout = options.pop("layout", "columns")
    n = tokens + padding
    queries = options.pop("queries", n)
    g = torch.Generator().manual_seed(0)
    value_size = options.pop("value_size", size)
    shapes = ((heads, size, queries), (kv_heads, size, n), (kv_heads, value_size, n))
    leaves = [make(torch, h, d, rows, layout, g).requires_grad_() for h, d, rows in shapes]
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads, generator=g).requires_grad_()
        leaves.append(options["sinks"])
    found = []
    for impl in ("triton", "reference"):
        out, lse = tree_attention(*leaves[:3], subtree_end=end, impl=impl, return_lse=True, **options)
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in (out, lse)]
        loss = (out * weights[0]).sum() + (lse * weights[1]).sum()
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)])
    return found


def operators(torch) -> dict:
    """What torch makes of the two operators: opcheck, one compiled graph for several lengths, both checkpointings."""
    from torch.utils.checkpoint import checkpoint

    from treepack.attention import operator as triton_op
    from treepack.attention import rule as triton_rule
    from treepack.attention import tree_attention, tree_tiles

    triton_op.split_heads_override = None
    g = torch.Generator().manual_seed(0)

    def inputs(n):
        """Values of another size, apart from each other."""
        end = torch.from_numpy(forests.layout(forests.random_nests(random.Random(n), n)).subtree_end)
        shapes = ((2, 16, "columns"), (1, 16, "columns"), (1, 32, "latent"))
        return [make(torch, h, size, n, layout, g).requires_grad_() for h, size, layout in shapes], end

    def attend(q, k, v, end):
        return tree_attention(q, k, v, subtree_end=end, impl="triton")

    def gradients(function, tensors, end):
        return torch.autograd.grad(function(*tensors, end).square().sum(), tensors)

    different = 0
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (40, 70, 90):
        tensors, end = inputs(n)
        pairs = zip(gradients(attend, tensors, end), gradients(compiled, tensors, end), strict=True)
        different += sum(int((a != b).sum()) for a, b in pairs)
    want = gradients(attend, tensors, end)
    for reentrant in (False, True):
        checkpoint(attend, *tensors, end, use_reentrant=reentrant).square().sum().backward()
        different += sum(int((x.grad != y).sum()) for x, y in zip(tensors, want, strict=True))
        for x in tensors:
            x.grad = None
    tiles = tree_tiles(end)
    flat = [x.detach().squeeze(0).transpose(0, 1).requires_grad_() for x in tensors]
    sinks = torch.randn(2, generator=g).requires_grad_()
    windowed = (*tiles.lists(128, 9), *tiles.lists(64, 9), *tiles.lists(64, 9, True))
    arguments = (*flat, sinks, end, tiles.depth(), *windowed, None, None, 0.3, 9, 2.0, triton_rule.PLAIN)
    checks = torch.library.opcheck(triton_op.tree_attention_forward, arguments)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"different": different, "graphs": graphs, "failed": sum(x != "SUCCESS" for x in checks.values())}


def autograd(torch) -> dict:
    """What training code does around the operators, on their direct path: cells that differ, and what is said."""
    from treepack.attention import TreeTiles, tree_attention

    end = torch.from_numpy(forests.layout(forests.random_nests(random.Random(2), 70)).subtree_end)
    g = torch.Generator().manual_seed(0)
    tensors = [make(torch, h, 16, 70, "columns", g).requires_grad_() for h in (2, 1, 1)]

    def attend(q, k, v, tree=None):
        return tree_attention(q, k, v, tree or TreeTiles(end), impl="triton")

    want = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    tree = TreeTiles(end)
    with torch.inference_mode():  # scores first, then trains on the same tree
        attend(*tensors, tree)
        tree.lists(64)
        tree.schedule()
    found = torch.autograd.grad(attend(*tensors, tree).square().sum(), tensors)
    different = sum(int((a != b).sum()) for a, b in zip(found, want, strict=True))
    inference = tree.schedule().is_inference()

    for kept in range(3):  # only one of q, k and v wants a gradient
        some = [x.detach().requires_grad_(i == kept) for i, x in enumerate(tensors)]
        attend(*some).square().sum().backward()
        different += sum(int((x.grad != y).sum()) for x, y in zip(some, want, strict=True) if x.grad is not None)
        different += sum((x.grad is not None) != (i == kept) for i, x in enumerate(some))

    (first,) = torch.autograd.grad(attend(*tensors).square().sum(), tensors[0], create_graph=True)
    try:
        first.square().sum().backward()
        twice = ""
    except RuntimeError as error:
        twice = str(error)

    batch = [torch.stack([x.detach(), 2 * x.detach()]) for x in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it runs one sample after another
        mapped = torch.func.vmap(attend)(*batch)
    different += sum(int((mapped[i] != attend(*(x[i] for x in batch))).sum()) for i in range(2))
    return {"different": different, "inference": inference, "twice": twice}


def main() -> None:
    import torch

    results = {}
    for name, case in CASES.items():
        started = time.time()
        ours, want = run(torch, *case)
        scale = [max(1.0, b.abs().max().item()) for b in want]
        labels = ("out", "lse", "dq", "dk", "dv", "dsinks")
        pairs = zip(labels, ours, want, scale, strict=False)
        results[name] = {
            label: ((a - b).abs().max().item() / s if a.isfinite().all() else float("inf")) for label, a, b, s in pairs
        }
        print(f"{name:24} {time.time() - started:6.2f} s  {max(results[name].values()):.1e}")
    ours, _ = run(torch, *CASES["padding"])
    again, _ = run(torch, *CASES["padding"])
    out, lse, dq, dk, dv = (x.detach() for x in ours[:5])
    results["padding zeros"] = {"nonzero": sum(int((x[0, :, 90:] != 0).sum()) for x in (out, lse, dq, dk, dv))}
    results["repeat"] = {"different": sum(int((a != b).sum()) for a, b in zip(ours, again, strict=True))}
    results["operators"] = operators(torch)
    results["autograd"] = autograd(torch)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
