"""Every Python block of docs/integrations.md runs, in order and in one namespace, on tiny models."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import shared_samples, tiny
from transformers import AutoModelForCausalLM

import treepack.testing

PAGE = Path(__file__).resolve().parents[1] / "docs" / "integrations.md"


def samples_with_columns():
    samples = shared_samples()
    for sample in samples:
        sample["old_log_probs"] = np.full(len(sample["input_ids"]), -4.0)
    return samples


def test_blocks(monkeypatch, tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 10
    model = tiny("qwen2")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **options: _check(options, model))
    names = {"samples": samples_with_columns(), "moe_model": tiny("mixtral"), "treepack": treepack}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for number, block in enumerate(blocks):
            try:
                exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
            except Exception as error:
                pytest.fail(f"block {number} of {PAGE.name}: {type(error).__name__}: {error}\n{block}")
    finally:
        torch.distributed.destroy_process_group()
    assert names["parity"].log_probs < 1e-9
    assert torch.allclose(names["logits"], names["same"])
    assert names["loss"].requires_grad
    assert torch.isfinite(names["kl"])
    assert len(names["values"]) == len(names["tree"].term_row)
    trained = np.concatenate([s["old_log_probs"][1:][s["completion_mask"][1:] > 0] for s in names["samples"]])
    assert (trained != -4.0).all()


def _check(options, model):
    assert options == {"attn_implementation": "treepack"}
    return model
