"""DataCollatorForTreePacking, alone and under transformers' Trainer on a tiny random model."""

import warnings

import numpy as np
import pytest
import torch
from tiny_models import alone_log_probs, shared_samples, tiny
from transformers import Trainer, TrainingArguments

import treepack
from treepack import PackError
from treepack.integrations.collator import DataCollatorForTreePacking
from treepack.testing import check_packed


class TreeTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tree = inputs["tree"].to(model.device)
        log_probs = treepack.term_log_probs(model, tree)
        return -(log_probs * tree.terms["advantage"]).mean()


def features():
    """As a dataset of plain lists gives them."""
    return [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in sample.items()} for sample in shared_samples()]


def test_one_tree():
    samples = shared_samples()
    batch = DataCollatorForTreePacking()(samples)
    assert list(batch) == ["tree"]
    check_packed(treepack.pack(samples, max_tokens=999), samples, max_tokens=999)
    expected = treepack.pack(samples, max_tokens=999)[0]
    assert np.array_equal(batch["tree"].input_ids, expected.input_ids)
    assert np.array_equal(batch["tree"].subtree_end, expected.subtree_end)


def test_options():
    samples = [dict(sample, text="no column") for sample in shared_samples()]
    collator = DataCollatorForTreePacking(pad_to_multiple_of=32, branching="label", order="first_seen", drop=["text"])
    tree = collator(samples)["tree"]
    assert tree.num_tokens % 32 == 0
    assert tree.shift_labels.shape == tree.input_ids.shape
    with pytest.raises(TypeError, match="text"):
        DataCollatorForTreePacking()(samples)


def test_what_does_not_fit_is_refused():
    with pytest.raises(PackError, match="needs 2 trees of 4 positions"):
        DataCollatorForTreePacking(max_tokens=4)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])
    with pytest.raises(PackError, match="no samples"):
        DataCollatorForTreePacking()([])


def train(tmp_path, steps, **options):
    model = tiny("qwen2", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=len(features()),
            learning_rate=1e-2,
            remove_unused_columns=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        trainer = TreeTrainer(
            model, arguments, train_dataset=features(), data_collator=DataCollatorForTreePacking(max_tokens=256)
        )
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_sees_the_loss_of_the_samples_alone(tmp_path, capsys):
    samples = shared_samples()
    fresh = tiny("qwen2", torch.float32)
    alone = alone_log_probs(fresh, samples, "sdpa")
    weighed = [x * sample["advantage"] for x, sample in zip(alone, samples, strict=True)]
    expected = -torch.cat(weighed).mean().item()
    model, losses = train(tmp_path, 3, lr_scheduler_type="constant")
    assert losses[0] == pytest.approx(expected, abs=2e-3)
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_trainer_with_workers(tmp_path, capsys):
    """Trees travel from worker processes."""
    _, one = train(tmp_path, 1)
    _, two = train(tmp_path, 1, dataloader_num_workers=1)
    assert one == two
