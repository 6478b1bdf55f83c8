"""Attention of a tree range by range against one call on the whole tree: `make bench-last-rows`, on one GPU.

A range is some rows in depth-first order; its queries are its rows, its keys its ancestors' and its own. The ranges
together visit the tiles that the whole tree visits, but for tiles cut at a border. Forward and backward, bf16, medians
of `do_bench`; the sum over the ranges as a multiple of the one call. Outputs and gradients are compared first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "tests" / "gpu")]
import source_tree  # noqa: E402, F401, I001
import forests  # noqa: E402
import gpu_attention  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.testing import do_bench  # noqa: E402

from treepack.attention import tree_attention, tree_tiles  # noqa: E402


class Range:
    """Rows [a, b) of a tree behind their ancestors, padding in front until the rows begin a tile of 128."""

    def __init__(self, end: np.ndarray, a: int, b: int):
        above = np.flatnonzero(end[:a] > a)
        rows = np.concatenate([above, np.arange(a, b)])
        padding = -len(above) % 128
        before = padding + len(above)
        own = before + np.minimum(end[rows], b) - a
        self.rows, self.keys, self.padding = slice(a, b), torch.from_numpy(rows).cuda(), padding
        self.tiles = tree_tiles(torch.from_numpy(np.concatenate([np.arange(padding), own]).astype(np.int32)).cuda())

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        k, v = (torch.cat([x.new_zeros(self.padding, *x.shape[1:]), x[self.keys]]) for x in (k, v))
        return [x.detach().requires_grad_() for x in (q[self.rows], k, v)]


def measure(name: str, size: int, heads: int, kv_heads: int, most: int) -> list[str]:
    end = forests.layout(forests.gpu_trees()[name]).subtree_end
    n = len(end)
    g = torch.Generator("cuda").manual_seed(0)
    whole = [torch.randn(n, h, size, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
             for h in (heads, kv_heads, kv_heads)]  # fmt: skip
    dout = torch.randn(n, heads, size, generator=g, device="cuda", dtype=torch.bfloat16)
    tiles = tree_tiles(torch.from_numpy(end).cuda())
    cuts = [*range(0, n, most), n]
    parts = [Range(end, a, b) for a, b in itertools.pairwise(cuts)]
    inputs = [part.inputs(*whole) for part in parts]

    def one_call():
        return torch.autograd.grad(tree_attention(*whole, tiles), whole, dout)

    def range_by_range():
        found = []
        for part, tensors in zip(parts, inputs, strict=True):
            out = tree_attention(*tensors, part.tiles)
            found.append((out, *torch.autograd.grad(out, tensors, dout[part.rows])))
        return found

    want, total = one_call(), [torch.zeros_like(x, dtype=torch.float32) for x in whole]
    for part, (_, dq, dk, dv) in zip(parts, range_by_range(), strict=True):
        total[0][part.rows] = dq.float()
        for sums, grad in zip(total[1:], (dk, dv), strict=True):
            sums.index_add_(0, part.keys, grad[part.padding :].float())
    for got, wanted in zip(total, want, strict=True):
        apart = ((got - wanted.float()).norm() / wanted.float().norm()).item()
        assert apart < 0.01, f"{name}: gradients of the ranges are {apart:.3f} from those of the whole tree"
    alone = do_bench(one_call, warmup=200, rep=1000, return_mode="median")
    ranges = do_bench(range_by_range, warmup=200, rep=1000, return_mode="median")
    again = do_bench(one_call, warmup=200, rep=1000, return_mode="median")
    base = (alone + again) / 2
    above = sum(len(part.keys) for part in parts) - n
    shape = f"{name:10} D {size:3} {heads:2}/{kv_heads:<2} N {n:6,}  ranges of {most:6,}: {len(parts)}"
    return [
        f"{shape}  ancestors' rows {above:7,}  one call {base:7.3f} ms  ranges {ranges:7.3f} ms  {ranges / base:5.3f} x"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", nargs="*", default=["chain16k", "multiturn", "agent9k"])
    parser.add_argument("--size", nargs="*", type=int, default=[128])
    parser.add_argument("--most", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv", type=int, default=8)
    options = parser.parse_args()
    print(gpu_attention.machine())
    for name in options.tree:
        for size in options.size:
            for most in options.most:
                print(*measure(name, size, options.heads, options.kv, most), flush=True)


if __name__ == "__main__":
    main()
