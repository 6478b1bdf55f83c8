"""TRL's GRPO and RLOO trainers on tiny models, with completions that are the same for every trainer."""

import os
import warnings

import numpy as np
import pytest
import tiny_tokenizers
import torch
from tiny_models import tiny

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)", exc_type=ImportError)
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from treepack.integrations.trl import TreeLogProbs

LONGEST = 7
KINDS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


class Scripted:
    """In place of generation: 1 to `LONGEST` random letters, some of them ended; answers begin in one of two ways."""

    calls = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.calls += 1
        rng = np.random.default_rng([self.calls, self.accelerator.process_index])
        answers = rng.integers(1, 90, (2, LONGEST))
        out = []
        for _ in prompt_ids:
            own = np.where(np.arange(LONGEST) < 3, answers[rng.integers(2)], rng.integers(1, 90, LONGEST))
            ids = own[: rng.integers(1, LONGEST + 1)].tolist()
            out.append([*ids[:-1], self.eos_token_ids[0]] if rng.random() < 0.7 else ids)
        return (out, None) if isinstance(self, GRPOTrainer) else out


def rewards(completions, **_):
    return [sum(letter in "aeiou" for letter in text) - 0.1 * len(text) for text in completions]


def folder_of(path, family, **more):
    """A tiny model and a tokenizer of letters, saved, since TRL loads a reference from where its model came from."""
    tiny_tokenizers.letters(path, tiny_tokenizers.CHATML)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 5])
    tokenizer.save_pretrained(path)
    model = tiny(family, torch.float32, attention="sdpa", vocab_size=128, eos_token_id=5, **more)
    model.save_pretrained(path)
    return str(path)


def classes(kind="grpo", **attributes):
    """(TRL's trainer, the same on trees), both with scripted completions."""
    base = KINDS[kind][0]
    theirs = type("Theirs", (Scripted, base), {})
    return theirs, type("Ours", (TreeLogProbs, Scripted, base), attributes)


def make(trainer, folder, kind="grpo", peft=None, model_options=(), **options):
    """A trainer of a saved model; every option of the config."""
    options = {
        "output_dir": str(folder) + "/out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "temperature": 0.9,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "seed": 3,
    } | options
    set_seed(3)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", experts_implementation="eager", **dict(model_options)
    )
    prompts = [f"the {name} {verb}" for name in ("cat", "dog", "old cat") for verb in ("sat on", "ran to the")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer(
            model,
            rewards,
            args=KINDS[kind][1](**options),
            train_dataset=Dataset.from_dict({"prompt": 6 * prompts}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=peft,
        )


def train(trainer):
    """(parameters after training, what was logged at each step)."""
    set_seed(4)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    timed = ("step_time", "train_runtime", "epoch")
    logged = [
        {name: value for name, value in log.items() if name not in timed and "per_second" not in name}
        for log in trainer.state.log_history
    ]
    end = {name: p.detach() for name, p in trainer.model.named_parameters()}
    moved = max((end[name] - start[name]).abs().max() for name in end)
    assert moved > 1e-3, "nothing was trained"
    return end, logged


def compare(theirs, ours, close=1e-5):
    """Parameters and every logged number of two runs."""
    (parameters, logs), (mine, my_logs) = theirs, ours
    compare_parameters(parameters, mine, close)
    assert [log.keys() for log in logs] == [log.keys() for log in my_logs]
    for log, my_log in zip(logs, my_logs, strict=True):
        for name, value in log.items():
            assert my_log[name] == pytest.approx(value, abs=close, rel=1e-4, nan_ok=True), name


def compare_parameters(theirs, ours, close=1e-5):
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert (ours[name] - parameter).abs().max() < close, name
