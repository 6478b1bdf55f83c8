"""What the check at the first use of a model costs: two tiny samples packed and alone, once for each model.

    python benches/model_check.py [--models small 0.5B] [--dtype float32] [--device cuda]

For randomly initialised Qwen2 configurations: milliseconds of the check (on the CPU those of the process, whatever else
the machine does); of the four forward passes of 63 tokens that
are within it, without hooks; of what every later call pays to see that nothing has changed; memory at its peak beyond
what lay there before. First a gate: the model passes, and the same model with a layer that leaks does not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from common import console, environment, spread
from transformers import Qwen2Config, Qwen2ForCausalLM

import treepack
import treepack.integrations.transformers
from treepack.integrations.transformers.checks import leaks, rows, untouched

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]
from leaking_layers import LEAKING, put  # noqa: E402

#: layers, width, width of the feed-forward block, heads, heads of keys and values
SIZES = {
    "small": (4, 256, 1024, 4, 2),
    "0.5B": (24, 896, 4864, 14, 2),
    "1.5B": (28, 1536, 8960, 12, 2),
    "7B": (28, 3584, 18944, 28, 4),
}


def make_model(name: str, dtype: torch.dtype, device: str) -> Any:
    layers, width, inner, heads, kv_heads = SIZES[name]
    config = Qwen2Config(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "treepack"
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(dtype)


def check(model: Any, tree: Any) -> None:
    """As at a first use."""
    leaks._known.pop(model, None)
    leaks.check_leaks(model, model, tree)


def forwards(model: Any, tree: Any) -> None:
    made = rows.rows_for(model, 0)
    with untouched.untouched(model.model):
        for row in (made.packed, made.first, made.second, made.first):
            model.model(**row.inputs(tree))


def times(function: Callable[[], object], device: str, count: int = 7) -> list[float]:
    """Milliseconds, after two calls that do not count."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    found = []
    for _ in range(count + 2):
        start = clock()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((clock() - start) * 1e3)
    return found[2:]


def peak(function: Callable[[], object], device: str) -> float:
    """MiB beyond what lay there, at the most; of the process, or of torch on a GPU."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from here on
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) / 2**10


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def gate(model: Any, tree: Any) -> None:
    check(model, tree)
    block = model.model.layers[1].mlp
    put(model, LEAKING["Smooth"]())
    wrong = ""
    try:
        check(model, tree)
    except ValueError as error:
        wrong = str(error)
    if "part (Smooth) leaks" not in wrong:
        sys.exit(f"a layer that leaks was not found ({wrong}): no figures")
    model.model.layers[1].mlp = block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["small", "0.5B"], choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    samples = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 5]}]
    tree = treepack.pack(samples, max_tokens=16)[0].to(options.device)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    console.print(f"{environment(transformers=transformers.__version__)}\n{options.dtype} on {where}\n")
    console.print(
        f"{'model':8} {'modules':>8} {'check ms':>14} {'its forwards ms':>18} {'later calls ms':>17} {'MiB':>6}"
    )
    for name in options.models:
        model = make_model(name, getattr(torch, options.dtype), options.device)
        gate(model, tree)
        found = [
            times(lambda m=model: check(m, tree), options.device),
            times(lambda m=model: forwards(m, tree), options.device),
            times(lambda m=model: leaks.check_leaks(m, m, tree), options.device),
        ]
        shown = [f"{statistics.median(x):.{digits}f} {spread(x)}" for x, digits in zip(found, (0, 0, 2), strict=True)]
        modules = sum(1 for _ in model.modules())
        memory = peak(lambda m=model: check(m, tree), options.device)
        console.print(f"{name:8} {modules:8} {shown[0]:>14} {shown[1]:>18} {shown[2]:>17} {memory:6.0f}")


if __name__ == "__main__":
    main()
