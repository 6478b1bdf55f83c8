"""examples/ranks.py by torchrun over gloo: the loss and the gradient are those of one process with all samples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import grpo
import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ranks.py"


def alone():
    """Terms, loss and gradient norm, each sample by itself through transformers' own attention."""
    model, samples = grpo.small_model(packed=False), grpo.rollouts(0)
    terms = sum(int(sample["completion_mask"][1:].sum()) for sample in samples)
    loss = 0.0
    for sample in samples:
        part = -(grpo.alone_log_probs(model, sample) * float(sample["advantage"])).sum() / terms
        part.backward()
        loss += part.item()
    return terms, loss, torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()


@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_ranks(options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks, terms, loss, norm = re.search(
        r"(\d+) ranks, (\d+) terms, loss ([-+.\d]+), gradient norm ([.\d]+)", done.stdout
    ).groups()
    expected = alone()
    assert (int(ranks), int(terms)) == (2, expected[0])
    assert float(loss) == pytest.approx(expected[1], abs=1e-6)
    assert float(norm) == pytest.approx(expected[2], rel=1e-6)
