"""One training step of a 2B model of Qwen3.5's shape, packed with treepack, against the same samples padding-free.

    python benches/gpu_hybrid.py [--rows agent9k multiturn comb60] [--seconds 6]
    python benches/gpu_hybrid.py --tiny --device cpu --layers 4 --rows small       # to see that the script runs

The model is random: 24 layers, three of gated delta net (16 heads, 128 x 128) to one of attention (8 / 2 heads, D 256),
bfloat16, every layer checkpointed. A step is forward, log-probs of the loss terms, backward. Contenders:

    packed   `treepack.term_log_probs`
    alone    samples end to end: flash-linear-attention's convolution and scan with cu_seqlens, torch's varlen attention
             (FlashAttention-2); without flash-linear-attention (a CPU), each sample in a call of its own

The yardstick is the FLOP ratio: what the samples cost alone over what the tree costs (`hybrid_model.flops`). The share
of a kind of layer is the time of one such layer by itself (two forwards and a backward) times their number, of the
step.

First a gate: log-probs and gradients of a model of four layers are those of the run alone; so are the log-probs of
each row. No figure is printed on a red gate. (Parity in float64 is tested on the CPU.)
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import fla_tuning  # noqa: F401, before any import of flash-linear-attention
import hybrid_model
import model_rows
import numpy as np
import torch
from gpu_model import Contenders, _set, environment, host_milliseconds, measure, terms_of
from gpu_peers import Unavailable, _varlen
from torch import Tensor
from transformers import AttentionInterface

import treepack
from treepack.integrations.transformers import hidden_alone, model_inputs
from treepack.logprobs import head_log_probs

# Bits of bfloat16 in 24 random layers; a state that ran on from one sample into the next is off by some units.
MEAN_ALLOWED, LARGEST_ALLOWED = 0.05, 0.6
GRADIENT_ALLOWED = 0.1  # of the norm, in four layers
KINDS = {"gated delta net": "linear_attn", "attention": "self_attn", "feed-forward": "mlp"}


def varlen_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Samples end to end; `sample_cu` and `longest` come through model(...)."""
    flat = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    cu, longest = kwargs["sample_cu"], kwargs["longest"]
    return _varlen()(*flat, cu, cu, longest, longest)[None], None


AttentionInterface.register("varlen_hybrid", varlen_attention)


class HybridContenders(Contenders):
    """Functions (model) -> log-probs (M,), the keyword arguments that a layer gets, and the positions forwarded."""

    def packed(self) -> tuple[Callable[[Any], Tensor], dict[str, Any], int]:
        tree = model_rows.one_tree(self.samples).to(self.device)

        def run(model: Any) -> Tensor:
            return treepack.term_log_probs(_set(model, "treepack"), tree)

        return run, model_inputs(tree), tree.num_tokens

    def end_to_end(self) -> tuple[Callable[[Any], Tensor], dict[str, Any], int]:
        ids = np.concatenate([sample["input_ids"] for sample in self.samples])
        cu = np.concatenate([[0], np.cumsum(self.lengths)])
        depth = np.arange(len(ids)) - np.repeat(cu[:-1], self.lengths)
        inputs = {
            "input_ids": torch.tensor(ids, device=self.device)[None],
            "position_ids": torch.tensor(depth, device=self.device)[None],
            "attention_mask": torch.empty(1, 1, 1, 0, device=self.device),
            "sample_cu": torch.tensor(cu, dtype=torch.int32, device=self.device),
            "longest": max(self.lengths),
            "use_cache": False,
        }
        positions = np.concatenate([start + t - 1 for start, t in zip(cu, self.targets, strict=False)])
        terms = terms_of(positions, self.target_ids, len(ids), self.device)

        def run(model: Any) -> Tensor:
            hidden = _set(model, "varlen_hybrid").model(**inputs).last_hidden_state
            return head_log_probs(hidden, model.lm_head.weight, terms)

        return run, inputs, len(ids)

    def one_by_one(self) -> tuple[Callable[[Any], Tensor], dict[str, Any], int]:
        def run(model: Any) -> Tensor:
            _set(model, "sdpa")
            values = []
            for sample, target in zip(self.samples, self.targets, strict=True):
                ids = torch.tensor(sample["input_ids"], device=self.device)
                terms = terms_of(target - 1, sample["input_ids"][target], len(ids), self.device)
                values.append(head_log_probs(hidden_alone(model, ids), model.lm_head.weight, terms))
            return torch.cat(values)

        return run, {}, sum(self.lengths)


def layer_milliseconds(model: Any, inputs: dict[str, Any], attention: str) -> dict[str, float]:
    """Of each kind of layer: two forwards and a backward of one, times their number; the second call is timed."""
    _set(model, attention)
    inner, length = model.model, inputs["input_ids"].shape[1]
    device, found = inputs["input_ids"].device, {}
    x = torch.randn(1, length, model.config.hidden_size, device=device, dtype=torch.bfloat16)
    given = {name: value for name, value in inputs.items() if name not in ("input_ids", "use_cache", "position_ids")}
    given["attention_mask"] = None  # the empty one says so to the whole model
    rotary = inner.rotary_emb(x, inputs["position_ids"][None].expand(3, 1, -1))
    for kind, name in KINDS.items():
        layers = [getattr(layer, name) for layer in inner.layers if hasattr(layer, name)]
        more = {"position_embeddings": rotary} if kind == "attention" else {}
        for _ in range(2):
            _synchronize(device)
            start = time.perf_counter()
            for repeat in range(2):
                leaf = x.clone().requires_grad_()
                with torch.set_grad_enabled(bool(repeat)):
                    out = layers[0](leaf) if kind == "feed-forward" else layers[0](leaf, **given, **more)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(torch.ones_like(out))
            _synchronize(device)
            found[kind] = (time.perf_counter() - start) * 1e3 * len(layers)
    model.zero_grad(set_to_none=True)
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def gate(arguments: argparse.Namespace) -> bool:
    """Log-probs and gradients of a model of four layers, packed against alone."""
    shapes = model_rows.answers(1, 4, 300, 80) + model_rows.turns(2, 3, 100, 40, 20, 30)
    model = hybrid_model.make_model(arguments.device, layers=4, tiny=arguments.tiny)
    contenders = HybridContenders(model_rows.samples_of(shapes), arguments.device)
    values, gradients = [], []
    for make in (contenders.packed, contenders.end_to_end if arguments.end_to_end else contenders.one_by_one):
        log_probs = make()[0](model)
        log_probs.sum().backward()
        values.append(log_probs.detach().float())
        # Of matrices: those of single numbers, as a gate's bias, are sums that cancel.
        gradients.append({name: x.grad.float() for name, x in model.named_parameters() if x.dim() > 1})
        model.zero_grad(set_to_none=True)
    largest = float((values[0] - values[1]).abs().max())
    apart = {name: float((gradients[0][name] - x).norm() / x.norm()) for name, x in gradients[1].items()}
    worst = max(apart, key=lambda name: (apart[name] != apart[name], apart[name]))  # NaN above all
    fits = largest <= LARGEST_ALLOWED and apart[worst] <= GRADIENT_ALLOWED
    print(
        f"gate: {'packed = alone' if fits else 'RED'}, {len(values[0])} log-probs at most {largest:.3f} apart, "
        f"gradients of matrices at most {apart[worst]:.4f} of their norm ({worst})"
    )
    return fits


def bench_row(row: str, model: Any, arguments: argparse.Namespace) -> bool:
    samples = model_rows.ROWS[row]()
    stats = treepack.pack(samples, max_tokens=sum(len(s["input_ids"]) for s in samples)).stats
    rows = len(model_rows.one_tree(samples).row_position)
    costs = {
        "packed": hybrid_model.flops(model.config, stats.packed_tokens, stats.attention_pairs, rows),
        "alone": hybrid_model.flops(model.config, stats.raw_tokens, stats.attention_pairs_alone, stats.terms),
    }
    ratio = sum(costs["alone"].values()) / sum(costs["packed"].values())
    print(
        f"\n{row}: {stats.samples} samples, N {stats.packed_tokens:,} of {stats.raw_tokens:,} raw, M {stats.terms:,}, "
        f"R {rows:,}; token ratio {stats.packing_ratio:.2f}, FLOP ratio {ratio:.2f}"
    )
    contenders = HybridContenders(samples, arguments.device)
    weights = torch.cos(torch.arange(stats.terms, device=arguments.device, dtype=torch.float32))
    results, values = {}, {}
    for name, attention, make in (
        ("packed", "treepack", contenders.packed),
        ("alone", "varlen_hybrid", contenders.end_to_end if arguments.end_to_end else contenders.one_by_one),
    ):
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
        try:
            run, inputs, tokens = make()
            values[name], times, peak = measure(run, model, weights, arguments.seconds)
            layers = layer_milliseconds(model, inputs, attention) if inputs else {}
            results[name] = (times, peak, tokens, layers)
        except (torch.OutOfMemoryError, Unavailable) as error:
            print(f"  {name:7s} does not run here: {str(error).splitlines()[0]}")
    if len(values) == 2:
        apart = (values["packed"] - values["alone"]).abs()
        mean, largest = float(apart.mean()), float(apart.max())
        print(f"  log-probs, packed against alone: mean {mean:.4f}, largest {largest:.3f}")
        if not (mean <= MEAN_ALLOWED and largest <= LARGEST_ALLOWED):  # NaN is red
            print("  the gate is red: no figures")
            return False
    packing, transfer = host_milliseconds(samples, arguments.device)
    for name, (times, peak, tokens, layers) in results.items():
        median = statistics.median(times)
        speed = sum(costs[name].values()) / median / 1e9
        spread = max(times) - min(times)
        print(
            f"  {name:7s} {median:9.1f} ms (+- {spread:.1f}), {peak:.1f} GiB, {tokens:,} positions, {speed:.0f} TFLOP/s"
        )
        if layers:
            rest = median - sum(layers.values())
            shares = [f"{kind} {ms:.1f} ms = {ms / median:.0%}" for kind, ms in (layers | {"rest": rest}).items()]
            print(f"          {', '.join(shares)}")
    if len(results) == 2:
        faster = statistics.median(results["alone"][0]) / statistics.median(results["packed"][0])
        host = f"host: pack {packing:.2f}, copy {transfer:.2f} ms"
        print(f"  {faster:.2f}x = {faster / ratio:.3f} of the FLOP ratio; {host}")
    sys.stdout.flush()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = ["agent9k", "multiturn", "comb60"]
    parser.add_argument("--rows", nargs="+", default=rows, choices=list(model_rows.ROWS))
    parser.add_argument("--seconds", type=float, default=6.0, help="measure each contender this long, 3 steps at least")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that the script runs")
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    print(environment(arguments.device))
    try:
        hybrid_model.run_samples_end_to_end()
        arguments.end_to_end = arguments.device != "cpu"
    except ModuleNotFoundError as error:
        arguments.end_to_end = False
        print(f"alone is one sample after the other: {error}")
    if not gate(arguments):
        return 1
    model = hybrid_model.make_model(arguments.device, arguments.layers, arguments.tiny)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters, {environment(arguments.device)}")
    print(f"kernels: {kernels(arguments.device)}")
    green = [bench_row(row, model, arguments) for row in arguments.rows]
    return 0 if all(green) else 1


def kernels(device: str) -> str:
    """Which ran, in words."""
    from importlib import metadata

    if device == "cpu":
        return "the references, on the CPU"
    found = {name: metadata.version(name) for name in ("triton", "fla-core")}
    return (
        "scans of treepack.recurrent, tree attention of treepack at D 256; alone: flash-linear-attention with "
        f"cu_seqlens, torch's varlen attention ({found})"
    )


if __name__ == "__main__":
    sys.exit(main())
