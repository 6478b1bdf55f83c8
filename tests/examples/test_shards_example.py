"""examples/shards.py by torchrun over gloo: the loss and the gradient are those of one process with all samples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_ranks_example import alone

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "shards.py"
SAYS = r"(\d+) x (\d+) ranks by (\w+), (\d+) terms, loss ([-+.\d]+), gradient norm ([.\d]+)"


def run(ranks, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# One process along sp is what examples/ranks.py does.
@pytest.mark.parametrize(
    ("ranks", "options", "shape"),
    [(2, ["--shard", "heads"], ("1", "2", "heads")), (4, ["--data-parallel", "2"], ("2", "2", "rows"))],
    ids=["heads", "rows beside fsdp"],
)
def test_shards(ranks, options, shape):
    done = run(ranks, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    *found, terms, loss, norm = re.search(SAYS, done.stdout).groups()
    expected = alone()
    assert (*found, int(terms)) == (*shape, expected[0])
    assert float(loss) == pytest.approx(expected[1], abs=1e-6)
    assert float(norm) == pytest.approx(expected[2], rel=1e-6)
