"""The functions of transformers in which tokens meet outside of attention, on a packed tree: the convolution and the
scans, with the arguments that its models call them with.

Each gets the tree, then what the model calls it with, the keyword arguments of `model(...)` among it. The fallbacks of
transformers compute in float32 whatever the dtype; these compute as `treepack.recurrent` does, float64 in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention import TreeTiles
from ...recurrent import tree_conv1d, tree_gated_delta_rule, tree_kda, tree_mamba2

__all__ = ["conv1d", "fused_mamba2", "gated_delta_rule", "kda", "mamba2"]

_ROWS = "a packed tree is one row of its own; do not pass it"
# Arguments that would make other sequences of the row than the tree's, or go on from the state of an earlier call.
_UNSUPPORTED = {
    "seq_idx": f"sequences of a row by number: {_ROWS}",
    "cu_seqlens": f"sequences of a row by their ends: {_ROWS}",
    "cu_seq_lens_q": f"sequences of a row by their ends: {_ROWS}",
    "cu_seq_lens_k": f"sequences of a row by their ends: {_ROWS}",
    "initial_state": "a state of an earlier call: a packed tree is one pass from its roots; pass use_cache=False",
    "initial_states": "a state of an earlier call: a packed tree is one pass from its roots; pass use_cache=False",
    "z": "a gate within the scan, which is not known here",
}


def conv1d(
    tiles: TreeTiles,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_fn`: hidden_states (1, C, N), weight (C, W), bias (C,)."""
    _check(tiles, "the convolution", hidden_states.shape[-1], kwargs)
    with _as_they_are(hidden_states):
        out = tree_conv1d(
            hidden_states.transpose(1, 2), weight, bias, tree=tiles, activation=activation, impl=_impl(kwargs)
        )
    if not torch.compiler.is_compiling():
        tiles.layers += 1  # every layer with a state has one convolution
    return out.transpose(1, 2)


def gated_delta_rule(
    tiles: TreeTiles, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """`chunk_gated_delta_rule`: query and key (1, N, H, K), value (1, N, H_v, V), g and beta (1, N, H_v)."""
    return _delta(tree_gated_delta_rule, "the gated delta rule", tiles, query, key, value, g, beta, kwargs)


def kda(
    tiles: TreeTiles, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """`chunk_kda`: the same with a decay for each channel, g (1, N, H_v, K)."""
    return _delta(tree_kda, "Kimi delta attention", tiles, query, key, value, g, beta, kwargs)


def _delta(
    scan: Callable[..., Tensor],
    what: str,
    tiles: TreeTiles,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    _check(tiles, what, query.shape[1], kwargs)
    l2norm = kwargs.get("use_qk_l2norm_in_kernel", False)
    with _as_they_are(query):
        return scan(query, key, value, g, beta, tree=tiles, qk_l2norm=l2norm, impl=_impl(kwargs)), None


def mamba2(
    tiles: TreeTiles,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    """`mamba_chunk_scan_combined`: hidden_states (1, N, H, P), dt (1, N, H), A (H,), B and C (1, N, G, S)."""
    _check(tiles, "the scan of Mamba-2", hidden_states.shape[1], kwargs)
    more: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    with _as_they_are(hidden_states):
        return tree_mamba2(hidden_states, dt, A, B, C, tree=tiles, impl=_impl(kwargs), **more)


def fused_mamba2(*_: Any, **__: Any) -> None:
    """`mamba_split_conv1d_scan_combined`, the whole layer in one kernel: None, at which the layer calls the convolution
    and the scan one by one."""


def _check(tiles: TreeTiles, what: str, tokens: int, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for an argument that a tree has no place for, or a length that is not the tree's."""
    for given, meaning in _UNSUPPORTED.items():
        if kwargs.get(given) is not None:
            raise ValueError(f"{what} of a layer got {given} beside a packed tree, {meaning}")
    if kwargs.get("output_final_state") or kwargs.get("return_final_states"):
        raise ValueError(f"{what} of a layer runs with a cache: a packed tree is one pass; pass use_cache=False")
    if tokens != len(tiles.subtree_end):
        raise ValueError(
            f"{what} of a layer got {tokens} tokens, the packed tree has {len(tiles.subtree_end)}: it was made for "
            "another packed tree, or the model runs with a cache (pass use_cache=False)"
        )


def _as_they_are(x: Tensor) -> Any:
    """No autocast: states stay float32, which its matrix products would make bfloat16."""
    return torch.autocast(x.device.type, enabled=False)


def _impl(kwargs: dict[str, Any]) -> str | None:
    """The implementation for an `impl` that names one of attention: "reference" is the reference here too, kernels are
    the kernels of the device."""
    return "reference" if kwargs.get("impl") == "reference" else None
