"""One tree over two ranks with the kernels: two GPUs over NCCL, or both ranks on the one that is there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("treepack._core")

import gpu_shards_worker as worker

#: Of the largest value: float32 sums in another order; a unit in the last place of bfloat16.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("shards"))
    backend = "nccl" if torch.cuda.device_count() >= worker.WORLD else "gloo"
    torch.multiprocessing.spawn(worker.run, (folder, backend), nprocs=worker.WORLD)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(worker.WORLD)]


def test_as_one_process(ranks):
    """Both are compared with float32: over ranks nothing is further off than 1.5 times one process and a rounding."""
    wrong = {}
    for rank, found in enumerate(ranks):
        assert len(found) > 30
        for case, off in found.items():
            for what in ("values", "gradients"):
                if not off[what] <= 1.5 * off[f"{what} of one process"] + ALLOWED[case[2]]:
                    wrong[(rank, *case, what)] = off[what], off[f"{what} of one process"]
    assert not wrong


def test_equal_bits(ranks):
    assert not [case for found in ranks for case, off in found.items() if off["bits"]]
