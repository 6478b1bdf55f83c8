"""examples/grpo.py: 20 steps packed and alone, the same losses."""

import grpo
import torch


def test_loss_curves_coincide():
    torch.set_num_threads(1)  # a tiny model: threads cost more than they give
    packed, alone = (grpo.train(packed=way) for way in (True, False))
    assert len(packed) == 20
    difference = (torch.tensor(packed) - torch.tensor(alone)).abs().max()
    assert difference < 1e-6, (packed, alone)
    assert max(packed) - min(packed) > 1e-2  # it trains
