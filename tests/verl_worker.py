"""Ranks of `test_verl_engine.py`: verl's own engine and treepack's beside it, on the same weights and rollouts.

    python tests/verl_worker.py FOLDER ROLLOUTS RANKS JOB [JOB ...]      keeps <RANKS>_<rank>.pt in the folder

A process of its own, since verl wants other versions of packages and reads its environment when it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils as fsdp_init
from verl_engines import (
    TEMPERATURE,
    SameSplit,
    accumulated,
    actor_loss,
    batch_of,
    both,
    engine,
    engine_config,
    infer,
    model_config,
    responses,
    samples_of,
    step,
)

#: verl's own variables: the line that switches treepack on, and a CPU where it wants CUDA.
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu,treepack.integrations.verl",
    "VERL_PLATFORM": "treepack_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_LOGGING_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


def main(folder: str, rollouts: str, world: int, jobs: list[str]) -> None:
    if world > 1:  # the other of the two ways to name the module: `model_config`
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_cpu"
    models(Path(folder))
    torch.multiprocessing.spawn(run, args=(world, folder, rollouts, jobs), nprocs=world)


def models(folder: Path) -> None:
    """Tiny models as verl reads them."""
    from tiny_models import config, tiny
    from transformers import AutoModelForTokenClassification

    for family in ("qwen2", "qwen3_moe", "gemma2"):
        if not (folder / family).exists():
            tiny(family, torch.float32, "eager").save_pretrained(folder / family)
    if not (folder / "critic").exists():
        torch.manual_seed(1)
        critic = AutoModelForTokenClassification.from_config(config("qwen2", num_labels=1))
        for parameter in critic.parameters():
            torch.nn.init.normal_(parameter, 0, 0.2)
        critic.save_pretrained(folder / "critic")


def run(rank: int, world: int, folder: str, rollouts: str, jobs: list[str]) -> None:
    """Everything that the tests ask for, saved as `<world>_<rank>.pt` in `folder`."""
    sys.modules["trl"] = None  # type: ignore[assignment]  # verl 0.9.1 knows an old TRL, and can do without
    torch.set_num_threads(1)
    # verl has FSDP1 hand out the weights of rank 0, which torch allows on devices alone; gloo does it on the CPU.
    fsdp_init._check_module_states_for_sync_module_states = lambda _: None
    store = f"file://{folder}/store_{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        found = {job: JOBS[job](rank, world, Path(folder), rollouts) for job in jobs}
        torch.save(found, Path(folder) / f"{world}_{rank}.pt")
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------- jobs


def actor(rank: int, world: int, folder: Path, rollouts: str, *, family: str, strategy: str, **more: Any) -> Any:
    """Old log-probs, then two steps with clipping and KL, by both engines; the second with a temperature per sample."""
    theirs, ours = both(folder, family, strategy, **more)
    samples = samples_of(rollouts, rank, world)
    of_samples = torch.tensor([0.6 + 0.2 * (i % 3) for i in range(len(samples))])
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {"class": type(ours).__name__, "tokens": sum(len(p) + len(a) for p, a in samples)}
    found["positions"] = sum(tree.num_tokens for tree in ours._micro_batches(batch_of(samples, 0), None)[0])
    for number, temperature in enumerate((TEMPERATURE, of_samples)):
        data = batch_of(samples, seed=10 * rank + number)
        if number:
            data["temperature"] = temperature
        one: dict[str, Any] = {}
        outputs = [infer(made, data) for made in (theirs, ours)]
        for name in ("log_probs", "entropy"):
            one[name] = [responses(output[name], data) for output in outputs]
            one[f"{name} offsets"] = [output[name].offsets() for output in outputs]
        noise = torch.randn(data["old_log_probs"].shape, generator=generator)
        data["old_log_probs"] = one["log_probs"][0] + 0.3 * noise
        data["ref_log_prob"] = one["log_probs"][0] - 0.2 * noise
        with theirs.train_mode():
            one["own split"] = accumulated(theirs, data, actor_loss())
        one["ours"] = step(ours, data, actor_loss())
        with SameSplit(ours) as split:
            one["theirs"] = step(theirs, data, actor_loss())
        one["trees"] = split.count
        found[f"step {number}"] = one
    return found


def fixed(rank: int, world: int, folder: Path, rollouts: str) -> Any:
    """Micro-batches of a fixed number of samples, as verl cuts them too; here verl runs its own without padding."""
    theirs, ours = both(folder, "qwen2", "fsdp2", use_remove_padding=True)
    data = batch_of(
        samples_of(rollouts, rank, world), 0, use_dynamic_bsz=False, use_remove_padding=True, micro_batch_size_per_gpu=4
    )
    outputs = [infer(made, data) for made in (theirs, ours)]
    log_probs = [responses(output["log_probs"], data) for output in outputs]
    data["old_log_probs"] = data["ref_log_prob"] = log_probs[0] + 0.1
    return {
        "log_probs": log_probs,
        "theirs": step(theirs, data, actor_loss()),
        "ours": step(ours, data, actor_loss(loss_agg_mode="token-mean")),
    }


def lora(rank: int, world: int, folder: Path, rollouts: str, *, strategy: str) -> Any:
    """Adapters, and the reference as the model without them."""
    theirs, ours = both(folder, "qwen2", strategy, lora_rank=4, lora_alpha=8)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.module.named_parameters():
        if parameter.requires_grad:  # an adapter begins as nothing
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            value = torch.randn(local.shape, generator=generator) * 0.1
            for made in (theirs, ours):
                other = dict(made.module.named_parameters())[name]
                (other.to_local() if hasattr(other, "to_local") else other).data.copy_(value)
    data = batch_of(samples_of(rollouts, rank, world), 0)
    with_adapter = [responses(infer(made, data)["log_probs"], data) for made in (theirs, ours)]
    without = []
    for made in (theirs, ours):
        with made.disable_adapter():
            without.append(responses(infer(made, data)["log_probs"], data))
    data["old_log_probs"], data["ref_log_prob"] = with_adapter[0] + 0.1, without[0]
    found = {"log_probs": with_adapter, "reference": without, "ours": step(ours, data, actor_loss())}
    with SameSplit(ours):
        return found | {"theirs": step(theirs, data, actor_loss())}


def critic(rank: int, world: int, folder: Path, rollouts: str, *, strategy: str) -> Any:
    """Values, and a step on them. verl loads critics with FlashAttention-2 alone: here another one is set."""
    import verl.utils.model
    from transformers import AutoModelForTokenClassification
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)

    verl.utils.model.load_valuehead_model = load
    theirs, ours = both(folder, "critic", strategy, kind="value_model")
    data = batch_of(samples_of(rollouts, rank, world), 0)
    values = [responses(infer(made, data)["values"], data) for made in (theirs, ours)]
    config = CriticConfig(strategy="fsdp", use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=1, rollout_n=4)
    loss = partial(value_loss, config=config)
    found = {"values": values, "ours": step(ours, data, loss), "class": type(ours).__name__}
    with SameSplit(ours):
        return found | {"theirs": step(theirs, data, loss)}


def sft(rank: int, world: int, folder: Path, rollouts: str) -> Any:
    """verl's supervised loss, whose batches have a jagged mask and no prompts."""
    from verl.workers.utils.losses import sft_loss

    theirs, ours = both(folder, "gemma2", "fsdp2")
    samples = samples_of(rollouts, rank, world)
    data = batch_of(samples, 0).exclude("prompts", "responses", "response_mask", "attention_mask")
    masks = [torch.tensor([0] * len(before) + [1] * len(after)) for before, after in samples]
    data["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    loss = partial(sft_loss, config=None)
    found = {"ours": step(ours, data, loss)}
    with SameSplit(ours):
        return found | {"theirs": step(theirs, data, loss)}


def refused(rank: int, world: int, folder: Path, rollouts: str) -> dict[str, str]:
    """What each setting that trees do not compute says."""
    from verl.models.transformers import monkey_patch
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine import EngineRegistry

    cls = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    made = engine(cls, model_config(folder, "qwen2"), engine_config("fsdp2"))
    samples = samples_of(rollouts, rank, world)
    said: dict[str, str] = {}

    def ask(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except ValueError as error:
            said[name] = str(error)

    def build(model: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Any:
        options = {"use_remove_padding": True} | (model or {})
        return engine(cls, model_config(folder, "qwen2", **options), engine_config("fsdp2", **(config or {})))

    def batch(loss: Any = None, **options: Any) -> Any:
        data = batch_of(samples, 0, **options)
        return made.infer_batch(data) if loss is None else made.train_batch(data, loss)

    ask("ulysses", lambda: build(config={"ulysses_sequence_parallel_size": 2}))
    ask("fused kernels", lambda: build(model={"use_fused_kernels": True}))
    ask("grouper in the batch", lambda: batch(actor_loss(use_prefix_grouper=True)))
    monkey_patch._PREFIX_GROUPER_PATCHED = True
    ask("grouper", build)
    monkey_patch._PREFIX_GROUPER_PATCHED = False
    ask("fused kernels in the batch", lambda: batch(use_fused_kernels=True))
    ask("top-k distillation", lambda: batch(distillation_use_topk=True))
    ask("sum of squares", lambda: batch(calculate_sum_pi_squared=True))
    ask("pairs", lambda: batch(force_group_size=2))
    data = batch_of(samples, 0)
    tu.assign_non_tensor(data, multi_modal_inputs=[{"pixel_values": torch.zeros(1)} for _ in samples])
    ask("images", lambda: made.infer_batch(data))
    axes = batch_of(samples, 0)
    lengths = axes["input_ids"].offsets().diff().tolist()
    axes["position_ids"] = torch.nested.as_nested_tensor([torch.zeros(n, 4) for n in lengths], layout=torch.jagged)
    ask("axes", lambda: made.infer_batch(axes))
    ask("chunks", lambda: batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=3))
    return said


def unequal(rank: int, world: int, folder: Path, rollouts: str) -> dict[str, str]:
    """Errors that one rank finds are raised on all."""
    from verl.workers.engine import EngineRegistry

    model = model_config(folder, "qwen2")
    made = engine(EngineRegistry.get_engine_cls("language_model", "fsdp2"), model, engine_config("fsdp2"))
    samples, said = samples_of(rollouts, rank, world), {}
    first = samples if rank else samples[:2]
    wrong = batch_of(samples, 0)
    if rank:
        wrong["input_ids"].values()[0] = -1
    batches = {
        "too long": batch_of(samples, 0, max_token_len_per_gpu=60),
        "too few": batch_of(first, 0, max_token_len_per_gpu=100),
        "no id": wrong,
    }
    for name, data in batches.items():
        try:
            made.infer_batch(data)
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


JOBS: dict[str, Callable[..., Any]] = {
    f"{family} {strategy}": partial(actor, family=family, strategy=strategy)
    for family in ("qwen2", "qwen3_moe")
    for strategy in ("fsdp", "fsdp2")
} | {
    "checkpointing": partial(actor, family="qwen2", strategy="fsdp2", enable_gradient_checkpointing=True),
    "bf16 fsdp": partial(actor, family="qwen2", strategy="fsdp", precision="bf16"),
    "bf16 fsdp2": partial(actor, family="qwen2", strategy="fsdp2", precision="bf16"),
    "fixed": fixed,
    "lora fsdp": partial(lora, strategy="fsdp"),
    "lora fsdp2": partial(lora, strategy="fsdp2"),
    "critic fsdp": partial(critic, strategy="fsdp"),
    "critic fsdp2": partial(critic, strategy="fsdp2"),
    "sft": sft,
    "refused": refused,
    "unequal": unequal,
}

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
