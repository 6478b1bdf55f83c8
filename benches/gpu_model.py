"""One training step of a 1.5B model, packed with treepack, against the same samples padding-free and padded.

    python benches/gpu_model.py [--rows agent9k comb60] [--impls triton alone] [--seconds 6]

The model is a randomly initialised Qwen2.5-1.5B configuration (28 layers, 12/2 heads, D 128, vocabulary 151,936, tied),
bfloat16, every layer checkpointed. A step is forward, log-probs of the loss terms, backward. Contenders:

    triton, flex, fa4     packed, by the implementation of tree attention
    alone                 padding-free: samples end to end, each attends to itself, torch's varlen attention (FA2)
    alone_fa3             the same after torch.nn.attention.activate_flash_attention_impl("FA3")
    padded                (samples, longest), right-padded, torch's causal scaled_dot_product_attention

All take log-probs with the same head, packed on the R rows, the others on the M predicting positions. The yardstick is
the FLOP ratio: what the samples cost alone over what the tree costs (`model_rows.flops`), beside the token ratio.

First a gate: a model of the same shape with two layers must pass `check_parity` in bfloat16 with each implementation
against sdpa, and every contender's log-probs must be those of the padding-free run. No figure is printed on a red gate.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_rows
import numpy as np
import torch
import transformers
from gpu_peers import Unavailable, _varlen
from torch import Tensor
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

import treepack
import treepack.integrations.transformers
from treepack.logprobs import head_log_probs
from treepack.testing import check_parity

PACKED = ("triton", "triton_plain", "gluon", "flex", "fa4", "reference")
# Two FlashAttention versions differ by 0.02 in the mean of this model's log-probs in bfloat16, and by 0.11 at most.
MEAN_ALLOWED, LARGEST_ALLOWED = 0.05, 0.5


def make_model(device: str, layers: int = 28, tiny: bool = False, **of_tiny: Any) -> Qwen2ForCausalLM:
    sizes: dict[str, Any] = {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151_936,
    }  # fmt: skip
    if tiny:
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4} | of_tiny
    config = Qwen2Config(
        **sizes, num_hidden_layers=layers, max_position_embeddings=131_072, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6})  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="treepack", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def varlen_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Samples end to end in one row; `cu_seqlens` and `longest` come through model(...)."""
    flat = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    cu, longest = kwargs["cu_seqlens"], kwargs["longest"]
    return _varlen()(*flat, cu, cu, longest, longest)[None], None


AttentionInterface.register("varlen", varlen_attention)


def terms_of(positions: np.ndarray, targets: np.ndarray, length: int, device: str) -> SimpleNamespace:
    """What `head_log_probs` reads of a tree, with a row for every term."""

    def index(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return SimpleNamespace(
        subtree_end=torch.empty(length, device="meta"),  # its length alone is read
        row_position=index(positions),
        term_row=index(np.arange(len(positions))),
        term_target=index(targets),
        sampling_mask=index([]),
        sampling_mask_counts=index(np.zeros(len(positions))),
    )


class Contenders:
    """Functions (model) -> log-probs (M,) in the order of the samples, and the positions that each forwards."""

    def __init__(self, samples: list[dict[str, np.ndarray]], device: str):
        self.samples, self.device = samples, device
        self.lengths = [len(sample["input_ids"]) for sample in samples]
        self.targets = [1 + np.flatnonzero(sample["completion_mask"][1:]) for sample in samples]
        self.target_ids = np.concatenate([s["input_ids"][t] for s, t in zip(samples, self.targets, strict=True)])

    def make(self, name: str) -> tuple[Callable[[Any], Tensor], int]:
        if name in PACKED:
            tree = model_rows.one_tree(self.samples).to(self.device)
            return lambda model: treepack.term_log_probs(_set(model, "treepack"), tree, impl=name), tree.num_tokens
        return self.padded() if name == "padded" else self.alone(name)

    def alone(self, name: str) -> tuple[Callable[[Any], Tensor], int]:
        flash = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
        if name == "alone_fa3":
            if flash is None:
                raise Unavailable("this torch has no activate_flash_attention_impl")
            try:
                flash("FA3")
            except Exception as error:
                raise Unavailable(f"FA3: {error}") from error
        elif flash is not None and torch.nn.attention.current_flash_attention_impl() is not None:
            torch.nn.attention.restore_flash_attention_impl()
        ids = np.concatenate([sample["input_ids"] for sample in self.samples])
        cu = np.concatenate([[0], np.cumsum(self.lengths)])
        positions = np.concatenate([start + t - 1 for start, t in zip(cu, self.targets, strict=False)])
        inputs = {
            "input_ids": torch.tensor(ids, device=self.device)[None],
            "position_ids": torch.tensor(np.arange(len(ids)) - np.repeat(cu[:-1], self.lengths), device=self.device)[
                None
            ],
            "attention_mask": torch.empty(1, 1, 1, 0, device=self.device),  # as the packed side: no look for packing
            "cu_seqlens": torch.tensor(cu, dtype=torch.int32, device=self.device),
            "longest": max(self.lengths),
            "use_cache": False,
        }
        terms = terms_of(positions, self.target_ids, len(ids), self.device)

        def run(model: Any) -> Tensor:
            hidden = _set(model, "varlen").model(**inputs).last_hidden_state
            return head_log_probs(hidden, model.lm_head.weight, terms)

        return run, len(ids)

    def padded(self) -> tuple[Callable[[Any], Tensor], int]:
        longest = max(self.lengths)
        ids = np.zeros((len(self.samples), longest), np.int64)
        for row, sample in zip(ids, self.samples, strict=True):
            row[: len(sample["input_ids"])] = sample["input_ids"]
        positions = np.concatenate([i * longest + t - 1 for i, t in enumerate(self.targets)])
        terms = terms_of(positions, self.target_ids, ids.size, self.device)
        rows = torch.tensor(ids, device=self.device)

        def run(model: Any) -> Tensor:
            # Right padding under a causal mask needs no other mask: nothing real comes after it.
            hidden = _set(model, "sdpa").model(input_ids=rows, use_cache=False).last_hidden_state
            return head_log_probs(hidden.flatten(0, 1), model.lm_head.weight, terms)

        return run, ids.size


def _set(model: Any, attention: str) -> Any:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
    return model


def gate(impls: list[str], device: str, tiny: bool) -> bool:
    """check_parity of a two-layer model of the same shape with each implementation of tree attention."""
    shapes = model_rows.answers(1, 4, 300, 80) + model_rows.turns(2, 3, 100, 40, 20, 30)
    samples = model_rows.samples_of(shapes)
    model = make_model(device, layers=2, tiny=tiny)
    green = True
    for impl in impls:
        if impl in PACKED:
            try:
                found = check_parity(model, samples, impl=impl, alone="sdpa")
                print(f"gate: {impl}: packed = alone, {found.terms} terms, largest difference {found.log_probs:.3f}")
            except (treepack.PackError, ValueError) as error:
                green = False
                print(f"gate: {impl}: RED, {error}")
            except (ImportError, RuntimeError, TypeError) as error:
                print(f"gate: {impl}: does not run here: {str(error).splitlines()[0]}")
    return green


def measure(
    run: Callable[[Any], Tensor], model: Any, weights: Tensor, seconds: float
) -> tuple[Tensor, list[float], float]:
    """(log-probs, milliseconds of each step, peak GiB) of whole training steps. The first step is a warm-up, and so are
    those that end within the first third of `seconds` after it: the allocator and the clocks settle."""
    synchronize = torch.cuda.synchronize if weights.is_cuda else lambda: None
    times: list[float] = []
    begin = 0.0
    while len(times) < 3 or (time.perf_counter() - begin < seconds and len(times) < 31):
        model.zero_grad(set_to_none=True)
        synchronize()
        start = time.perf_counter()
        values = run(model)
        ((values * weights).sum() / len(weights)).backward()
        synchronize()
        end = time.perf_counter()
        values = values.detach()
        if not begin:
            begin = end
            if weights.is_cuda:
                torch.cuda.reset_peak_memory_stats()
        elif end - begin > seconds / 3:
            times.append((end - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if weights.is_cuda else 0.0
    model.zero_grad(set_to_none=True)
    return values, times, peak


def host_milliseconds(samples: list[Any], device: str, repeats: int = 5) -> tuple[float, float]:
    """(packing with its tile lists, transfer): medians; the first call of each does not count."""
    packing, transfer = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        tree = model_rows.one_tree(samples)
        _ = tree.tiles
        middle = time.perf_counter()
        tree.to(device)
        if device != "cpu":
            torch.cuda.synchronize()
        packing.append((middle - start) * 1e3)
        transfer.append((time.perf_counter() - middle) * 1e3)
    return statistics.median(packing[1:]), statistics.median(transfer[1:])


def bench_row(row: str, impls: list[str], model: Any, arguments: argparse.Namespace) -> bool:
    samples = model_rows.ROWS[row]()
    stats = treepack.pack(samples, max_tokens=sum(len(s["input_ids"]) for s in samples)).stats
    rows = len(model_rows.one_tree(samples).row_position)
    packed_flops = model_rows.flops(model.config, stats.packed_tokens, stats.attention_pairs, rows)
    alone_flops = model_rows.flops(model.config, stats.raw_tokens, stats.attention_pairs_alone, stats.terms)
    ratio = alone_flops / packed_flops
    print(
        f"\n{row}: {stats.samples} samples, N {stats.packed_tokens:,} of {stats.raw_tokens:,} raw, M {stats.terms:,}, "
        f"R {rows:,}; token ratio {stats.packing_ratio:.2f}, FLOP ratio {ratio:.2f}"
    )
    contenders = Contenders(samples, arguments.device)
    weights = torch.cos(torch.arange(stats.terms, device=arguments.device, dtype=torch.float32))
    values: dict[str, Tensor] = {}
    results: dict[str, tuple[list[float], float, int]] = {}
    for name in impls:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            run, tokens = contenders.make(name)
            values[name], times, peak = measure(run, model, weights, arguments.seconds)
            results[name] = (times, peak, tokens)
        except torch.OutOfMemoryError:
            print(f"  {name:10s} out of memory")
        except (Unavailable, ImportError, RuntimeError, TypeError) as error:
            print(f"  {name:10s} does not run here: {str(error).splitlines()[0]}")
    green, yardstick = True, values.get("alone")
    for name, got in values.items():
        if yardstick is not None and name != "alone":
            apart = (got - yardstick).abs()
            mean, largest = float(apart.mean()), float(apart.max())
            fits = mean <= MEAN_ALLOWED and largest <= LARGEST_ALLOWED
            green &= fits
            print(
                f"  {name:10s} log-probs against alone: mean {mean:.4f}, largest {largest:.3f}{'' if fits else '  RED'}"
            )
    if not green:
        print("  the gate is red: no figures")
        return False
    packing, transfer = host_milliseconds(samples, arguments.device)
    print(f"  {'':10s} {'step ms':>9s} {'spread':>7s} {'peak GiB':>9s} {'positions':>10s} {'TFLOP/s':>8s}  against")
    for name, (times, peak, tokens) in results.items():
        median = statistics.median(times)
        useful = packed_flops if name in PACKED else alone_flops
        speed = useful / median / 1e9
        line = f"  {name:10s} {median:9.1f} {max(times) - min(times):7.1f} {peak:9.1f} {tokens:10,d} {speed:8.0f}"
        if name in PACKED:
            for other in ("alone", "alone_fa3", "padded"):
                if other in results:
                    faster = statistics.median(results[other][0]) / median
                    line += f"  {other}: {faster:.2f}x = {faster / ratio:.3f} of the FLOP ratio;"
            line += (
                f"  host: pack {packing:.2f} + copy {transfer:.2f} ms = {(packing + transfer) / median:.2%} of the step"
            )
        print(line, flush=True)
    return True


def environment(device: str) -> str:
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor()
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{name or 'CPU'}, {versions}, commit {done.stdout.strip() or 'unknown'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(model_rows.FIRST_FIVE), choices=list(model_rows.ROWS))
    parser.add_argument(
        "--impls", nargs="+", default=["triton", "alone"], choices=[*PACKED, "alone", "alone_fa3", "padded"]
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="measure each contender this long, 3 steps at least")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that the script runs")
    arguments = parser.parse_args()
    # Packed trees of many lengths: without it the allocator's cache would be part of every peak.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    print(environment(arguments.device))
    if not gate(arguments.impls, arguments.device, arguments.tiny):
        return 1
    model = make_model(arguments.device, arguments.layers, arguments.tiny)
    green = [bench_row(row, arguments.impls, model, arguments) for row in arguments.rows]
    return 0 if all(green) else 1


if __name__ == "__main__":
    sys.exit(main())
