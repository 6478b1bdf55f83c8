"""One rank of `test_trl_ranks.py`: TRL's trainer and the same on trees, under the wrapper that accelerate chooses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

#: attributes of the trainer on trees, options of both
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one tree": ({}, {"beta": 0.1}),
    "several trees": ({"max_tokens": 30}, {"beta": 0.1}),
}


def run(rank: int, world: int, port: int, folder: str, model: str) -> None:
    """What both trainers end with on this rank, saved as `<rank>.pt` in `folder`."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "integrations")]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    import trl_trainers as both

    made = {}
    for name, (attributes, options) in RUNS.items():
        trainers = (both.make(one, model, **options) for one in both.classes(**attributes))
        made[name] = [both.train(trainer) for trainer in trainers]
    torch.save(made, Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
