"""What the ranks of `verl_worker.py` share: engines of verl on the CPU, batches as its workers get them, steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

VOCABULARY = 64
BUDGET = 160
TEMPERATURE = 0.7

# ------------------------------------------------------------------------------------------------------------ engines


def model_config(folder: Path, family: str, kind: str = "language_model", **more: Any) -> Any:
    from verl.workers.config import HFModelConfig

    options = {"use_remove_padding": False, "enable_gradient_checkpointing": False} | more
    return HFModelConfig(
        path=str(folder / family),
        load_tokenizer=False,
        model_type=kind,
        external_lib="treepack.integrations.verl",
        override_config={"attn_implementation": "eager"},
        **options,
    )


def engine_config(strategy: str, precision: str = "fp32", **more: Any) -> Any:
    from verl.workers.config import FSDPEngineConfig

    full = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return FSDPEngineConfig(strategy=strategy, mixed_precision=full, use_torch_compile=False, **more)


def engine(cls: Any, model: Any, config: Any) -> Any:
    """An engine of verl, ready. SGD: Adam would take the sign of a gradient that rounding makes."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig

    made = cls(
        model_config=model,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=0.01, optimizer="SGD", weight_decay=0.0, total_training_steps=4),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def both(
    folder: Path, family: str, strategy: str, *, kind: str = "language_model", precision: str = "fp32", **more: Any
) -> tuple[Any, Any]:
    """(verl's own engine, the one that verl finds for the same settings)"""
    import verl.workers.engine.fsdp.transformer_impl as own
    from verl.workers.engine import EngineRegistry

    theirs = own.FSDPEngineWithLMHead if kind == "language_model" else own.FSDPEngineWithValueHead
    models = [model_config(folder, family, kind, **more) for _ in range(2)]  # which load the external module
    return (
        engine(theirs, models[0], engine_config(strategy, precision)),
        engine(EngineRegistry.get_engine_cls(kind, strategy), models[1], engine_config(strategy, precision)),
    )


# ---------------------------------------------------------------------------------------------------------------- data


def samples_of(rollouts: str, rank: int, world: int, each: int = 8) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of real rollouts, cut short and taken into a small vocabulary: ragged, in groups of 4. The last
    rank has more tokens than the others, and so more trees."""
    with np.load(rollouts, allow_pickle=True) as file:
        tokens, offsets = file["tokens"].astype(np.int64) % VOCABULARY, file["offsets"]
        mask, groups = file["completion_mask"], file["group_id"]
    out = []
    for group in np.unique(groups)[rank * (each // 4) : (rank + 1) * (each // 4)]:
        for at in np.flatnonzero(groups == group)[:4].tolist():
            ids, trained = tokens[offsets[at] : offsets[at + 1]], mask[offsets[at] : offsets[at + 1]]
            start = int(trained.argmax())
            length = 6 + (at * 7) % 23 + (40 if rank == world - 1 else 0)
            out.append((ids[max(0, start - 30) : start].tolist(), ids[start : start + length].tolist()))
    return out


def batch_of(samples: list[tuple[list[int], list[int]]], seed: int, **options: Any) -> Any:
    """What verl's workers get: its own way from padded tensors to jagged ones."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(seed)
    size, prompt = len(samples), max(len(p) for p, _ in samples)
    answer = max(len(a) for _, a in samples)
    ids = torch.zeros(size, prompt + answer, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (before, after) in enumerate(samples):
        ids[i, prompt - len(before) : prompt + len(after)] = torch.tensor(before + after)
        mask[i, prompt - len(before) : prompt + len(after)] = 1
    response_mask = mask[:, prompt:].clone()
    response_mask[1, 2:4] = 0  # as the result of a tool within a response
    shape = (size, answer)
    td = TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "prompts": ids[:, :prompt].clone(),
            "responses": ids[:, prompt:].clone(),
            "response_mask": response_mask,
            "advantages": torch.randn(size, 1, generator=generator).expand(shape).clone(),
            "returns": torch.randn(shape, generator=generator),
            "values": torch.randn(shape, generator=generator),
            "old_log_probs": torch.zeros(shape),
            "ref_log_prob": torch.zeros(shape),
        },
        batch_size=size,
    )
    td = left_right_2_no_padding(td)
    defaults = {
        "use_remove_padding": False,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": BUDGET,
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
        "global_batch_size": size * dist.get_world_size(),
    }
    tu.assign_non_tensor(td, **(defaults | options))
    return td


def actor_loss(**more: Any) -> Callable[..., Any]:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    defaults = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "clip_ratio_c": 1.5}
    config = ActorConfig(
        strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=1, **(defaults | more)
    )
    return partial(ppo_loss, config=config)


def responses(values: Tensor, data: Any) -> Tensor:
    from verl.workers.utils.padding import no_padding_2_padding

    return no_padding_2_padding(values, data)


def gradients(made: Any) -> list[Tensor]:
    """What this rank has of the gradient of each parameter that is trained."""
    found = []
    for name, parameter in made.module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grad = parameter.grad
            found.append((grad.to_local() if hasattr(grad, "to_local") else grad).clone())
    return found


def metrics_of(metrics: dict[str, Any]) -> dict[str, list[float]]:
    return {name: [float(x) for x in getattr(value, "values", value)] for name, value in metrics.items()}


def over_ranks(metrics: dict[str, Any]) -> dict[str, float]:
    """As verl's workers do it, which wants equally many values of every rank."""
    from verl.utils.metric import Metric

    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, metrics)
    return {
        name: float(Metric.aggregate_dp([rank[name] for rank in of_ranks]))
        for name, value in metrics.items()
        if isinstance(value, Metric)
    }


def accumulated(made: Any, data: Any, loss: Any) -> dict[str, Any]:
    """Losses, metrics and gradients of one mini-batch; the gradients are left in place."""
    made.optimizer_zero_grad()
    output = made.forward_backward_batch(data.clone(), loss)
    return {
        "loss": output["loss"],
        "metrics": metrics_of(output["metrics"]),
        "over ranks": over_ranks(output["metrics"]),
        "gradients": gradients(made),
    }


def step(made: Any, data: Any, loss: Any) -> dict[str, Any]:
    """One mini-batch, and the step of the optimizer with its clipping."""
    with made.train_mode():
        found = accumulated(made, data, loss)
        return found | {"norm": made.optimizer_step()}


def infer(made: Any, data: Any) -> dict[str, Tensor]:
    with made.eval_mode():
        found: dict[str, Tensor] = made.infer_batch(data.clone())["model_output"]
    return found


class SameSplit:
    """verl's engine on the micro-batches that treepack makes: what is a mean over micro-batches is then the same."""

    def __init__(self, ours: Any) -> None:
        from verl.workers.engine.fsdp import transformer_impl

        self.ours, self.module, self.own = ours, transformer_impl, transformer_impl.prepare_micro_batches
        self.count = 0

    def split(self, data: Any, **_: Any) -> tuple[Any, Any]:
        _, micro_batches, indices = self.ours._micro_batches(data, dist.group.WORLD)
        self.count = len(micro_batches)
        return micro_batches, indices

    def __enter__(self) -> SameSplit:
        self.module.prepare_micro_batches = self.split
        return self

    def __exit__(self, *_: object) -> None:
        self.module.prepare_micro_batches = self.own
