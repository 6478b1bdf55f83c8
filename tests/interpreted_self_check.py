"""Cases of `test_self_check.py`: run with TRITON_INTERPRET=1, prints one line of JSON."""

from __future__ import annotations

import json


def main() -> None:
    import torch

    from treepack.attention import operator as triton_op
    from treepack.attention import rule as triton_rule
    from treepack.attention import self_check

    def tensors(heads, kv_heads, layout="columns", values=16, beside=0):
        shapes = {"columns": (7, heads, 16), "rows": (heads, 7, 16), "strided": (heads, 16, 7)}
        orders = {"columns": (0, 1, 2), "rows": (1, 0, 2), "strided": (2, 0, 1)}
        found = []
        for count in (heads, kv_heads, kv_heads):
            shape = [count if size == heads else size for size in shapes[layout]]
            found.append(torch.zeros(shape).permute(orders[layout]))
        if values != 16 or beside:
            found[2] = torch.zeros(7, kv_heads, values + beside)[..., beside:]
        return found

    def verdict(inputs=None, window=False, softcap=False, sinks=False, training=True, with_lse=False):
        options = (window, softcap, sinks, training, with_lse)
        return self_check._check(triton_rule.PLAIN, *(inputs or tensors(2, 2)), *options)

    found = {
        "scoring": verdict(training=False),
        "grouped, lse": verdict(tensors(2, 1, "rows"), with_lse=True),
        "everything": verdict(tensors(2, 2, "strided"), window=True, softcap=True, sinks=True),
        "two sizes, latent": verdict(tensors(2, 1, "rows", values=32, beside=8)),
    }
    report = {name: [*x.features, x.wrong] for name, x in found.items()}
    report["facts"] = list(found["scoring"][:5])
    report["sizes"] = [x.sizes() for x in (found["scoring"], found["scoring"]._replace(value_size=24))]

    # Kernels that are a little wrong somewhere.
    forward, backward = triton_op.forward_pass, triton_op.backward_pass

    def one_row(*inputs):
        out, lse = forward(*inputs)
        out[200] *= 1.01
        return out, lse

    def one_gradient(*inputs):
        dq, dk, dv, delta = backward(*inputs)
        dk[3] = float("nan")
        return dq * 1.001, dk, dv, delta

    triton_op.forward_pass = one_row
    report["a wrong row"] = verdict(training=False).wrong
    triton_op.forward_pass, triton_op.backward_pass = forward, one_gradient
    wrong = verdict()
    report["a wrong gradient"] = wrong.wrong
    report["message"] = self_check._message(wrong)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
