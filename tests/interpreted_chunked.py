"""The scans with flash-linear-attention's own kernels, in Triton's interpreter: run with TRITON_INTERPRET=1, prints one
line of JSON, the largest difference of each result from the reference over the largest value."""

from __future__ import annotations

import json
import sys
import warnings

import recurrent_paths as alone
from interpreted_recurrent import COMB, difference, tree
from triton.runtime import autotuner

# Nothing is measured on the CPU: the first configuration is as good as another.
autotuner.Autotuner._bench = lambda self, *args, config, **named: [1.0, 1.0, 1.0]

OPERATORS = {"delta": "tree_gated_delta_rule", "kda": "tree_kda", "linear": "tree_linear_attention"}


def main() -> None:
    warnings.simplefilter("ignore")
    import torch

    from treepack.recurrent import chunked, reference

    assert chunked.reason() is None, chunked.reason()
    torch.set_num_threads(1)
    segments = tree(torch, COMB, 5)
    found = {}
    for kind, operator in OPERATORS.items():
        sizes = {"heads": 1, "value_heads": 2, "size": 32, "value_size": 32}
        inputs = alone.random_inputs(kind, segments.tokens, 0, **sizes, dtype=torch.float32)
        options = {"scale": 0.3} if kind == "linear" else {"scale": 0.3, "qk_l2norm": True}
        results = []
        for home in (chunked, reference):
            out = getattr(home, operator)(**inputs, tree=segments, **options)
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            results.append([out, *torch.autograd.grad((out * weight).sum(), list(inputs.values()))])
        found[kind] = {name: difference(a, b) for name, a, b in zip(["o", *inputs], *results, strict=True)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
