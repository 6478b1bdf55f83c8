"""One rank of `test_gpu_shards.py`: one tree over ranks by the kernels, compared with one process on the same GPU.

With two GPUs the ranks talk over NCCL. With one they share it and talk over gloo, whose messages pass through the host
here: the kernels, the tile lists of each rank and the sums are the same, the transport is not. On a CPU
(`TREEPACK_SHARDS_DEVICE=cpu`, which shows that the cases run) they are the reference's.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import source_tree  # noqa: F401
import torch
import torch.distributed as dist
from range_trees import whole
from shards_steps import apart, split_at, steps, weighted, worst
from tiny_models import shared_samples, tiny
from torch.distributed.device_mesh import init_device_mesh

WORLD = 2
DEVICE = os.environ.get("TREEPACK_SHARDS_DEVICE", "cuda")
FORMS = ("rows", "heads")
HEADS = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "head_dim": 64, "kv_lora_rank": 8, "q_lora_rank": 12, "n_routed_experts": 4,
          "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 99,
          "moe_intermediate_size": 16, "n_shared_experts": 1}  # fmt: skip
#: Family and sizes of each model; where the tree is cut.
CASES = {
    "head size 64": ("llama", HEADS, None),
    "head size 128": ("qwen2", HEADS | {"head_dim": 128}, None),
    "head size 256": ("qwen3", HEADS | {"head_dim": 256}, None),
    "head size 96": ("qwen3", HEADS | {"head_dim": 96}, None),
    "a window": ("qwen2_window", HEADS, None),
    "a window and sinks": ("gpt_oss", HEADS | {"num_local_experts": 2, "num_experts_per_tok": 2}, None),
    "192 and 128": ("deepseek_v3", LATENT, None),
    "a rank without rows": ("llama", HEADS, 0),
    "all rows on the first": ("llama", HEADS, -1),
    "one row on the first": ("llama", HEADS, 1),
}
CHECKPOINTED = ("head size 128", "a window")
EXPERTS = ("a window and sinks",)  # in float32 alone: which of them a token gets can change with its last bits


def staged(call):
    """A collective of tensors on the GPU by way of the host, for gloo, which has few of its own there."""

    def through_host(*tensors, **options):
        host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in tensors]
        done = call(*host, **options)
        for x, y in zip(tensors, host, strict=True):
            if isinstance(x, torch.Tensor) and x.is_cuda:
                x.copy_(y)
        return done

    return through_host


def compare(case: str, dtype: torch.dtype, form: str, mesh, checkpointed: bool) -> dict[str, float]:
    """Differences from one process, and whether a second run has the same bits."""
    family, sizes, edge = CASES[case]
    tree = whole(shared_samples(seed=3, count=24)).to(DEVICE)
    model, exact = (tiny(family, kind, **sizes).to(DEVICE) for kind in (dtype, torch.float32))
    exact.load_state_dict(model.state_dict())
    if checkpointed:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    options = {"shard": form}
    edges = {None: [], 0: [0], -1: [tree.num_tokens], 1: [1]}[edge]

    def run():
        if edge is None:
            return steps(model, [tree], weighted, mesh, **options)
        with split_at(*edges):
            return steps(model, [tree], weighted, mesh, **options)

    (values, gradients), (again, same) = run(), run()
    alone, expected = steps(model, [tree], weighted)
    right, wanted = steps(exact, [tree], weighted)

    def wide(found):
        return {name: x.float() for name, x in found.items()}

    return {
        "values": apart([x.float() for x in values], right),
        "values of one process": apart([x.float() for x in alone], right),
        "gradients": worst(wide(gradients), wanted),
        "gradients of one process": worst(wide(expected), wanted),
        "bits": float(not all(map(torch.equal, values, again)))
        + float(not all(torch.equal(x, same[name]) for name, x in gradients.items())),
    }


def run(rank: int, folder: str, backend: str) -> None:
    """Saves what every case found on this rank as `<rank>.pt` in `folder`."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ["TREEPACK_SELF_CHECK"] = "0"
    if backend == "gloo" and DEVICE == "cuda":
        for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):
            setattr(dist, name, staged(getattr(dist, name)))
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=280)
    )
    try:
        mesh = init_device_mesh(DEVICE, (WORLD,), mesh_dim_names=("sp",))
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            for form in FORMS:
                for case in CASES:
                    if form == "heads" and CASES[case][2] is not None:
                        continue
                    if dtype == torch.bfloat16 and case in EXPERTS:
                        continue
                    found[case, form, dtype, False] = compare(case, dtype, form, mesh, False)
                for case in CHECKPOINTED:
                    found[case, form, dtype, True] = compare(case, dtype, form, mesh, True)
        torch.save(found, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
