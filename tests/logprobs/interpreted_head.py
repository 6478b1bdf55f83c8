"""Cases of `test_logprobs_triton.py`: run with TRITON_INTERPRET=1, prints one line of JSON."""

from __future__ import annotations

import itertools
import json


def main() -> None:
    import torch

    from treepack.logprobs import dense as head_dense
    from treepack.logprobs import triton as triton_head
    from treepack.logprobs.terms import HeadTerms

    triton_head._COLUMNS = 16
    head_dense.CHUNK_LOGITS = 6 * 40  # several blocks of ids, the last one narrower
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(6, 5), 2 * torch.randn(97, 5), torch.randn(97)
    bias[:45] = bias[90:95] = -torch.inf  # ids that the head masks out, a whole block among them
    slot = torch.tensor([0, 5, 2, 2, 0, 2, 4, 1])  # rows 3 has no term, 2 has three, in no order
    target = torch.tensor([96, 50, 53, 53, 50, 79, 60, 57])
    found = {}
    for softcap, entropy, temperature in itertools.product((None, 1.5), (False, True), (1.0, 0.7)):
        empty = torch.zeros(0, dtype=torch.int32)
        terms = HeadTerms(
            torch.arange(6), slot, target, empty, torch.zeros(6, dtype=torch.int32), scale=0.5, softcap=softcap,
            temperature=temperature, entropy=entropy)  # fmt: skip
        results = []
        for fused in (False, True):
            dense = head_dense.DenseRows(rows, weight, bias, terms)
            dense.fused, dense.slot, dense.target = fused, slot, target
            lse, entropy_rows, z = dense.forward()
            d_weight, d_bias = torch.zeros_like(weight), torch.zeros_like(bias)
            g = torch.cos(torch.arange(8.0))
            ge = torch.sin(torch.arange(8.0)) if entropy else None
            d_rows = dense.backward(g, ge, lse, entropy_rows, d_weight, d_bias)
            results.append([lse, entropy_rows, z, d_rows, d_weight, d_bias])
        gaps = [float((a - b).abs().max()) for a, b in zip(*results, strict=True) if a.numel()]
        sizes = [float(a.abs().max()) for a in results[0] if a.numel()]
        found[f"softcap {softcap}, entropy {entropy}, temperature {temperature}"] = [gaps, sizes]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
