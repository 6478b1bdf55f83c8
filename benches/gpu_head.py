"""Time and peak memory of the LM head alone: log-probs of R rows, forward and backward.

    python benches/gpu_head.py [--rows 16384] [--hidden 1536] [--vocab 151936] [--sets] [--entropy]

The bound: for R = 16,384, hidden size 1,536 and a vocabulary of 151,936 the peak stays under 2 GB above the weight, the
hidden states and their gradients. First a gate: values and gradients against the same steps in float64, on fewer rows
(the steps in float64 against all R x V logits: tests/logprobs/test_logprobs.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from treepack.logprobs import dense as head_dense
from treepack.logprobs import head_log_probs

BOUND = 2e9


def make(rows: int, width: int, vocabulary: int, sets: bool) -> tuple[Tensor, Tensor, SimpleNamespace]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda", generator=generator) * width**-0.5).bfloat16()
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    target = torch.randint(vocabulary, (rows,), device="cuda", generator=generator, dtype=torch.int32)
    counts = torch.zeros_like(index)
    kept = index[:0]
    if sets:  # 1 to 6 ids, the target first, the others right after it
        counts = torch.randint(1, 7, (rows,), device="cuda", generator=generator, dtype=torch.int32)
        start = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        offset = torch.arange(len(start), device="cuda") - start
        kept = ((torch.repeat_interleave(target, counts) + offset) % vocabulary).int()
    tree = SimpleNamespace(
        subtree_end=index, row_position=index, term_row=index, term_target=target, sampling_mask=kept,
        sampling_mask_counts=counts)  # fmt: skip
    return hidden, weight.requires_grad_(), tree


def run(hidden: Tensor, weight: Tensor, tree: SimpleNamespace, entropy: bool) -> list[Tensor]:
    values = head_log_probs(hidden, weight, tree, entropy=entropy)
    values = list(values[:2]) if entropy else [values]
    loss = sum((x * torch.cos(torch.arange(len(x), device="cuda"))).sum() for x in values)
    loss.backward()
    return values


def gate(width: int, vocabulary: int, sets: bool, entropy: bool) -> bool:
    """bfloat16 inputs, everything else exact: values to 1e-3, gradients to a bfloat16 step of the largest."""
    hidden, weight, tree = make(257, width, vocabulary, sets)
    values = run(hidden, weight, tree, entropy)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = run(exact_hidden, exact_weight, tree, entropy)
    green = all(float((a - b).abs().max()) < 1e-3 for a, b in zip(values, expected, strict=True))
    for got, wanted in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        green &= float((got - wanted).abs().max()) < 2**-7 * float(wanted.abs().max())
    return green


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=1_536)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--sets", action="store_true", help="kept sets of 1 to 6 ids")
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments}")
    small = max(1024, arguments.vocab // 16)  # float64 of all logits is slow
    if not gate(arguments.hidden, small, arguments.sets, arguments.entropy):
        print("the gate is red: no figures")
        return 1
    hidden, weight, tree = make(arguments.rows, arguments.hidden, arguments.vocab, arguments.sets)
    allowed = True
    for fused in (True, False):
        head_dense.FUSED = fused
        times, peak = [], 0.0
        for _ in range(arguments.repeats + 2):
            hidden.grad = weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(hidden, weight, tree, arguments.entropy)
            end.record()
            torch.cuda.synchronize()
            gradients = sum(x.grad.numel() * x.grad.element_size() for x in (hidden, weight))
            peak = torch.cuda.max_memory_allocated() - before - gradients
            times.append(start.elapsed_time(end))
        products = 4 * 2 * arguments.rows * arguments.hidden * arguments.vocab  # forward, again, twice backward
        median = statistics.median(times[2:])
        speed = "" if arguments.sets else f", {products / median / 1e9:.0f} TFLOP/s"
        name = "Triton passes" if fused else "torch passes"
        print(f"{name}: {median:.2f} ms{speed}, {peak / 1e9:.2f} GB above the rest")
        allowed &= peak < BOUND
    print("under 2 GB" if allowed else "OVER 2 GB")
    return 0 if allowed else 1


if __name__ == "__main__":
    sys.exit(main())
