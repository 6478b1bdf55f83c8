"""For `test_hopper_interpreted.py`: the Hopper kernels in `gluon_interpreter`, against the reference in float64. Prints
one line of JSON: {case: the largest error of each result, relative to its largest value}."""

from __future__ import annotations

import json
import random
import sys

import forests
import gluon_interpreter
import torch

gluon_interpreter.install()

from treepack.attention import operator, reference, rule, tree_tiles  # noqa: E402

TREES = {
    "one token": lambda: forests.layout([(1, [])]),
    "agent": lambda: forests.layout([(280, [(150, []), (40, []), (200, [(30, []), (90, [])])])], padding=30),
    "drawn": lambda: forests.layout(forests.random_nests(random.Random(5), 500), padding=7),
    "chain": lambda: forests.layout(forests.chain(650)),
}


def errors(tree, size, heads, kv_heads, window=0, softcap=0.0, sinks=False, dlse=True, split=None, above=0, programs=3,
           value_size=None, apart=False):  # fmt: skip
    """Of out, lse, dq, dk and dv, relative to the largest value of each. `apart`: v is a part of a wider projection."""
    operator.split_heads_override = split
    operator._processors = lambda x: programs
    end = torch.from_numpy(TREES[tree]().subtree_end)
    n = len(end)
    g = torch.Generator().manual_seed(0)
    value_size = value_size or size

    def draw(rows, count, size):
        return torch.randn(rows, count, size, generator=g, dtype=torch.float64)

    q, k, v = draw(n - above, heads, size), draw(n, kv_heads, size), draw(n, kv_heads, value_size)
    if apart:
        v = torch.cat([draw(n, kv_heads, 64), v], 2)[:, :, 64:]
    dout = draw(n - above, heads, value_size)
    upstream = torch.randn(heads, n, generator=g, dtype=torch.float64) if dlse else None
    sink = torch.linspace(-1, 1, heads, dtype=torch.float64) if sinks else None
    tiles = tree_tiles(end)
    tiles = tiles.last_rows(n - above) if above else tiles
    metadata = tiles.prepare(window, training=True, hopper=True, heads=(heads, kv_heads))
    numbers = (0.3, window, softcap, rule.GLUON)
    out, lse = operator.forward_pass(q, k, v, sink, end, *metadata, *numbers)
    scaled = None if upstream is None else upstream * operator.LN2
    found = operator.backward_pass(dout, scaled, q, k, v, out, lse, end, *metadata, *numbers)
    ours = [out, lse.double()[:, above:] * operator.LN2, *found[:3]]

    # All rows as queries, of which those before `above` give no loss.
    before = torch.zeros(above, heads, size, dtype=torch.float64)
    none = torch.zeros(above, heads, value_size, dtype=torch.float64)
    if upstream is not None:
        upstream = upstream.clone()
        upstream[:, :above] = 0
    want = reference.both_passes(
        torch.cat([before, q]), k, v, end, torch.cat([none, dout]), upstream, scale=0.3,
        sliding_window=window or None, softcap=softcap or None, sinks=sink)  # fmt: skip
    want = [want[0][above:], want[1][:, above:], want[2][above:], *want[3:]]
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(ours, want, strict=True)]


def main() -> None:
    cases = json.loads(sys.argv[1])
    print(json.dumps([errors(**case) for case in cases]))


if __name__ == "__main__":
    main()
