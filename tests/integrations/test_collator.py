"""DataCollatorForTreePacking, alone and under transformers' Trainer on a tiny random model: steps and evaluation are
those of the samples alone, however they were batched."""

import os
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from tiny_models import alone_log_probs, shared_samples, tiny
from transformers import Trainer, TrainingArguments

import treepack
from treepack import PackError
from treepack.integrations.collator import DataCollatorForTreePacking, tree_batch
from treepack.testing import check_packed


class TreeTrainer(Trainer):
    """The one of the collator's docstring and of the pages."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tree = inputs["tree"].to(self.args.device)
        log_probs = treepack.term_log_probs(model, tree)
        loss = -(log_probs * tree.terms["advantage"]).sum() / (num_items_in_batch or max(len(log_probs), 1))
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, {"log_probs": log_probs[None]}) if return_outputs else loss


def features():
    """As a dataset of plain lists gives them."""
    return [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in sample.items()} for sample in shared_samples()]


def loss_alone(model, samples):
    """Mean over all terms of all samples, each run alone through transformers' own attention."""
    advantage = [np.float32(sample["advantage"]).item() for sample in samples]  # what a column of Python floats holds
    weighed = [x * a for x, a in zip(alone_log_probs(model, samples, "sdpa"), advantage, strict=True)]
    return -torch.cat(weighed).mean()


def step_alone(samples):
    """{name: parameter} of the float64 model after one step of SGD, learning rate 1, on `loss_alone`."""
    model = tiny("qwen2")
    loss_alone(model, samples).backward()
    return {name: (p if p.grad is None else p - p.grad).detach() for name, p in model.named_parameters()}


def assert_same_step(got, expected):
    """Gradients within 1e-6 of the model's largest: norms are float32 in any model, as in `check_parity`."""
    start = dict(tiny("qwen2").named_parameters())
    largest = max((start[name] - x).abs().max().item() for name, x in expected.items())
    assert largest > 1e-3
    for name, x in expected.items():
        assert (got[name] - x).abs().max() < 1e-6 * largest, name


def test_one_tree():
    samples = shared_samples()
    batch = DataCollatorForTreePacking()(samples)
    assert list(batch) == ["tree", "labels"]
    check_packed(treepack.pack(samples, max_tokens=999), samples, max_tokens=999)
    expected = treepack.pack(samples, max_tokens=999)[0]
    assert np.array_equal(batch["tree"].input_ids, expected.input_ids)
    assert np.array_equal(batch["tree"].subtree_end, expected.subtree_end)


def test_labels_are_the_targets():
    """Of the host's tree and of one on a device; counted with or without the first of the row, they are M."""
    samples = shared_samples()
    tree = treepack.pack(samples, max_tokens=999)[0]
    targets = [t for s in samples for t in s["input_ids"][1:][s["completion_mask"][1:] > 0].tolist()]
    for batch in (DataCollatorForTreePacking()(samples), tree_batch(tree), tree_batch(tree.to("cpu"))):
        assert batch["labels"].tolist() == [[-100, *targets]]
        assert batch["labels"].dtype == torch.int64
    nothing = tree_batch(treepack.pack([{"input_ids": [1], "completion_mask": [0]}], max_tokens=4)[0])
    assert nothing["labels"].tolist() == [[-100]]


def test_options():
    samples = [dict(sample, text="no column") for sample in shared_samples()]
    collator = DataCollatorForTreePacking(pad_to_multiple_of=32, branching="label", order="first_seen", drop=["text"])
    tree = collator(samples)["tree"]
    assert tree.num_tokens % 32 == 0
    assert tree.shift_labels.shape == tree.input_ids.shape
    with pytest.raises(TypeError, match="text"):
        DataCollatorForTreePacking()(samples)


def test_what_does_not_fit_is_refused():
    batch = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 5, 6]}]
    with pytest.raises(PackError, match=r"needs 2 trees of 4 positions; .* raise max_tokens to 5 or more"):
        DataCollatorForTreePacking(max_tokens=4, train_all=True)(batch)
    assert DataCollatorForTreePacking(max_tokens=5, train_all=True)(batch)["tree"].num_tokens == 5
    with pytest.raises(PackError, match="raise max_tokens to 8 or more"):
        DataCollatorForTreePacking(max_tokens=4, pad_to_multiple_of=4, train_all=True)(batch)
    with pytest.raises(PackError, match="no samples"):
        DataCollatorForTreePacking()([])
    with pytest.raises(TypeError, match="sample 0 is a str; a batch is a list of dicts"):
        DataCollatorForTreePacking()({"input_ids": [1, 2]})


def test_a_lost_mask_is_refused():
    samples = [{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}, {"input_ids": [1, 2, 4], "labels": [1, 2, 4]}]
    with pytest.raises(
        PackError, match=r"sample 1 has no completion_mask \(it has input_ids, labels\).*=False.*!= -100"
    ):
        DataCollatorForTreePacking()(samples)
    with pytest.raises(PackError, match=r"no completion_mask \(it has no columns\)"):
        DataCollatorForTreePacking()([{}])
    bare = [{"input_ids": sample["input_ids"]} for sample in samples]
    tree = DataCollatorForTreePacking(train_all=True)(bare)["tree"]
    assert len(tree.term_row) == 4
    labelled = [{**sample, "labels": np.asarray(sample["input_ids"])} for sample in bare]
    assert DataCollatorForTreePacking(train_all=True)(labelled)["tree"].num_terms == tree.num_terms
    with pytest.raises(PackError, match=r"sample 0 has a completion_mask, but .*train_all=True"):
        DataCollatorForTreePacking(train_all=True)(samples)
    ignored = DataCollatorForTreePacking(train_all=True, drop=["completion_mask", "labels"])(samples)["tree"]
    assert np.array_equal(ignored.term_target, tree.term_target)


def test_a_column_that_is_named_like_a_sample():
    good = {"input_ids": [1, 2], "completion_mask": [0, 1], "sample 7": [1, 2]}
    with pytest.raises(PackError, match=r"^sample 1: sample 7 has 1 row; input_ids has 2 tokens") as error:
        DataCollatorForTreePacking()([good, {**good, "sample 7": [1]}])
    assert error.value.sample == 1
    with pytest.raises(TypeError, match=r"^sample 1: sample 7 is text ") as error:
        DataCollatorForTreePacking()([good, {**good, "sample 7": ["a", "b"]}])
    assert error.value.sample == 1
    for features in ([good, {"input_ids": [1]}], [good, "text"]):
        with pytest.raises((PackError, TypeError), match=r"^sample 1 ") as error:
            DataCollatorForTreePacking()(features)
        assert error.value.sample == 1


def arguments(folder, **options):
    defaults = {
        "per_device_train_batch_size": len(features()),
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "remove_unused_columns": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **(defaults | options))


def trainer(folder, dtype=torch.float64, max_tokens=256, **options):
    return TreeTrainer(
        tiny("qwen2", dtype),
        arguments(folder, **options),
        train_dataset=features(),
        eval_dataset=features(),
        data_collator=DataCollatorForTreePacking(max_tokens=max_tokens),
    )


def sgd(**options):
    """One step over all samples whose parameters show the gradient."""
    return {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0} | options


def train(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(folder, **options)
        made.train()
    return made, [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_trainer_drops_the_mask_by_default(tmp_path):
    datasets = pytest.importorskip("datasets", reason="Trainer removes the columns of a datasets.Dataset itself")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(tmp_path, remove_unused_columns=True)
        made.train_dataset = datasets.Dataset.from_list(features())
        with pytest.raises(PackError, match="remove_unused_columns=False"):
            next(iter(made.get_train_dataloader()))


def test_trainer_that_drops_the_mask_of_a_list(tmp_path, capsys):
    with pytest.raises(PackError, match="remove_unused_columns=False"):
        train(tmp_path, max_steps=1, remove_unused_columns=True)


def test_trainer_sees_the_loss_of_the_samples_alone(tmp_path, capsys):
    fresh = tiny("qwen2", torch.float32)
    made, losses = train(tmp_path, dtype=torch.float32, max_steps=3)
    assert losses[0] == pytest.approx(loss_alone(fresh, shared_samples()).item(), abs=2e-3)
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(made.model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(
    "batches",
    [
        {},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},  # 3, 3 and 2 samples
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "average_tokens_across_devices": False},
    ],
    ids=["one batch", "accumulated 3", "accumulated 8", "no average"],
)
def test_accumulation_is_one_batch_is_alone(batches, tmp_path, capsys):
    made, losses = train(tmp_path, **sgd(**batches))
    assert made.state.global_step == 1
    assert_same_step(dict(made.model.named_parameters()), step_alone(shared_samples()))
    assert losses == [pytest.approx(loss_alone(tiny("qwen2"), shared_samples()).item(), abs=1e-4)]  # as it is logged


def test_a_step_without_terms_is_no_step(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(tmp_path, **sgd(per_device_train_batch_size=4, gradient_accumulation_steps=2))
        for sample in made.train_dataset:
            sample["completion_mask"] = [0] * len(sample["input_ids"])
        made.train()
    for p, q in zip(made.model.parameters(), tiny("qwen2").parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_model_that_takes_no_count(tmp_path, capsys):
    """Trainer then divides by the accumulation steps itself, and a tree by its own terms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(tmp_path, **sgd(per_device_train_batch_size=4, gradient_accumulation_steps=2))
        made.model_accepts_loss_kwargs = False
        halves = [loss_alone(tiny("qwen2"), x) for x in np.array_split(made.train_dataset, 2)]
        made.get_train_dataloader = lambda: torch.utils.data.DataLoader(
            made.train_dataset, batch_size=4, collate_fn=made.data_collator
        )
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses == [pytest.approx((sum(halves) / 2).item(), abs=1e-4)]


def test_evaluation(tmp_path, capsys):
    """`evaluate` and `predict`, in one batch and in several: the losses of the batches, each weighed by its samples."""
    samples, model = features(), tiny("qwen2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (8, 3):
            parts = [samples[i : i + size] for i in range(0, len(samples), size)]
            expected = sum(loss_alone(model, arrays(part)).item() * len(part) for part in parts) / len(samples)
            made = trainer(tmp_path, per_device_eval_batch_size=size)
            assert made.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
            out = made.predict(samples)
            assert out.metrics["test_loss"] == pytest.approx(expected, abs=1e-6)
            found = out.predictions[out.label_ids[:, 1:] != -100]
            alone = torch.cat(alone_log_probs(model, shared_samples(), "sdpa")).detach().numpy()
            assert np.abs(found - alone).max() < 1e-6


def arrays(samples):
    return [sample | {"completion_mask": np.array(sample["completion_mask"])} for sample in samples]


def test_evaluation_while_training(tmp_path, capsys):
    made, _ = train(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    losses = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_trainer_with_workers(tmp_path, capsys):
    """Trees travel from worker processes."""
    _, one = train(tmp_path, dtype=torch.float32, max_steps=1)
    _, two = train(tmp_path, dtype=torch.float32, max_steps=1, dataloader_num_workers=1)
    assert one == two


RANK = """
import sys
import torch
from test_collator import sgd, train

batches = sgd(per_device_train_batch_size=2, gradient_accumulation_steps=2, ddp_backend="gloo")
made, _ = train(sys.argv[1], **batches)
assert made.accelerator.num_processes == 2
torch.save(dict(made.accelerator.unwrap_model(made.model).named_parameters()), f"{sys.argv[1]}/{sys.argv[2]}.pt")
torch.distributed.destroy_process_group()
"""


def test_two_ranks_are_one(tmp_path):
    """Each rank has other samples and other terms, in two micro-batches; the step is that of all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for rank in range(2):
        assert_same_step(torch.load(tmp_path / f"{rank}.pt"), step_alone(shared_samples()))
