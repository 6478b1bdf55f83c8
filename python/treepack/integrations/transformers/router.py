"""The load-balancing loss of a router on packed trees: over the raw tokens, whichever trees they lie in.

router logits and position_samples of each tree -> sums over its tokens -> one loss of all trees
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RouterSums", "balance_loss", "router_aux_loss", "router_sums"]


class RouterSums(NamedTuple):
    """Sums over the raw tokens of a tree and the layers of its model."""

    chosen: Tensor
    """(E,) choices of each expert."""
    probability: Tensor
    """(E,) probability of each expert."""
    tokens: Tensor
    """Scalar: tokens times layers."""


def router_aux_loss(router_logits: tuple[Tensor, ...], tree: Any, *, num_experts: int, top_k: int) -> Tensor:
    """Load-balancing loss of the raw tokens: every position counts as often as samples pass through it.

    `num_experts * sum_e f_e P_e` (Fedus et al. 2021, Switch Transformers, eq. 4 to 6, with top-k choices as
    transformers has it): f_e the number of choices of expert e per token, P_e its mean probability, over all tokens
    and layers. Equal to transformers' own loss on the same samples in one unpacked batch.

    Args:
        router_logits: one (N, num_experts) per layer. tree: on their device.

    Returns:
        A scalar, to be multiplied by `config.router_aux_loss_coef`. 0 for a tree without samples.
    """
    return balance_loss([_sums(router_logits, tree, num_experts, top_k)])


def router_sums(model: Any, router_logits: tuple[Tensor, ...] | None, tree: Any) -> RouterSums:
    """The sums of a tree under an unwrapped model.

    Raises:
        ValueError: a model without a router, or one that does not say how many experts a token takes.
    """
    if not router_logits:
        raise ValueError(f"aux_loss=True, but {type(model).__name__} returned no router logits")
    config = model.config.get_text_config()
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if top_k is None:
        raise ValueError(f"aux_loss=True, but the config of {type(model).__name__} has no num_experts_per_tok")
    return _sums(router_logits, tree, router_logits[0].shape[-1], top_k)


def balance_loss(trees: Sequence[RouterSums]) -> Tensor:
    """The loss of all trees as one batch of their raw tokens, a scalar."""
    chosen, probability, tokens = (torch.stack(parts).sum(0) for parts in zip(*trees, strict=True))
    tokens = tokens.clamp(min=1)
    loss: Tensor = len(chosen) * (chosen / tokens * (probability / tokens)).sum()
    return loss


def _sums(router_logits: tuple[Tensor, ...], tree: Any, num_experts: int, top_k: int) -> RouterSums:
    logits = torch.cat([x.reshape(-1, num_experts) for x in router_logits])
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    # Sums in float32 at least: bfloat16 has no number between 256 and 258.
    wide = torch.promote_types(probabilities.dtype, torch.float32)
    weight = tree.position_samples.to(wide).repeat(len(router_logits))
    return RouterSums(weight @ chosen.to(wide), weight @ probabilities.to(wide), weight.sum())
