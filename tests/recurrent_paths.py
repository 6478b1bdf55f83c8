"""Layers with a state on one path alone, token by token and head by head, written so that they share nothing with
`treepack.recurrent`; and the forests that both are compared on."""

from __future__ import annotations

import random
from functools import partial

import forests
import torch

# lengths of segments in tokens: one and two, roots of length one, forks at every place, a deep chain
SHAPES = {
    "one token": [(1, [])],
    "two tokens": [(2, [])],
    "roots of one token": [(1, []), (1, []), (1, [(1, []), (1, [])])],
    "segments of one and two": [(2, [(1, [(2, []), (1, [(1, [])])]), (2, [])]), (1, [(1, []), (2, [])])],
    "a comb": [(3, [(1, []), (2, [(4, []), (2, [(1, []), (3, [(5, []), (1, [])])])])])],
    "chain": [(9, [])],
}


def drawn(count: int = 6) -> dict[str, tuple[list, int]]:
    """{name: (nests, rows of padding)}: the shapes above and `count` random forests."""
    named = {name: (nests, pad) for name, nests in SHAPES.items() for pad in (0, 3)}
    for seed in range(count):
        rng = random.Random(seed)
        nests = forests.random_nests(rng, rng.randint(2, 40), branching=rng.randint(2, 4))
        named[f"drawn {seed}"] = (nests, rng.choice([0, 0, 5]))
    return {f"{name}, padding {pad}": (nests, pad) for name, (nests, pad) in named.items()}


def random_inputs(kind: str, n: int, seed: int = 0, heads=2, value_heads=4, size=5, value_size=3, dtype=torch.float64):
    """The tensors of one operator by name, which require gradients; decays between 0.3 and 1."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=dtype)
    uniform = partial(torch.rand, generator=generator, dtype=dtype)
    if kind == "conv":
        inputs = {"x": normal(n, size), "weight": normal(size, value_size), "bias": normal(size)}
    elif kind == "mamba2":
        inputs = {
            "x": normal(n, value_heads, value_size),
            "dt": normal(n, value_heads),
            "A": -0.1 - uniform(value_heads),
            "B": normal(n, heads, size),
            "C": normal(n, heads, size),
            "D": normal(value_heads),
            "dt_bias": normal(value_heads),
        }
    else:
        inputs = {
            "q": normal(n, heads, size),
            "k": normal(n, heads, size) / size**0.5,
            "v": normal(n, value_heads, value_size),
            "g": -1.2 * uniform(n, value_heads, *([size] if kind == "kda" else [])),
            "beta": uniform(n, value_heads),
        }
        if kind == "linear":
            del inputs["beta"]
    return {name: x.requires_grad_() for name, x in inputs.items()}


def conv_alone(x, weight, bias=None, activation=None):
    width = weight.shape[1]
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[0]) if bias is None else bias
        for j in range(min(width, t + 1)):
            y = y + weight[:, width - 1 - j] * x[t - j]
        rows.append(y / (1 + torch.exp(-y)) if activation else y)
    return torch.stack(rows)


def scan_alone(q, k, v, g, beta=None, scale=None, qk_l2norm=False):
    """The delta rule, or plain linear attention without beta; g (L, HV) or (L, HV, K)."""
    scale = k.shape[2] ** -0.5 if scale is None else scale
    group = v.shape[1] // k.shape[1]
    heads = []
    for h in range(v.shape[1]):
        state = torch.zeros(k.shape[2], v.shape[2], dtype=v.dtype)
        rows = []
        for t in range(len(q)):
            key, query = k[t, h // group], q[t, h // group]
            if qk_l2norm:
                key, query = (y / torch.sqrt(y @ y + 1e-6) for y in (key, query))
            decay = torch.exp(g[t, h])
            state = state * (decay[:, None] if decay.dim() else decay)
            added = v[t, h] if beta is None else beta[t, h] * (v[t, h] - key @ state)
            state = state + torch.outer(key, added)
            rows.append(scale * (query @ state))
        heads.append(torch.stack(rows))
    return torch.stack(heads, dim=1)


def mamba2_alone(x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, dt_limit=None):
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.log1p(torch.exp(dt)) if dt_softplus else dt
    if dt_limit is not None:
        dt = dt.where(dt > dt_limit[0], dt_limit[0])
        dt = dt.where(dt < dt_limit[1], dt_limit[1])
    y = scan_alone(C, B, dt[..., None] * x, dt * A, scale=1.0)
    return y if D is None else y + x * (D if D.dim() == 2 else D[:, None])
