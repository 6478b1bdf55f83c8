"""What is installed, which kernels can run here, and do they compute the right thing: facts, no printing."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter
from typing import Any

from .. import synthetic
from .._version import __version__
from ..packing import pack
from ..readers.source import first_line
from ..testing import check_packed
from ..tree.tree import PackedTree
from . import doctor_states

PACKAGES = (
    "numpy", "torch", "triton", "transformers", "trl", "areal", "flash-attn-4", "fla-core", "typer", "rich", "pyarrow",
    "datasets", "jinja2",
)  # fmt: skip
#: Largest relative error (Frobenius) of an output or gradient; the reference runs in float64, kernels in bfloat16.
TOLERANCE = {"reference": 1e-10, "kernel": 2e-2}


@dataclass(frozen=True)
class Kernel:
    """An implementation of tree attention or of the scans: whether it can run here, and why or why not."""

    impl: str
    runs: bool
    reason: str


@dataclass(frozen=True)
class Check:
    """A part of the self-test."""

    name: str
    passed: bool
    detail: str
    milliseconds: float


def versions() -> dict[str, str | None]:
    """Version of each package, None where it is not installed."""
    found: dict[str, str | None] = {"treepack": __version__, "python": platform.python_version()}
    found["platform"] = f"{platform.system()} {platform.machine()}"
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def torch_or_reason() -> tuple[Any, str]:
    """(torch, "") or (None, why it cannot be imported)."""
    try:
        return importlib.import_module("torch"), ""
    except Exception as error:  # a broken installation raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return None, "torch is not installed: pip install 'treepack[torch]'"
        return None, f"torch cannot be imported: {first_line(error)}"


def devices(torch: Any) -> tuple[list[dict[str, Any]], str]:
    """The CUDA devices, and why there are none."""
    if torch is None:
        return [], "torch, which would look for GPUs, is missing"
    if not torch.cuda.is_available():
        return [], _no_device(torch)
    driver = {"driver": _driver(), "cuda": torch.version.cuda}
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        size = {"capability": f"{about.major}.{about.minor}", "gib": round(about.total_memory / 2**30, 1)}
        found.append({"name": about.name, **size, **driver})
    return found, ""


def kernels(torch: Any) -> list[Kernel]:
    """Each implementation, by a call on eight tokens; those whose first call compiles for long, by what they need. None
    without torch."""
    if torch is None:
        return []
    from ..attention import IMPLEMENTATIONS

    return [_kernel(torch, impl) for impl in IMPLEMENTATIONS]


def scans(torch: Any) -> list[Kernel]:
    """Each implementation of the scans of layers that carry a state, by what it needs. None without torch."""
    return [] if torch is None else [Kernel(*found) for found in doctor_states.scans(torch)]


def self_test(torch: Any) -> list[Check]:
    """Packing against `check_packed`; where torch is, attention on a tree against each sample alone."""
    samples = synthetic.agent(prompt=40, answers=4, answer=12, vocab_size=500)
    samples += synthetic.multi_turn(rollouts=2, turns=3, prompt=20, thinking=8, answer=4, tool=5, vocab_size=500)
    checks = [_checked("packing", lambda: _check_packing(samples))]
    if torch is None:
        return checks
    tree = pack(samples, max_tokens=1024)[0]
    checks.append(
        _checked("attention, reference on the CPU", lambda: _check_attention(torch, tree, "reference", "cpu"))
    )
    name = "states, reference on the CPU"
    checks.append(_checked(name, lambda: doctor_states.check_states(torch, tree)))
    if torch.cuda.is_available():
        name = "attention, triton on the GPU"
        checks.append(_checked(name, lambda: _check_attention(torch, tree, "triton", "cuda")))
        checks += first_uses()
    return checks


def first_uses() -> list[Check]:
    """What the kernels said of themselves when they were first used here (`attention/self_check.py`)."""
    from ..attention import self_check

    if not self_check.wanted():
        return [Check("first use of the kernels", True, "left out: TREEPACK_SELF_CHECK=0", 0.0)]
    found = []
    for verdict in self_check.verdicts():
        options = ", ".join(verdict.features) or "forward"
        detail = verdict.wrong or f"{verdict.dtype}, head size {verdict.sizes()}: {options}"
        name = f"first use, {verdict.kernels} kernels"
        found.append(Check(name, not verdict.wrong, detail, verdict.milliseconds))
    return found


# --- packing and attention ------------------------------------------------------------------------------------------


def _check_packing(samples: list[dict[str, Any]]) -> str:
    budget, ways = 96, 0  # small, so that there are several trees
    for branching in ("token", "label"):
        for placement in ("shared", "first_fit"):
            options: dict[str, Any] = {"max_tokens": budget, "branching": branching, "placement": placement}
            packed = pack(samples, **options)
            check_packed(packed, samples)
            ways += 1
    return f"{len(samples)} samples, {ways} ways, trees of at most {budget} tokens: every array as the samples say"


def _check_attention(torch: Any, tree: PackedTree, impl: str, device: str) -> str:
    """Output and gradients of `impl` on a tree, against torch's causal attention on each sample alone in float64."""
    from ..attention import tree_attention

    dtype, tolerance = (
        (torch.float64, TOLERANCE["reference"]) if impl == "reference" else (torch.bfloat16, TOLERANCE["kernel"])
    )
    paths = [torch.from_numpy(path).long() for path in tree.path_index()]
    random = torch.Generator().manual_seed(0)
    shapes = [(4, tree.num_tokens, 64), (2, tree.num_tokens, 64), (2, tree.num_tokens, 64)]
    leaves = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=random).to(dtype)
    through = torch.from_numpy(tree.position_samples.copy()).double()

    alone = [leaf.clone().double().requires_grad_() for leaf in leaves]
    sums: Any = torch.zeros((), dtype=torch.float64)
    expected = torch.zeros(shapes[0], dtype=torch.float64)
    for path in paths:
        q, k, v = (leaf[:, path][None] for leaf in alone)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        expected[:, path] = out.detach()
        sums = sums + (out * (weight.double() / through[:, None])[:, path]).sum()
    torch.autograd.backward(sums)

    packed = [leaf.clone().to(device).requires_grad_() for leaf in leaves]
    end = torch.from_numpy(tree.subtree_end.copy()).to(device)
    got = tree_attention(*(leaf[None] for leaf in packed), subtree_end=end, impl=impl)[0]
    torch.autograd.backward(got, weight.to(device))
    pairs = [(got.detach(), expected), *((a.grad, b.grad) for a, b in zip(packed, alone, strict=True))]
    error = max(float((a.cpu().double() - b).norm() / b.norm()) for a, b in pairs)
    if not error <= tolerance:  # NaN fails
        raise ValueError(f"largest relative error {error:.1e}, allowed is {tolerance:.0e}")
    return f"output and gradients as of each sample alone: relative error {error:.1e}, allowed {tolerance:.0e}"


def _checked(name: str, check: Any) -> Check:
    start = perf_counter()
    try:
        detail, passed = check(), True
    except Exception as error:  # whatever goes wrong is the finding
        detail, passed = f"{type(error).__name__}: {first_line(error)}", False
    return Check(name, passed, detail, round((perf_counter() - start) * 1e3, 1))


# --- what there is --------------------------------------------------------------------------------------------------


_SLOW_TO_COMPILE = "what it needs is here; its first call compiles for seconds"
_ON_A_CPU = ("flex", "reference")
_NEEDS = {"gluon": "a Hopper GPU", "fa4": "a Hopper GPU"}
_RUNS = {
    "triton": "the default on a GPU",
    "flex": "dense and slow without a GPU: for tests",
    "reference": "plain torch, anywhere; dense and slow",
}


def _kernel(torch: Any, impl: str) -> Kernel:
    from ..attention import tree_attention

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16 if impl == "fa4" else dtype, device=device)
    end = torch.arange(1, 9, dtype=torch.int32, device=device)
    try:
        if impl == "fa4":
            from ..attention.fa4.launch import require

            require(q, q, None, None)
            return Kernel(impl, True, _SLOW_TO_COMPILE)
        if impl == "flex" and gpu:
            importlib.import_module("treepack.attention.flex")
            return Kernel(impl, True, _SLOW_TO_COMPILE)
        with warnings.catch_warnings(record=True) as said:  # flex says that it is slow without a GPU, and so do we
            warnings.simplefilter("always")
            tree_attention(q, q, q, subtree_end=end, impl=impl)
    except Exception as error:  # the reason is what is asked for
        if not gpu and impl not in _ON_A_CPU:
            return Kernel(impl, False, f"it needs {_NEEDS.get(impl, 'a GPU')}, and torch finds none here")
        return Kernel(impl, False, first_line(error))
    portable = [str(x.message) for x in said if "portable kernels" in str(x.message)]  # a Triton that is not tested
    return Kernel(impl, True, portable[0] if portable else _RUNS.get(impl, "it was called here"))


def _no_device(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch to use a GPU"
    if shutil.which("nvidia-smi") is None:
        return f"torch is built for CUDA {torch.version.cuda}, and there is no NVIDIA driver here"
    return f"torch is built for CUDA {torch.version.cuda} and finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"


def _driver() -> str | None:
    """Version of the driver, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def report() -> dict[str, Any]:
    """All of it, ready for JSON; `ok` is whether the self-test passed."""
    torch, why = torch_or_reason()
    found, no_device = devices(torch)
    checks = self_test(torch)
    return {
        "versions": versions(),
        "executable": sys.executable,
        "devices": found,
        "no_device": no_device,
        "kernels": [vars(kernel) for kernel in kernels(torch)],
        "scans": [vars(kernel) for kernel in scans(torch)],
        "no_torch": why,
        "self_test": [vars(check) for check in checks],
        "ok": all(check.passed for check in checks),
    }
