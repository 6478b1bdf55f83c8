"""Two GPUs over NCCL: DDP and FSDP2 around a model on packed trees leave the average of both ranks' gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("treepack._core")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

import model_ranks_worker
from tiny_models import tiny

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (WORLD, str(folder), "cuda", torch.float32)
    torch.multiprocessing.spawn(model_ranks_worker.run, arguments, nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("wrapper", model_ranks_worker.WRAPPERS)
def test_gradients_are_averaged(ranks, wrapper):
    model = tiny("qwen2", torch.float32).cuda()
    for rank in range(WORLD):
        model_ranks_worker.step(model, model_ranks_worker.tree_of(rank, "cuda"))
    for found in ranks:
        for name, parameter in model.named_parameters():
            if name not in found[wrapper]:  # frozen
                continue
            expected = parameter.grad.cpu() / WORLD
            assert (found[wrapper][name] - expected).abs().max() < 1e-4 * expected.abs().max(), name
