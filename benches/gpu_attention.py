"""Tree attention against its peers on one GPU: one table in one run.

    python benches/gpu_attention.py [--tree agent9k ...] [--impl triton fa4 ...] [--size 128 192/128] [--trees FOLDER]
    [--shape 64:64/8:window=128:sinks ...] [--fa3 FOLDER] [--study FOLDER] [--areal FILE]
    python benches/gpu_attention.py --tune forward --tree agent9k          # one kernel over a list of tile sizes
    python benches/gpu_attention.py --parts --tree chain16k [--forms rule looped split]          # time of each kernel

bf16, --heads 32 --kv 8, or whole layers by --shape; q, k, v as Hugging Face's views, sinks constant. Useful FLOPs:
forward (2 D + 2 D_V) H sum(keys seen), backward (6 D + 4 D_V). Each line: median of `do_bench` and its 20 % and 80 %
quantiles. Before it is timed, output, dq, dk, dv of two heads are compared with every path alone in float32; a wrong
implementation gets no time and no ratio.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "tests" / "gpu")]
import source_tree  # noqa: E402, F401, I001
import forests  # noqa: E402
import gpu_peers  # noqa: E402
import head_shapes  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import triton  # noqa: E402
from triton.testing import do_bench  # noqa: E402

from treepack.attention import reference  # noqa: E402

TUNE = {
    "forward": [
        "128,128,8,2",
        "128,128,8,3",
        "128,64,8,3",
        "128,64,8,2",
        "128,64,4,3",
        "128,64,4,2",
        "64,128,4,2",
        "64,64,4,3",
        "64,64,4,2",
    ],
    "dkv": [
        "64,64,4,2",
        "64,64,4,3",
        "64,64,8,2",
        "64,128,8,2",
        "64,128,8,3",
        "128,64,8,2",
        "32,64,4,2",
        "32,128,8,2",
        "64,32,4,2",
    ],
    "dq": ["64,64,4,2", "64,64,4,3", "64,64,8,2", "128,64,8,2", "128,64,8,3", "128,128,8,2", "64,32,4,3", "128,32,4,2"],
}


def machine() -> str:
    p = torch.cuda.get_device_properties(0)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return f"{p.name}, sm_{p.major}{p.minor} | torch {torch.__version__}, triton {triton.__version__} | commit {commit}"


def make_case(name: str, shape: head_shapes.Shape, options, device: str = "cuda") -> gpu_peers.Case:
    if name in forests.gpu_trees():
        forest = forests.layout(forests.gpu_trees()[name])
        end, paths = forest.subtree_end, forest.paths
    else:
        end = np.load(gpu_peers.real_trees(options.trees)[name])["subtree_end"].astype(np.int32)
        paths = gpu_peers.paths_of(end)
    depth = np.zeros(len(end), np.int64)
    for path in paths:
        depth[path] = np.arange(len(path))
    g = torch.Generator(device).manual_seed(0)

    def random(heads, size):
        return (
            torch.randn(1, len(end), heads, size, device=device, dtype=torch.bfloat16, generator=g)
            .transpose(1, 2)
            .requires_grad_()
        )

    q, k, v = (
        random(heads, size)
        for heads, size in zip((shape.heads, shape.kv, shape.kv), (*shape.sizes[:1], *shape.sizes), strict=True)
    )
    sinks = torch.randn(shape.heads, device=device, generator=g) if shape.sinks else None
    return gpu_peers.Case(name, torch.from_numpy(end).to(device), depth, paths, q, k, v, sinks, shape, options)


def truth(case: gpu_peers.Case, dout: torch.Tensor) -> list[torch.Tensor]:
    """[out, dq, dk, dv] of the first and last query head with every path alone, float32: each token's upstream
    gradient in the first path that passes it."""
    heads, kv = case.q.shape[1], case.k.shape[1]
    pick_q, pick_kv = [0, heads - 1], [0, kv - 1]
    q, k, v = (
        x.detach()[:, pick].float().requires_grad_()
        for x, pick in ((case.q, pick_q), (case.k, pick_kv), (case.v, pick_kv))
    )
    out = torch.zeros_like(dout[:, pick_q], dtype=torch.float32)
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    done = torch.zeros(len(case.end), dtype=torch.bool, device=q.device)
    extras = case.extras() | {"sinks": None if case.sinks is None else case.sinks[pick_q]}
    for path in case.paths:
        index = torch.from_numpy(path).to(q.device)
        new = ~done[index]
        parts = [x.detach()[:, :, index].requires_grad_() for x in (q, k, v)]
        o = reference.tree_attention(*parts, torch.full_like(index, len(index)), **extras)
        upstream = dout[:, pick_q][:, :, index].float() * new[:, None]
        for total, part in zip(gradients, torch.autograd.grad(o, parts, upstream), strict=True):
            total.index_add_(2, index, part)
        out[:, :, index] = o.detach()
        done[index] = True
    return [out, *gradients]


def gate(case, attention, dout, want) -> str:
    """ "" where two heads agree with the truth, else what does not. Two query heads only, so dK and dV are compared
    with one query head a group alone."""
    heads, kv = case.q.shape[1], case.k.shape[1]
    only = torch.zeros_like(dout)
    only[:, [0, heads - 1]] = dout[:, [0, heads - 1]]  # the other heads of each group send no gradient to K and V
    out = attention(case.q, case.k, case.v)
    got = [out.transpose(0, 1)[None], *torch.autograd.grad(out, (case.q, case.k, case.v), gpu_peers.flat(only))]
    picks = ([0, heads - 1], [0, heads - 1], [0, kv - 1], [0, kv - 1])
    problems = []
    for label, a, b, pick in zip(("out", "dq", "dk", "dv"), got, want, picks, strict=True):
        error = ((a[:, pick].float() - b).norm() / b.norm()).item()
        if not error < 0.01:
            problems.append(f"{label} off by {error:.1e}")
    return ", ".join(problems)


def timed(function, options) -> tuple[float, float, float]:
    gc.collect()
    gc.disable()  # as timeit does: its pauses, long once a compiler has been imported, would count as kernel time
    try:
        median, low, high = do_bench(function, warmup=options.warmup, rep=options.rep, quantiles=[0.5, 0.2, 0.8])
    finally:
        gc.enable()
    return median, low, high


def device_times(function, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of device time per call, by kernel name."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in run.events():
        if event.device_time_total > 0:
            times[event.name] = times.get(event.name, 0.0) + event.device_time_total / 1e3 / repeats
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def upstream_of(case: gpu_peers.Case) -> torch.Tensor:
    """A gradient of the output, (1, H, N, D_V)."""
    g = torch.Generator(case.q.device).manual_seed(1)
    shape = (*case.q.shape[:-1], case.shape.sizes.value)
    return torch.randn(shape, device=case.q.device, dtype=torch.bfloat16, generator=g)


def compare(case: gpu_peers.Case, options) -> None:
    seen = case.depth + 1 if case.shape.window is None else np.minimum(case.depth + 1, case.shape.window)
    pairs = case.shape.heads * float(seen.sum())
    size, value_size = case.shape.sizes
    useful = (2 * (size + value_size) * pairs, (6 * size + 4 * value_size) * pairs)
    n, raw = len(case.end), sum(len(path) for path in case.paths)
    print(f"\n{case.name}  {case.shape}  N {n}  raw {raw}", flush=True)
    columns = (f"{'forward ms':>22} {'TFLOP/s':>8}", f"{'backward ms':>22} {'TFLOP/s':>8}", f"{'both ms':>8}")
    print(f"  {'':12} {' '.join(columns)} {'/ triton':>9} {'B/token':>8}")
    dout, truths, base = upstream_of(case), {}, None
    for name in options.impl:
        started = time.time()
        same = case._replace(sinks=None) if name in gpu_peers.NO_SINKS else case
        without = "   without the sinks" if same.sinks is not case.sinks else ""
        try:
            if (same.sinks is None) not in truths:
                truths[same.sinks is None] = truth(same, dout)
            forward, backward, nbytes = measure(same, name, dout, truths[same.sinks is None], options)
        except (gpu_peers.Unavailable, AssertionError) as reason:
            print(f"  {name:12} no time: {reason}", flush=True)
            continue
        except Exception as error:
            print(f"  {name:12} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        both = forward[0] + backward[0]
        base = both if name == "triton" else base
        cells = []
        for times, work in zip((forward, backward), useful, strict=True):
            milliseconds = "{:.3f} ({:.3f} {:.3f})".format(*times)
            cells.append(f"{milliseconds:>22} {work / times[0] / 1e9:8.0f}")
        ratio = f"{both / base:8.2f}x" if base else f"{'':9}"
        end = f"{nbytes / n:8.2f}   [{time.time() - started:.0f} s]{without}"
        print(f"  {name:12} {' '.join(cells)} {both:8.3f} {ratio} {end}", flush=True)


def measure(case: gpu_peers.Case, name: str, dout, want, options):
    """(forward, backward, bytes of metadata) of one implementation; times are (median, 20 %, 80 %).

    Raises AssertionError where it is wrong: a wrong implementation is not timed.
    """
    attention, inputs, nbytes = gpu_peers.PEERS[name](case)
    if inputs is None:  # each sample alone is the truth's own method and has other inputs
        problem = gate(case, attention, dout, want)
        if problem:
            raise AssertionError(f"WRONG: {problem}")
    leaves = inputs or [case.q, case.k, case.v]
    with torch.no_grad():
        forward = timed(lambda: attention(*leaves), options)
    out = attention(*leaves)
    upstream = torch.randn_like(out)
    backward = timed(lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True), options)
    return forward, backward, nbytes


def tune(case: gpu_peers.Case, options) -> None:
    """Device time of one kernel over tile sizes."""
    from treepack.attention import operator as triton_op
    from treepack.attention import tree_attention, tree_tiles
    from treepack.attention.triton import common as triton_common
    from treepack.attention.triton import launch as triton_launch

    tiles = tree_tiles(case.end)
    base = triton_launch.choose_tiles(gpu_peers.flat(case.q), gpu_peers.flat(case.v))
    dout = upstream_of(case)

    def step():
        out = tree_attention(case.q, case.k, case.v, tiles, impl="triton_plain", **case.extras())
        torch.autograd.grad(out, (case.q, case.k, case.v), dout)

    print(f"\n{case.name}  {case.shape}  {options.tune}, table {getattr(base, options.tune)}")
    splits = (False, True) if options.tune == "dkv" and case.shape.heads > case.shape.kv else (None,)
    for text in options.tiles or TUNE[options.tune]:
        tile = triton_common.Tile(*map(int, text.split(",")))
        for split in splits:
            triton_launch.tiles_override = base._replace(**{options.tune: tile})
            triton_op.split_heads_override = split
            try:
                times = device_times(step)
                found = sum(ms for name, ms in times.items() if name.startswith(f"{options.tune}_kernel"))
                extra = sum(ms for name, ms in times.items() if name.startswith("void"))  # the sum over the group
                form = {None: "", False: "looped", True: "split"}[split]
                print(f"  {text:14} {form:6} {found:8.3f} ms  (torch's own kernels {extra:.3f})", flush=True)
            except Exception as error:
                print(f"  {text:14} {type(error).__name__}: {str(error)[:90]}", flush=True)
    triton_launch.tiles_override = triton_op.split_heads_override = None


FORMS = {"rule": None, "looped": False, "split": True}  # of dK/dV


def parts(case: gpu_peers.Case, options) -> None:
    """Device time of every kernel of one step, for each implementation and form of dK/dV."""
    from treepack.attention import operator as triton_op

    dout = gpu_peers.flat(upstream_of(case))
    leaves = (case.q, case.k, case.v)
    for name, form in itertools.product(options.impl, options.forms):
        triton_op.split_heads_override = FORMS[form]
        try:
            attention, inputs, _ = gpu_peers.PEERS[name](case)
            if inputs is not None:
                continue
            times = device_times(lambda: torch.autograd.grad(attention(*leaves), leaves, dout))  # noqa: B023
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        kernels = "; ".join(f"{kernel[:48]} {ms:.3f}" for kernel, ms in list(times.items())[:7])
        print(f"  {case.name} {case.shape} {name} {form}: {kernels}", flush=True)
    triton_op.split_heads_override = None


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with `shape` filled from --size, --heads and --kv where it is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", nargs="*", help="default: the benchmark trees and every .npz of --trees")
    parser.add_argument(
        "--impl", nargs="*", default=[x for x in gpu_peers.PEERS if x != "gluon"], choices=list(gpu_peers.PEERS)
    )
    parser.add_argument("--size", nargs="*", type=head_shapes.Sizes.read, default=[head_shapes.Sizes(128, 128)])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv", type=int, default=8)
    parser.add_argument(
        "--shape", nargs="*", type=head_shapes.Shape.read,
        help="whole layers instead of --size, --heads and --kv: 192/128:32/32 64:64/8:window=128:sinks",
    )  # fmt: skip
    parser.add_argument("--fa3", help="folder with flash_attn_3/_C.so (flash3.py)")
    parser.add_argument("--trees", help="folder of .npz files with subtree_end (int32)")
    parser.add_argument("--study", help="folder of the plain Triton study")
    parser.add_argument("--areal", help="areal/models/tree_attn/triton_kernel.py of AReaL 1.0.4")
    parser.add_argument("--tune", choices=list(TUNE))
    parser.add_argument("--tiles", nargs="*", help="for --tune: block_m,block_n,warps,stages ...")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--forms", nargs="*", default=["rule"], choices=list(FORMS), help="of dK/dV, for --parts")
    parser.add_argument("--section", type=int, help="query heads that walk the tiles side by side (default: one group)")
    parser.add_argument("--dkv-section", type=int, help="dK/dV programs of one key tile that start side by side")
    parser.add_argument("--min-run", type=int, help="runs of full tiles shorter than this are listed as partial tiles")
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--rep", type=int, default=150)
    options = parser.parse_args(arguments)
    options.shape = options.shape or [head_shapes.Shape(size, options.heads, options.kv) for size in options.size]
    return options


def main() -> None:
    options = parsed()
    from treepack.attention import tiles
    from treepack.attention.triton import launch as triton_launch

    triton_launch.section_override, triton_launch.dkv_section_override = options.section, options.dkv_section
    tiles.MIN_RUN = options.min_run or tiles.MIN_RUN
    torch._dynamo.config.recompile_limit = 64  # FlexAttention, over many trees in one process
    print(machine())
    names = options.tree or [*forests.gpu_trees(), *gpu_peers.real_trees(options.trees)]
    for shape, name in itertools.product(options.shape, names):
        case = make_case(name, shape, options)
        (tune if options.tune else parts if options.parts else compare)(case, options)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
