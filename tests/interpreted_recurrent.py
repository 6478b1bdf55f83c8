"""Cases of `test_recurrent_triton.py`: run with TRITON_INTERPRET=1, prints one line of JSON: the largest difference of
each result from the reference, over the largest value."""

from __future__ import annotations

import json
import random
import sys
import warnings

import forests
import recurrent_paths as alone

COMB = [(3, [(1, []), (20, [(4, []), (2, [(17, []), (35, [(5, []), (1, [])])])])])]
# name: (nests or tokens, padding, heads, value heads, key size, value size, tokens of a chunk)
WALKS = {
    "one token": ([(1, [])], 0, 1, 1, 16, 16, 16),
    "a chain": ([(70, [])], 0, 1, 1, 16, 16, 32),
    "roots of one token": ([(1, []), (1, [(1, []), (1, [])]), (2, [])], 2, 1, 1, 16, 16, 16),
    "a comb": (COMB, 5, 1, 2, 16, 32, 16),
    "a key of 24": (COMB, 0, 2, 2, 24, 48, 16),
    "wide fork": ([(40, [(3, [])] * 9)], 0, 1, 1, 16, 16, 16),
    "drawn": (90, 3, 1, 2, 16, 16, 16),
    "drawn, chunks of 64": (150, 0, 1, 1, 16, 16, 64),
}
CONVS = {  # name: (nests or tokens, padding, channels, width, bias, silu)
    "one token": ([(1, [])], 0, 4, 4, True, True),
    "chain": ([(70, [])], 3, 5, 4, True, True),
    "roots of one token": ([(1, []), (1, [(1, []), (1, [])]), (2, [])], 2, 3, 4, False, True),
    "comb": (COMB, 0, 130, 4, True, False),
    "wide fork": ([(3, [(1, [(1, []), (2, [])])] * 20)], 0, 4, 4, True, True),
    "width 1": (40, 2, 4, 1, True, True),
    "width 2": (40, 0, 4, 2, False, False),
    "width 7": (60, 0, 4, 7, True, True),
    "drawn": (600, 40, 6, 4, True, True),
}
NORMS = {"rows of 24": (37, 24), "one row": (1, 128), "rows of 128": (64, 128)}


def tree(torch, nests, padding):
    from treepack.recurrent import tree_segments

    if isinstance(nests, int):
        nests = forests.random_nests(random.Random(nests), nests)
    end = torch.from_numpy(forests.layout(nests, padding).subtree_end)
    return tree_segments(type("Tree", (), {"subtree_end": end})())


def difference(got, want):
    got, want = got.detach(), want.detach().to(got.dtype)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))


def chunk_states(torch, kind, inputs, walk, scale):
    """The chunk form in float64, chunk by chunk: (out, values, states before, states after, what the walk reads), so
    that autograd has the gradient of each."""
    k, v, g, q = (inputs[name] for name in ("k", "v", "g", "q"))
    group = v.shape[1] // k.shape[1]
    k, q = (x.repeat_interleave(group, 1) for x in (k, q))
    out, values, before, after, ends = {}, {}, [], [], {}
    reads = {name: torch.zeros_like(x) for name, x in (("w", k), ("u", v), ("g", g), ("kg", k), ("qg", k))}
    starts = {}
    for first, last, fork, _ in walk.paths.tolist():
        state = starts[fork] if fork >= 0 else torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=v.dtype)
        for a, n, end, _ in walk.chunks[first:last].tolist():
            rows = slice(a, a + n)
            cumulated = g[rows].cumsum(0)
            gate = cumulated if kind == "kda" else cumulated[..., None]
            kr, qr = k[rows] * gate.exp(), q[rows] * gate.exp()
            kept = k[rows] * (gate[-1:] - gate).exp()
            lower = torch.ones(n, n, dtype=torch.bool).tril(-1)
            # between two rows of the chunk: (row, other, head)
            decay = (gate[:, None] - gate[None, :]).exp()
            kk = torch.einsum("ihk,jhk,ijhk->ijh", k[rows], k[rows], decay.expand(n, n, *k.shape[1:]))
            qk = torch.einsum("ihk,jhk,ijhk->ijh", q[rows], k[rows], decay.expand(n, n, *k.shape[1:]))
            qk = qk.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril()[..., None], 0.0)
            u, w = v[rows], torch.zeros_like(kr)
            if kind != "linear":
                beta = inputs["beta"][rows]
                solve = torch.eye(n, dtype=v.dtype) + (beta[:, None] * kk).masked_fill(~lower[..., None], 0.0).movedim(
                    2, 0
                )
                right = torch.cat([beta[..., None] * v[rows], beta[..., None] * kr], 2).movedim(1, 0)
                both = torch.linalg.solve_triangular(solve, right, upper=False).movedim(0, 1)
                u, w = both[..., : v.shape[2]], both[..., v.shape[2] :]
            before.append(state)
            new = u - torch.einsum("ihk,hkv->ihv", w, state)
            new.requires_grad and new.retain_grad()
            values[a] = new
            out[a] = scale * (torch.einsum("ihk,hkv->ihv", qr, state) + torch.einsum("ijh,jhv->ihv", qk, new))
            state = state * gate[-1].exp()[..., None]  # (h, 1, 1) or (h, k, 1)
            state = state + torch.einsum("ihk,ihv->hkv", kept, new)
            state.requires_grad and state.retain_grad()
            after.append(state)
            if end >= 0:
                starts[end] = state
            reads["w"][rows], reads["u"][rows], reads["g"][rows] = w.detach(), u.detach(), cumulated.detach()
            reads["kg"][rows], reads["qg"][rows] = kept.detach(), qr.detach()
            ends[a] = (qk.detach(), slice(a, a + n))
    return out, values, before, after, reads, ends


def walked(torch, kind, nests, padding, heads, value_heads, size, value_size, chunk):
    from treepack.recurrent import reference
    from treepack.recurrent.plan import walk as walk_of
    from treepack.recurrent.triton import launch

    segments = tree(torch, nests, padding)
    inputs = alone.random_inputs(kind, segments.tokens, 0, heads, value_heads, size, value_size)
    walk, scale = walk_of(segments, chunk), 0.3
    out, values, before, after, reads, ends = chunk_states(torch, kind, inputs, walk, scale)
    options = {"scale": scale} if kind == "linear" else {"scale": scale, "qk_l2norm": False}
    name = {"delta": "tree_gated_delta_rule", "kda": "tree_kda", "linear": "tree_linear_attention"}[kind]
    want = getattr(reference, name)(**inputs, tree=segments, **options)
    n = sum(len(x) for x in out.values())
    flat = torch.cat([out[a] for a in sorted(out)])
    found = {"the chunk form itself": difference(flat, want[:n])}

    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    (flat * dout[:n]).sum().backward()
    within = torch.zeros_like(dout)
    for qk, rows in ends.values():
        within[rows] = scale * torch.einsum("ijh,ihv->jhv", qk, dout[rows])
    single = {name: x[None].float() for name, x in reads.items()}
    single["g"] = single["g"] / 0.6931471805599453
    k, q = (inputs[x].detach()[None].float() for x in "kq")
    gates = (single["g"], None)
    if kind == "kda":
        k, q, gates = single["kg"], single["qg"], (None, single["g"])
    w = None if kind == "linear" else single["w"]
    states, corrected = launch.walk_forward(k, single["u"], w, *gates, walk, torch.float32)
    dstates, dvalues = launch.walk_backward(
        q, k, w, dout[None].float(), within[None].float(), *gates, scale, walk, torch.float32
    )
    order = sorted(values)
    found["state before"] = difference(states[0], torch.stack(before))
    found["values"] = difference(corrected[0, :n], torch.cat([values[a] for a in order]))
    dafter = torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in after])
    found["gradient of state after"] = difference(dstates[0], dafter)
    found["gradient of values"] = difference(dvalues[0, :n], torch.cat([values[a].grad for a in order]))
    return found


def convolved(torch, nests, padding, channels, width, bias, silu):
    from treepack.recurrent import conv, reference

    segments = tree(torch, nests, padding)
    inputs = alone.random_inputs("conv", segments.tokens, 0, size=channels, value_size=width, dtype=torch.float32)
    if not bias:
        inputs["bias"] = None
    leaves = [x for x in inputs.values() if x is not None]
    results = []
    for module in (conv, reference):
        y = module.tree_conv1d(**inputs, tree=segments, silu=silu)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        results.append([y, *torch.autograd.grad((y * weight).sum(), leaves)])
    names = ["y", *(f"gradient of {name}" for name, x in inputs.items() if x is not None)]
    return {name: difference(a, b) for name, a, b in zip(names, *results, strict=True)}


def normed(torch, rows, size):
    from treepack.recurrent.triton import norm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, size, generator=generator, requires_grad=True)
    dy = torch.randn(x.shape, generator=generator)
    want = x / (x.square().sum(-1, keepdim=True) + norm.EPS).sqrt()
    y, lengths = norm.l2norm(x.detach())
    (gradient,) = torch.autograd.grad(want, x, dy)
    return {"y": difference(y, want), "gradient": difference(norm.l2norm_gradient(y, lengths, dy), gradient)}


def main():
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    found = {}
    for name, (nests, padding, *sizes) in WALKS.items():
        for kind in ("delta", "kda", "linear"):
            found[f"{kind}: {name}"] = walked(torch, kind, nests, padding, *sizes)
    for name, case in CONVS.items():
        found[f"conv: {name}"] = convolved(torch, *case)
    for name, case in NORMS.items():
        found[f"norm: {name}"] = normed(torch, *case)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
