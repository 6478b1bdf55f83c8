"""One policy-gradient step over several ranks: each packs its own samples, all take the same number of micro-batches.

    torchrun --standalone --nproc-per-node 2 examples/ranks.py            # DistributedDataParallel
    torchrun --standalone --nproc-per-node 2 examples/ranks.py --fsdp     # FSDP2: every layer and the whole are sharded

On GPUs over NCCL, elsewhere over gloo. Ranks may have samples of any number and length, one of them none at all:
`align` appends empty trees, and divides by the loss terms of all ranks, so that the gradient is that of one large
batch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from grpo import rollouts, small_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import treepack
from treepack.distributed import align


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = small_model(packed=True).to("cuda" if cuda else "cpu")
    if arguments.fsdp:
        for layer in model.model.layers:
            fully_shard(layer)
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(model)

    samples = rollouts(0)[rank::ranks]  # of this rank
    trees, terms = align(treepack.pack(samples, max_tokens=96))
    total = 0.0
    for tree in trees:  # as many on every rank; an empty one still takes part in what the ranks exchange
        tree = tree.to("cuda" if cuda else "cpu")
        log_probs = treepack.term_log_probs(model, tree)
        loss = -(log_probs * tree.terms["advantage"]).sum() * ranks / terms  # both wrappers average over ranks
        loss.backward()
        total += loss.item() / ranks
    sums = torch.tensor(total, device="cuda" if cuda else "cpu", dtype=torch.float64)
    dist.all_reduce(sums)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    norm = norm.full_tensor() if arguments.fsdp else norm
    if rank == 0:
        print(f"{ranks} ranks, {terms} terms, loss {sums.item():+.9f}, gradient norm {norm.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
