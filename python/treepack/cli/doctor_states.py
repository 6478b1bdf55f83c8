"""What `treepack doctor` says of layers that carry a state (`treepack.recurrent`): facts, no printing."""

from __future__ import annotations

from typing import Any

from ..readers.source import first_line
from ..tree.tree import PackedTree

#: Largest relative error (Frobenius) of an output or gradient of the reference, in float64.
TOLERANCE = 1e-10

_RUNS = {
    "triton": "the default on a GPU; its first call compiles for minutes",
    "levels": "slower, one call for each level of the tree; its first call compiles for minutes",
    "reference": "plain torch, anywhere; one step for each token of the longest path",
}


def scans(torch: Any) -> list[tuple[str, bool, str]]:
    """(impl, whether it can run here, why or why not) of the scans, by what they need: their first calls are slow."""
    from ..recurrent.rule import IMPLEMENTATIONS, scan

    found = []
    for impl in IMPLEMENTATIONS:
        gpu = torch.cuda.is_available() and impl != "reference"
        x = torch.zeros(8, 1, 64, dtype=torch.bfloat16, device="cuda" if gpu else "cpu", requires_grad=True)
        try:
            scan(impl, x)
            found.append((impl, True, _RUNS[impl]))
        except Exception as error:  # the reason is what is asked for
            no_gpu = impl != "reference" and not gpu
            found.append((impl, False, "it needs a GPU, and torch finds none here" if no_gpu else first_line(error)))
    return found


def check_states(torch: Any, tree: PackedTree) -> str:
    """A convolution and a gated delta rule after it on a tree, with all gradients, against each sample alone.

    Raises:
        ValueError: they are not those of each sample alone.
    """
    random = torch.Generator().manual_seed(0)
    shapes = [(tree.num_tokens, 12), (12, 4), (tree.num_tokens, 2), (tree.num_tokens, 2)]
    leaves = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    weight = torch.randn(tree.num_tokens, 2, 2, generator=random, dtype=torch.float64)
    through = torch.from_numpy(tree.position_samples.copy()).double()[:, None, None]
    packed = [leaf.clone().requires_grad_() for leaf in leaves]
    got = _layer(tree.to("cpu"), *packed)
    torch.autograd.backward(got, weight * (through > 0))

    alone = [leaf.clone().requires_grad_() for leaf in leaves]
    expected, sums = torch.zeros_like(got), torch.zeros((), dtype=torch.float64)
    for path in map(torch.from_numpy, tree.path_index()):
        path = path.long()
        x, kernel, g, beta = alone
        out = _alone(torch, x[path], kernel, g[path], beta[path])
        expected[path] = out.detach()
        sums = sums + (out * (weight / through)[path]).sum()
    torch.autograd.backward(sums)
    pairs = [(got.detach(), expected), *((a.grad, b.grad) for a, b in zip(packed, alone, strict=True))]
    error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    if not error <= TOLERANCE:  # NaN fails
        raise ValueError(f"largest relative error {error:.1e}, allowed is {TOLERANCE:.0e}")
    return f"convolution and scan, output and gradients as of each sample alone: relative error {error:.1e}"


def _layer(tree: Any, x: Any, kernel: Any, g: Any, beta: Any) -> Any:
    from ..recurrent import tree_conv1d, tree_gated_delta_rule

    q, k, v = tree_conv1d(x, kernel, tree=tree, activation="silu").view(len(x), 3, 2, 2).unbind(1)
    return tree_gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), tree=tree, qk_l2norm=True)


def _alone(torch: Any, x: Any, kernel: Any, g: Any, beta: Any) -> Any:
    """The same of one sample by the equations of the layer, token by token."""
    width = kernel.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    x = torch.nn.functional.silu((padded.unfold(0, width, 1) * kernel).sum(-1))
    q, k, v = x.view(len(x), 3, 2, 2).unbind(1)
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    state, out = q.new_zeros(2, 2, 2), []
    for t in range(len(x)):
        state = state * (-g[t].exp()).exp()[:, None, None]
        change = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        out.append(torch.einsum("hk,hkv->hv", q[t] * 2**-0.5, state))
    return torch.stack(out)
