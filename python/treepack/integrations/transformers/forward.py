"""A packed tree through a Hugging Face model: its inputs, its hidden states, its router's loss."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention import TRITON, TreeTiles
from .capture import Capture, tie
from .checks.model import check_model
from .checks.tree import check_ids, check_tree
from .model import attention_layers, unwrap

__all__ = ["forward_tree", "hidden_alone", "model_inputs", "router_aux_loss"]


def model_inputs(tree: Any, *, model: Any = None, impl: str | None = None) -> dict[str, Any]:
    """The keyword arguments with which a Hugging Face model runs a packed tree.

    Args:
        tree: a `PackedTree` on the device of the model (`tree.to(device)`).
        model: the model, to have it checked (`check_model`) and to make what its layers share before the first one
            runs; its wrappers may be around it.
        impl: implementation of `tree_attention`; None: "triton" on CUDA, "reference" elsewhere.

    Returns:
        `input_ids`, `position_ids` (1, N), `subtree_end` (N,), `tree_tiles`, `impl`, `use_cache` (False) and
        `attention_mask`: (1, 1, 1, 0), "no mask". A 4-D mask is handed to the layers as it is, while with none
        transformers would look for packed sequences in `position_ids`, and wait for the device to do so.

    Raises:
        TypeError: not one tree, or one on the host as NumPy arrays.
        ValueError: a model that `check_model` refuses.
    """
    return _inputs(tree, impl, None if model is None else check_model(model))


def _inputs(tree: Any, impl: str | None, model: Any) -> dict[str, Any]:
    """`model_inputs` for a model that was checked and is without its wrappers, or None."""
    end = getattr(tree, "subtree_end", None)
    if end is None:
        many = f" of {len(tree)}: loop over it" if isinstance(tree, Sequence) else ""
        raise TypeError(f"one PackedTree is needed, not a {type(tree).__name__}{many}")
    if not isinstance(end, Tensor):
        raise TypeError("the tree holds NumPy arrays: move it to the model's device first, tree.to(device)")
    tiles = TreeTiles(end, tree.position_ids, getattr(tree, "tiles", None))
    config = None
    if model is not None:
        config = model.config.get_text_config()
        check_tree(model, tree)
        tiles.row_checked = True
    if end.is_cuda and impl in (None, *TRITON):
        from ...attention.rule import on_hopper

        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        known = None
        if isinstance(heads, int) and isinstance(kv_heads, int) and torch.is_grad_enabled():
            known = heads, kv_heads
        hopper = impl != "triton_plain" and on_hopper(end)
        for window in {0, getattr(config, "sliding_window", None) or 0}:
            tiles.prepare(window, training=True, hopper=hopper, heads=known)
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "attention_mask": torch.empty(1, 1, 1, 0, device=end.device),
        "subtree_end": end,
        "tree_tiles": tiles,
        "impl": impl,
        "use_cache": False,
    }


def forward_tree(
    model: Any, tree: Any, *, impl: str | None = None, router_logits: bool = False, own_head: bool = False
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """(hidden states (N, h) after the final norm, router logits of each MoE layer or None) of a packed tree.

    The model is called as a whole, wrappers included (DDP, torch.compile, PEFT), with the logits of one position only;
    the hidden states are read by a hook on its base model. With `own_head` the model's LM head may be anything.

    Raises:
        ValueError: a model that `check_model` refuses, one whose attention layers did not all run through treepack, or
            one that cannot leave out logits.
    """
    inner = check_model(model, weighted=router_logits)
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        raise ValueError(
            f"{type(inner).__name__}.forward has no logits_to_keep, so it would make the logits of all positions; "
            "compute the hidden states yourself and call treepack.logprobs.head_log_probs"
        )
    capture = Capture.of(inner)
    config = inner.config.get_text_config()
    inputs = _inputs(tree, impl, inner)
    check_ids(inner, tree)
    if router_logits:
        inputs |= {"output_router_logits": True, "weighted_aux_loss": True}
    if router_logits or getattr(config, "output_router_logits", False):
        del inputs["attention_mask"]  # the model's own router loss, which is not used, would take it for a padding mask
    with capture:
        out = model(**inputs, logits_to_keep=1)
        if capture.hidden is None:
            raise ValueError(
                f"{type(inner).__name__}: the base model's output was not seen. A model compiled and run before its "
                "first term_log_probs has its hooks compiled out: call torch.compiler.reset() once after this"
            )
        hidden, logits = capture.take()
    if not capture.verified:
        ran, wanted = inputs["tree_tiles"].layers, attention_layers(inner)
        if ran < wanted and not (ran == 0 and capture.compiled(model)):
            raise ValueError(
                f"{type(inner).__name__}: {ran} of {wanted} attention layers ran tree attention; the others compute "
                "their own and would leak between samples"
            )
        if not own_head:
            capture.verify(inner, hidden[:, -1], out.logits[:, -1])
    # Nothing is tied where nothing gathers gradients: the head's gradient of a single row is as large as the head.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (tie(hidden, out.logits) if distributed else hidden)[0], logits


def hidden_alone(model: Any, input_ids: Tensor) -> Tensor:
    """Hidden states (L, h) of one unpacked sample (L,) under whatever attention the model is set to."""
    capture = Capture.of(unwrap(model))
    with capture:
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
        return capture.take()[0][0]


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
    logits = torch.cat([x.reshape(-1, num_experts) for x in router_logits])
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    weight = tree.position_samples.to(probabilities.dtype).repeat(len(router_logits))
    total = weight.sum().clamp(min=1)
    loss: Tensor = num_experts * ((weight @ chosen) / total * ((weight @ probabilities) / total)).sum()
    return loss
