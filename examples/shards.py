"""One policy-gradient step in which several ranks run one tree together: each has a part of its rows.

    torchrun --standalone --nproc-per-node 2 examples/shards.py                      # one tree, rows over both ranks
    torchrun --standalone --nproc-per-node 2 examples/shards.py --shard heads        # ... heads in attention
    torchrun --standalone --nproc-per-node 4 examples/shards.py --data-parallel 2    # two trees over two ranks each

On GPUs over NCCL, elsewhere over gloo. The mesh has two dimensions: along "dp" ranks have other trees, along "sp" they
run the same one. With data parallelism FSDP2 shards the weights along "dp".
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from grpo import rollouts, small_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import treepack
from treepack.distributed import sum_gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", choices=("rows", "heads"), default="rows", help="how ranks share a tree")
    parser.add_argument("--data-parallel", type=int, default=1, help="ranks along dp; the others run trees together")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ranks, dp = dist.get_world_size(), arguments.data_parallel
    if dp < 1 or ranks % dp:
        parser.error(f"--data-parallel is {dp}; allowed is a divisor of the {ranks} ranks")
    mesh = init_device_mesh(device, (dp, ranks // dp), mesh_dim_names=("dp", "sp"))
    model = small_model(packed=True).to(device)
    if dp > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    packed = treepack.pack(rollouts(0), max_tokens=256, ranks=mesh["dp"])  # every process has all samples
    total = 0.0
    for tree in packed.for_rank(mesh["dp"]):  # the same along sp
        tree = tree.to(device)
        log_probs = treepack.term_log_probs(model, tree, mesh=mesh["sp"], shard=arguments.shard)  # of all terms
        loss = -(log_probs * tree.terms["advantage"]).sum() / packed.stats.terms
        (loss * dp).backward()  # FSDP2 averages along dp
        total += loss.item()
    sum_gradients(model, mesh["sp"])  # along sp they add up
    sums = torch.tensor(total, device=device, dtype=torch.float64)
    dist.all_reduce(sums, group=mesh["dp"].get_group())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    norm = norm.full_tensor() if dp > 1 else norm
    if dist.get_rank() == 0:
        shape = f"{dp} x {ranks // dp} ranks by {arguments.shard}"
        print(f"{shape}, {packed.stats.terms} terms, loss {sums.item():+.9f}, gradient norm {norm.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
