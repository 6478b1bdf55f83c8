"""Recurrent layers on one GPU: a tree against its samples alone, one chain of its length, and level by level.

    python benches/gpu_recurrent.py [--kind delta linear conv] [--tree agent9k ...] [--trees FOLDER]
    TREEPACK_DATA=... python benches/gpu_recurrent.py --write FOLDER       # the trees of real rollouts, for --trees

bf16, shapes as in tests/gpu/recurrent_compare.py. Forward and backward ms: the medians of `do_bench` of three rounds in
turn, their median; in brackets the range of their sums. Before anything is
timed the tree's output and gradients are compared with every sample alone, and three runs must have equal bits; a red
gate prints no time. `chain`: flash-linear-attention on one sequence of N tokens, the floor for N tokens.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "tests" / "gpu")]
import source_tree  # noqa: E402, F401, I001
import fla_tuning  # noqa: E402, F401
import forests  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

# samples and budget of the trees that are packed from real rollouts; the first tree of each
REAL = {
    "comb60": ("swe_gemini_comb", 60, 1 << 20),
    "tau_airline_turns": ("tau_airline_turns", None, 32768),
    "qwen_math_n8": ("qwen_math_n8", None, 16384),
    "game24_tot_tree": ("game24_tot_tree", None, 8192),
}
GATE = 2e-2  # of the norm: bf16 rounds both


def write_trees(folder: Path) -> None:
    from model_rows import real

    import treepack

    folder.mkdir(parents=True, exist_ok=True)
    for name, (source, count, budget) in REAL.items():
        tree = treepack.pack(real(source, count or 1 << 30), max_tokens=budget)[0]
        np.savez_compressed(folder / f"{name}.npz", subtree_end=tree.subtree_end)
        print(name, tree)


def trees(folder: str | None) -> dict[str, np.ndarray]:
    found = {name: forests.layout(forests.gpu_trees()[name]).subtree_end for name in ("agent9k", "multiturn")}
    for path in sorted(Path(folder).glob("*.npz")) if folder else ():
        found[path.stem] = np.load(path)["subtree_end"]
    return found


def times(contenders, options) -> None:
    """Prints forward and backward ms of each (call, leaves), measured in turn; the last is the floor."""
    from triton.testing import do_bench

    settings = {"warmup": options.warmup, "rep": options.rep, "return_mode": "median"}
    seen = {name: ([], []) for name in contenders}
    for _ in range(options.rounds):
        for name, (call, leaves) in contenders.items():
            out = call()
            dout = torch.randn_like(out)
            seen[name][0].append(do_bench(call, **settings))
            backward = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
            seen[name][1].append(do_bench(backward, **settings))
            del out, dout, backward
    medians = {name: [statistics.median(x) for x in passes] for name, passes in seen.items()}
    floor = sum(medians["chain"])
    for name, (forward, backward) in medians.items():
        both = [sum(x) for x in zip(*seen[name], strict=True)]
        print(
            f"   {name:<9}{forward:8.3f} /{backward:8.3f} ms   {(forward + backward) / floor:6.3f} of the chain   "
            f"({min(both):.3f} to {max(both):.3f})"
        )


def gate(kind: str, leaves, tree, paths) -> str:
    """What is wrong with a tree's results; empty where nothing is."""
    import recurrent_compare as compare

    got = compare.tree_results(kind, leaves, tree, paths)
    for _ in range(2):
        again = compare.tree_results(kind, leaves, tree, paths)
        if not all(torch.equal(x, again[name]) for name, x in got.items()):
            return "bits differ from run to run"
    want = compare.alone_results(kind, leaves, paths)
    far = {name: compare.distance(got[name], x) for name, x in want.items()}
    print("   from alone, of the norm: " + ", ".join(f"{name} {x:.4f}" for name, x in far.items()))
    return ", ".join(f"{name} is off by {x:.3f}" for name, x in far.items() if not x <= GATE)


def scan(kind: str, name: str, end: np.ndarray, options) -> None:
    import recurrent_compare as compare

    from treepack.recurrent import chunked, tree_segments

    paths, n = compare.paths_of(end), len(end)
    tree = compare.tree_of(end)
    segments = tree_segments(tree)
    raw = sum(map(len, paths))
    if options.chunk:
        chunked.chunk_size = lambda *_: options.chunk
    size = chunked.chunk_size(segments, compare.chunk_sizes(kind))
    way = chunked.walk(segments, size)
    longest = int((way.paths[:, 1] - way.paths[:, 0]).max())
    print(f"{kind} {name}: N {n}, raw {raw}, {len(segments.starts)} segments, {len(way.chunks)} chunks of {size} "
          f"({-(-n // 64)} of 64 in a chain), {len(way.paths)} paths, the longest {longest} chunks")  # fmt: skip
    leaves = compare.inputs(kind, n)
    values = list(leaves.values())
    wrong = "" if options.no_gate else gate(kind, leaves, tree, paths)
    if wrong:
        print(f"   RED: {wrong}")
        return
    contenders = {"treepack": (partial(compare.on_tree, kind, leaves, tree), values)}
    if "levels" in options.against:
        contenders["levels"] = (partial(compare.on_tree, kind, leaves, tree, "levels"), values)
    if "alone" in options.against:
        index, cu_seqlens = compare.rows_of(paths)
        rows = {key: x.detach()[:, index].requires_grad_() for key, x in leaves.items()}
        contenders["alone"] = (partial(compare.alone, kind, rows, cu_seqlens), list(rows.values()))
    contenders["chain"] = (partial(compare.alone, kind, leaves, None), values)
    times(contenders, options)


def kernels(kind: str, name: str, end: np.ndarray) -> None:
    """Prints ms by kernel of a forward and a backward pass, means of five, in chunks of each size; chunk 0 is the
    chain, by flash-linear-attention alone."""
    import recurrent_compare as compare
    from torch.profiler import ProfilerActivity, profile

    from treepack.recurrent import chunked

    leaves = compare.inputs(kind, len(end))
    print(f"{kind} {name}", {key: tuple(x.shape) for key, x in leaves.items()})
    chosen = chunked.chunk_size
    for size in (*compare.chunk_sizes(kind).tokens, 0):
        chunked.chunk_size = (lambda *_, size=size: size) if size else chosen
        tree = compare.tree_of(end)
        call = partial(compare.on_tree, kind, leaves, tree) if size else partial(compare.alone, kind, leaves, None)

        def step(call=call):
            out = call()
            torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        spent = collections.Counter()
        for event in seen.events():
            if str(event.device_type).endswith("CUDA"):
                spent[event.name[:60]] += (event.time_range.end - event.time_range.start) / 5e3
        print(f"== chunk {size} total {sum(spent.values()):.3f}")
        for kernel, ms in spent.most_common(16):
            print(f"   {ms:.3f} ms {kernel}")
    chunked.chunk_size = chosen


def conv(name: str, end: np.ndarray, options) -> None:
    import recurrent_compare as compare
    from fla.modules.causal_conv1d import causal_conv1d

    from treepack.recurrent import tree_conv1d

    n, tree = len(end), compare.tree_of(end)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(n, compare.CHANNELS, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(compare.CHANNELS, compare.WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
    leaves = [x, weight.requires_grad_()]
    got = tree_conv1d(*leaves, tree=tree, activation="silu")
    rows = x.detach()[:, :64].double()
    want = tree_conv1d(rows, weight.detach()[:64].double(), tree=tree, activation="silu", impl="reference")
    far = compare.distance(got[:, :64], want)
    print(f"conv {name}: N {n}, {compare.CHANNELS} channels, width {compare.WIDTH}; from float64 {far:.4f}")
    if not far <= GATE:
        print("   RED")
        return
    single = [x.detach()[None].requires_grad_(), weight]
    times(
        {
            "treepack": (lambda: tree_conv1d(*leaves, tree=tree, activation="silu"), leaves),
            "chain": (lambda: causal_conv1d(single[0], weight, activation="silu")[0], single),
        },
        options,
    )


def machine() -> str:
    import fla
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"flash-linear-attention {fla.__version__}, commit {commit or 'unknown'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="*", default=["delta", "linear", "conv"])
    parser.add_argument("--tree", nargs="*")
    parser.add_argument("--trees", help="folder of .npz files with subtree_end, made by --write")
    parser.add_argument("--write", type=Path, help="write the trees of real rollouts there, and stop")
    parser.add_argument("--against", nargs="*", default=["levels", "alone"], choices=["levels", "alone"])
    parser.add_argument("--no-gate", action="store_true", help="for tuning")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk, for tuning; default: by the tree")
    parser.add_argument("--kernels", action="store_true", help="ms by kernel, for each size of a chunk")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rep", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.write:
        write_trees(options.write)
        return
    print(machine(), flush=True)
    for kind in options.kind:
        for name, end in trees(options.trees).items():
            if options.tree and name not in options.tree:
                continue
            if options.kernels:
                kernels(kind, name, end)
            elif kind == "conv":
                conv(name, end, options)
            else:
                scan(kind, name, end, options)
            torch.cuda.empty_cache()
            sys.stdout.flush()


if __name__ == "__main__":
    main()
