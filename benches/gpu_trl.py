"""One optimizer step of TRL's GRPOTrainer on a 1.5B model, its own log-probs against those from trees.

    python benches/gpu_trl.py [--contenders trl trees groups] [--batch 8] [--steps 3]

The model is a randomly initialised Qwen2.5-1.5B configuration (`gpu_model.py`) in bfloat16, every layer checkpointed; a
step is 64 rollouts of 8 prompts: a prompt has 3,000 tokens, an answer 600. All rows are of one length, so that TRL's
own side has no padding and runs torch's causal attention at its best. Rollouts are fixed and the same for all;
generation is left out. Contenders:

    trl       GRPOTrainer as it is
    trees     TreeLogProbs in front of it: micro-batches as TRL deals them out
    groups    the same with keep_groups

each with `--batch` rows to a micro-batch; a batch of 64 is the whole step in one. A step is timed from the trainer's
own `on_step_begin` to `on_step_end`: forward, loss, backward of every micro-batch, clipping, AdamW.

First a gate: log-probs and entropies of one micro-batch under both, in bfloat16. No figure is printed on a red gate.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from importlib import metadata
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import torch
from gpu_model import LARGEST_ALLOWED, MEAN_ALLOWED, environment, make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from treepack.integrations.trl import TreeLogProbs

PROMPTS, ANSWERS = 8, 8
Sizes = tuple[int, int]  # tokens of a prompt and of an answer


class Fixed:
    """In place of tokenizing and generating: the same random ids for every contender."""

    sizes: Sizes
    vocabulary: int

    def _tokenize_prompts(self: Any, prompts: list[str]) -> Any:
        return [self._ids(int(prompt), 0, self.sizes[0]) for prompt in prompts], None, {}

    def _generate_single_turn(self: Any, prompt_ids: list[list[int]], *_: Any) -> Any:
        return [self._ids(1_000 + at, self.state.global_step, self.sizes[1]) for at in range(len(prompt_ids))], None

    def _ids(self, number: int, step: int, count: int) -> list[int]:
        return list(np.random.default_rng([number, step]).integers(10, self.vocabulary, count))


class TRL(Fixed, GRPOTrainer):
    pass


class Trees(TreeLogProbs, Fixed, GRPOTrainer):
    pass


class Groups(Trees):
    keep_groups = True


CONTENDERS = {"trl": TRL, "trees": Trees, "groups": Groups}


class Clock(TrainerCallback):
    """Milliseconds and peak GiB of each optimizer step."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.times: list[float] = []
        self.peaks: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.times.append((time.perf_counter() - self.start) * 1e3)
        self.peaks.append(torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0.0)


def tokenizer() -> PreTrainedTokenizerFast:
    """TRL wants one; nothing is tokenized."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(np.sin(at)) for at in range(len(completions))]


def make(name: str, arguments: argparse.Namespace, folder: str) -> Any:
    kind = CONTENDERS[name]
    model = make_model(arguments.device, 2 if arguments.tiny else 28, arguments.tiny, vocab_size=512)
    model.set_attn_implementation("sdpa")
    kind.sizes, kind.vocabulary = ((30, 6) if arguments.tiny else (3_000, 600)), model.config.vocab_size
    options = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=arguments.batch,
        gradient_accumulation_steps=PROMPTS * ANSWERS // arguments.batch,
        num_generations=ANSWERS,
        max_completion_length=kind.sizes[1],
        max_steps=1 + arguments.steps,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=1e-6,
        optim="adamw_torch_fused" if arguments.device == "cuda" else "adamw_torch",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=arguments.device == "cpu",
        shuffle_dataset=False,  # 8 prompts in each step
        seed=1,
    )
    prompts = datasets.Dataset.from_dict({"prompt": [str(number) for number in range(PROMPTS)] * (2 + arguments.steps)})
    return kind(model, rewards, args=options, train_dataset=prompts, processing_class=tokenizer())


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gate(arguments: argparse.Namespace, folder: str) -> bool:
    """Both functions on the same rows of one prompt."""
    found = []
    for name in ("trl", "trees"):
        trainer = make(name, arguments, folder)
        prompts, *_ = trainer._tokenize_prompts(["0"] * ANSWERS)
        answers, _ = trainer._generate_single_turn(prompts)
        ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)], device=arguments.device)
        with torch.no_grad():
            values, entropies, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), trainer.sizes[1], compute_entropy=True
            )
        found.append((values, entropies))
        del trainer
        free()
    green = True
    for what, theirs, ours in zip(("log-probs", "entropies"), *found, strict=True):
        apart = (theirs - ours).abs()
        fits = bool(apart.mean() <= MEAN_ALLOWED and apart.max() <= LARGEST_ALLOWED)
        print(f"gate: {what}: mean {apart.mean():.4f}, largest {apart.max():.3f}{'' if fits else '  RED'}")
        green &= fits
    return green


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--batch", type=int, default=8, help="rows to a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps that are timed, after one that is not")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that the script runs")
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    warnings.simplefilter("ignore")
    print(
        f"{environment(arguments.device)}, trl {metadata.version('trl')}, accelerate {metadata.version('accelerate')}"
    )
    for module in (datasets, pandas, pyarrow):
        if hasattr(module, "stand_in"):
            print(f"{module.__name__} is a stand-in: {module.stand_in}")
    with tempfile.TemporaryDirectory() as folder:
        if not gate(arguments, folder):
            return 1
        medians: dict[str, float] = {}
        print(f"\n{PROMPTS * ANSWERS} rollouts of {PROMPTS} prompts, {arguments.batch} rows to a micro-batch")
        print(f"  {'':8s} {'step ms':>9s} {'spread':>8s} {'peak GiB':>9s}")
        for name in arguments.contenders:
            clock = Clock(arguments.device)
            try:
                trainer = make(name, arguments, folder)
                trainer.add_callback(clock)
                trainer.remove_callback(PrinterCallback)
                trainer.train()
                del trainer
            except torch.OutOfMemoryError:
                print(f"  {name:8s} out of memory", flush=True)
                free()
                continue
            free()
            times = clock.times[1:]
            medians[name] = statistics.median(times)
            line = f"  {name:8s} {medians[name]:9.0f} {max(times) - min(times):8.0f} {max(clock.peaks[1:]):9.1f}"
            if name != "trl" and "trl" in medians:
                line += f"  {medians['trl'] / medians[name]:.2f} times as fast as trl"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
