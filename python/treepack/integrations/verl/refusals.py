"""Settings of verl that do not run on packed trees: refused by the name of the setting."""

from __future__ import annotations

from typing import Any

from ..._pages import page
from ...distributed.foreign import OURS

__all__ = ["refuse_batch", "refuse_engine"]


def refuse_engine(model_config: Any, engine_config: Any) -> None:
    """ValueError for a setting of the model or of its engine.

    Args:
        model_config: verl's `HFModelConfig`. engine_config: its `FSDPEngineConfig`.
    """
    if engine_config.ulysses_sequence_parallel_size > 1:
        raise _refused(
            f"ulysses_sequence_parallel_size is {engine_config.ulysses_sequence_parallel_size}: it cuts rows by "
            f"position over ranks and does not know the tree in them; allowed is 1. In a loop of your own {OURS}"
        )
    if model_config.use_fused_kernels or engine_config.use_fused_kernels:
        raise _refused(
            "use_fused_kernels is on: they take the place of the LM head, which here runs on the rows of the tree and "
            "makes no logits of all positions either; set model.use_fused_kernels=False"
        )
    if getattr(model_config.hf_config, "vision_config", None) is not None:
        raise _refused(f"{model_config.hf_config.model_type} takes images, which are no part of a tree of tokens")
    from verl.models.transformers import monkey_patch

    if getattr(monkey_patch, "_PREFIX_GROUPER_PATCHED", False):
        raise _refused(_GROUPER)


def refuse_batch(data: Any, loss_function: Any) -> None:
    """ValueError for what a mini-batch or its loss asks for.

    Args:
        data: verl's TensorDict. loss_function: a partial of one of its losses, or None.
    """
    from verl.utils import tensordict_utils as tu

    def asked(name: str) -> bool:
        return bool(tu.get_non_tensor_data(data=data, key=name, default=False))

    if asked("use_fused_kernels"):
        raise _refused("use_fused_kernels is on in the batch; set model.use_fused_kernels=False")
    if asked("distillation_use_topk"):
        raise _refused("distillation over the top-k logits needs the logits of all positions; use a loss of log-probs")
    if asked("calculate_sum_pi_squared"):
        raise _refused("calculate_sum_pi_squared needs the logits of all positions; set it to False")
    if (together := tu.get_non_tensor_data(data=data, key="force_group_size", default=1)) != 1:
        raise _refused(f"force_group_size is {together}: losses over pairs want both in one micro-batch; allowed is 1")
    images = data.get("multi_modal_inputs", None)
    if images is not None and any(_unwrapped(one) for one in images):
        raise _refused("the batch has multi_modal_inputs (images, audio), which are no part of a tree of tokens")
    if (position_ids := data.get("position_ids", None)) is not None and position_ids.dim() == 3:
        raise _refused("position_ids have several axes, as models with images want them; here they are one per token")
    keywords = getattr(loss_function, "keywords", None) or {}
    if getattr(keywords.get("config"), "use_prefix_grouper", False):
        raise _refused(_GROUPER)


_GROUPER = (
    "use_prefix_grouper is on: it is another way to share prompts, by masks of its own; set "
    "actor_rollout_ref.actor.use_prefix_grouper=False"
)


def _unwrapped(value: Any) -> Any:
    return getattr(value, "data", value)


def _refused(why: str) -> ValueError:
    return ValueError(f"treepack under verl: {why} ({page('migrating-verl')})")
