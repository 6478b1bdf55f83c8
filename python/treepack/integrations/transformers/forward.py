"""A packed tree through a Hugging Face model: its inputs and its hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention import TRITON, TreeTiles
from ...distributed.shard import Form, TreeShard
from ...recurrent.metadata import share_segments, tree_segments
from .capture import Capture, tie
from .checks.leaks import check_leaks
from .checks.model import check_model
from .checks.tree import check_ids, check_tree
from .mixers import has_mixers, install_loaded
from .model import call_inputs, decoder_of, meeting_layers, unwrap
from .shards import check_shard, shard_of

__all__ = ["check_ran", "forward_inputs", "forward_tree", "hidden_alone", "model_inputs"]


def model_inputs(
    tree: Any,
    *,
    model: Any = None,
    impl: str | None = None,
    model_check: bool = True,
    mesh: Any = None,
    shard: Form | None = None,
) -> dict[str, Any]:
    """The keyword arguments with which a Hugging Face model runs a packed tree.

    Args:
        tree: a `PackedTree` on the device of the model (`tree.to(device)`).
        model: the model, to have it checked (`check_model`, and at its first use two tiny samples packed and alone) and
            to make what its layers share before the first one runs; its wrappers may be around it.
        impl: implementation of `tree_attention`; None: "triton" on CUDA, "reference" elsewhere.
        model_check: False leaves out the two tiny samples; so does `TREEPACK_MODEL_CHECK=0`.
        mesh, shard: one tree over the ranks of a mesh dimension, as in `term_log_probs`; the inputs are those of the
            rows of this rank. `treepack.distributed.TreeShard` says which terms belong to them.

    Returns:
        `input_ids`, `position_ids` (1, N), `subtree_end` (N,), `tree_tiles`, `impl`, `use_cache` (False) and
        `attention_mask` (1, 1, 1, 0), "no mask"; with a mesh also `tree_hook`, what attention exchanges.

    Raises:
        TypeError: not one tree, or one on the host as NumPy arrays.
        ValueError: a model that `check_model` refuses, or that leaks between samples; what `term_log_probs` refuses of
            a mesh.
    """
    part = shard_of(tree, mesh, shard)
    inner = None if model is None else check_model(model)
    if part is not None and inner is not None:
        check_shard(model, inner, part, impl)
    inputs = _inputs(tree, impl, inner, part)
    if inner is not None and model_check:
        check_leaks(model, inner, tree)
    return inputs


def _inputs(tree: Any, impl: str | None, model: Any, part: TreeShard | None = None) -> dict[str, Any]:
    """`model_inputs` for a model that was checked and is without its wrappers, or None; `part`: what of the tree this
    rank runs."""
    end = getattr(tree, "subtree_end", None)
    if end is None:
        many = f" of {len(tree)}: loop over it" if isinstance(tree, Sequence) else ""
        raise TypeError(f"one PackedTree is needed, not a {type(tree).__name__}{many}")
    if not isinstance(end, Tensor):
        raise TypeError("the tree holds NumPy arrays: move it to the model's device first, tree.to(device)")
    has_states = install_loaded()
    tiles = TreeTiles(end, tree.position_ids, getattr(tree, "tiles", None)) if part is None else part.tiles
    config = None
    if model is not None:
        config = model.config.get_text_config()
        check_tree(model, tree)
        tiles.row_checked = True
        if has_states and has_mixers(decoder_of(model)):
            share_segments(tiles, tree_segments(tree))
    whole = part is None or part.form == "heads"
    if whole and end.is_cuda and impl in (None, *TRITON):
        from ...attention.rule import on_hopper

        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        known = None
        if isinstance(heads, int) and isinstance(kv_heads, int) and torch.is_grad_enabled():
            ranks = 1 if part is None else part.wire.size
            known = heads // ranks, max(kv_heads // ranks, 1)
        hopper = impl != "triton_plain" and on_hopper(end)
        for window in {0, getattr(config, "sliding_window", None) or 0}:
            tiles.prepare(window, training=True, hopper=hopper, heads=known)
    if part is None:
        return call_inputs(tree.input_ids, tree.position_ids, tiles, impl)
    return call_inputs(part.rows.input_ids, part.rows.position_ids, tiles, impl) | {"tree_hook": part.hook}


def forward_tree(
    model: Any,
    tree: Any,
    *,
    impl: str | None = None,
    router_logits: bool | None = False,
    own_head: bool = False,
    model_check: bool = True,
    part: TreeShard | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """(hidden states (N, h) after the final norm, router logits of each MoE layer or None) of a packed tree.

    The model is called as a whole, wrappers included (DDP, torch.compile, PEFT), with the logits of one position only;
    the hidden states are read by a hook on its base model. With `own_head` the model's LM head may be anything.
    Without `model_check` the first use is not checked on two tiny samples.

    Args:
        router_logits: whether they are returned. False refuses a model whose config asks for its router's loss, which
            would be lost; None makes none, whatever the config says.
        part: what of the tree this rank runs; the hidden states are then of its rows.

    Raises:
        ValueError: a model that `check_model` refuses, one that leaks between samples or whose attention layers did not
            all run through treepack, or one that cannot leave out logits.
    """
    inner = check_model(model, weighted=router_logits is not False)
    if part is not None:
        check_shard(model, inner, part, impl)
    inputs = _inputs(tree, impl, inner, part)
    check_ids(inner, tree)
    if model_check:
        check_leaks(model, inner, tree)
    return forward_inputs(model, inner, inputs, router_logits=router_logits, own_head=own_head)


def forward_inputs(
    model: Any, inner: Any, inputs: dict[str, Any], *, router_logits: bool | None = False, own_head: bool = False
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """`forward_tree` for inputs that are made and a model that is checked; `inner`: it, without its wrappers."""
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        raise ValueError(
            f"{type(inner).__name__}.forward has no logits_to_keep, so it would make the logits of all positions; "
            "compute the hidden states yourself and call treepack.logprobs.head_log_probs"
        )
    capture = Capture.attach(inner)
    config = inner.config.get_text_config()
    asked = getattr(config, "output_router_logits", False)
    if router_logits or (router_logits is None and asked):
        inputs |= {"output_router_logits": bool(router_logits), "weighted_aux_loss": True}
    if router_logits or asked:
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
        check_ran(inner, inputs["tree_tiles"], compiled=model)
        if not own_head:
            capture.verify(inner, hidden[:, -1], out.logits[:, -1])
    # Nothing is tied where nothing gathers gradients: the head's gradient of a single row is as large as the head.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (tie(hidden, out.logits) if distributed else hidden)[0], logits


def check_ran(inner: Any, tiles: TreeTiles, *, compiled: Any = None) -> None:
    """ValueError where some layers of an unwrapped model did not run on the tree. `compiled`: the model with its
    wrappers, where it may be compiled and so have counted none of them."""
    ran, wanted = tiles.layers, meeting_layers(inner)
    if ran < wanted and not (ran == 0 and compiled is not None and Capture.compiled(compiled)):
        raise ValueError(
            f"{type(inner).__name__}: {ran} of {wanted} layers in which tokens meet (attention, or a state) ran on the "
            "tree; the others compute their own and would leak between samples"
        )


def hidden_alone(model: Any, input_ids: Tensor) -> Tensor:
    """Hidden states (L, h) of one unpacked sample (L,) under whatever attention the model is set to."""
    capture = Capture.attach(unwrap(model))
    with capture:
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
        return capture.take()[0][0]
