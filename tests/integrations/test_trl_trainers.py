"""TRL's GRPO and RLOO trainers on trees: three steps end where TRL's own end, and all that is logged is equal."""

import warnings
from itertools import chain

import pytest

pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")

import torch
import trl_trainers as both
from peft import LoraConfig
from transformers import GenerationMixin
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl_trainers import GRPOTrainer

from treepack.integrations.transformers import rows as tree_rows
from treepack.integrations.trl import TreeLogProbs
from treepack.integrations.trl.groups import grouped, window_of

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
long = pytest.mark.long


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved tiny model of each family with these options."""
    made = {}

    def folder(family, **more):
        key = family, *more.items()
        if key not in made:
            made[key] = both.folder_of(tmp_path_factory.mktemp(family), family, **more)
        return made[key]

    return folder


@pytest.fixture
def run(monkeypatch):
    """Trains both and compares them, after a look that trees were run, and shared something."""
    trees = []
    packed = tree_rows._trees
    monkeypatch.setattr(tree_rows, "_trees", lambda *args: trees.append(packed(*args)) or trees[-1])

    def run(folder, kind="grpo", attributes=(), **options):
        theirs, ours = both.classes(kind, **dict(attributes))
        expected = both.train(both.make(theirs, folder, kind, **options))
        assert not trees
        both.compare(expected, both.train(both.make(ours, folder, kind, **options)))
        every = [tree for of_batch in trees for tree in of_batch]
        assert sum(tree.num_tokens for tree in every) < 0.95 * sum(int(tree.position_samples.sum()) for tree in every)
        trees.clear()

    return run


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_three_steps(run, folders, kind):
    """With a reference model, several micro-batches, old log-probs, and a generation that is used twice."""
    run(folders("qwen2"), kind, beta=0.1, num_iterations=2, steps_per_generation=2)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=long)])
def test_a_mixture_of_experts(run, folders, kind):
    """Its router's loss is in TRL's by default."""
    run(folders("qwen3_moe", router_aux_loss_coef=0.1), kind, beta=0.1)


@long
def test_a_config_that_asks_for_router_logits(run, folders):
    """The same as asking TRL; and TRL's own coefficient of 0 takes the loss out, whatever the config says."""
    folder = folders("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1)
    run(folder, beta=0.1)
    run(folder, router_aux_loss_coef=0.0)


def test_a_sliding_window(run, folders):
    run(folders("qwen2_window"))


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=long)])
def test_lora_as_its_own_reference(run, folders, kind):
    peft = LoraConfig(**LORA, lora_dropout=0.1)
    run(folders("qwen2"), kind, peft=peft, beta=0.1, disable_dropout=True, learning_rate=1.0)


@long
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "cispo", "luspo", "sapo", "vespo"])
def test_losses(run, folders, loss_type):
    run(folders("qwen2"), loss_type=loss_type, max_steps=2, entropy_coef=0.01, top_entropy_quantile=0.7)


@long
def test_a_trainer_derived_from_it(run, folders, monkeypatch):
    monkeypatch.setitem(both.KINDS, "gmpo", (GMPOTrainer, GMPOConfig))
    run(folders("qwen2"), "gmpo", beta=0.1)


@long
def test_options_of_the_forward_pass(run, folders):
    """Checkpointing runs layers again in the backward pass; a head in float32 stays in it under autocast."""
    run(folders("qwen2"), gradient_checkpointing=True, beta=0.1)
    run(folders("qwen2"), attributes={"max_tokens": 40}, beta=0.1, mask_truncated_completions=True)
    options = {"bf16": True, "cast_lm_head_to_fp32": True, "max_steps": 1}
    half = [both.train(both.make(one, folders("qwen2"), **options)) for one in both.classes()]
    both.compare(*half, close=3e-2)


# --- groups ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_prompt_come_together():
    prompts = torch.tensor([[0, 7], [0, 8], [3, 7], [0, 7], [0, 8], [3, 7]])
    mask = torch.tensor([[0, 1], [0, 1], [1, 1], [0, 1], [0, 1], [1, 1]])
    prompts[3, 0] = 9  # padding is no part of a prompt
    whole = {"prompt_ids": prompts, "prompt_mask": mask, "advantages": torch.arange(6), "names": list("abcdef")}
    batches = [{k: v[i : i + 2] for k, v in whole.items()} | {"num": torch.tensor(9), "old": None} for i in (0, 2, 4)]
    made = grouped(batches)
    assert [batch["names"] for batch in made] == [["a", "d"], ["b", "e"], ["c", "f"]]
    assert [batch["advantages"].tolist() for batch in made] == [[0, 3], [1, 4], [2, 5]]
    assert all(batch["num"] == 9 and batch["old"] is None for batch in made)
    assert made[2]["prompt_ids"].tolist() == [[3, 7], [3, 7]]
    with pytest.raises(ValueError, match="column 'names' has 3 values for 6 rows"):
        grouped([batch | {"names": ["a"]} for batch in batches])


def test_the_micro_batches_of_a_step():
    assert [window_of(*pair) for pair in ((4, 4), (8, 2), (2, 8), (1, 1))] == [4, 2, 2, 1]
    with pytest.raises(ValueError, match=r"steps_per_generation=6 and gradient_accumulation_steps=4: one must divide"):
        window_of(6, 4)


@pytest.mark.parametrize(("steps", "accumulation"), [(4, 4), (4, 2)])
def test_groups_are_kept(folders, steps, accumulation):
    """Each optimizer step has the rows that it has without, and so, where no loss is normalised in a micro-batch, its
    gradient; micro-batches have fewer prompts, and trees fewer positions."""
    seen = {}

    def watching(keep):
        class Watching(TreeLogProbs, both.Scripted, GRPOTrainer):
            keep_groups = keep

            def _compute_loss(self, model, inputs):
                rows = zip(inputs["prompt_ids"].tolist(), inputs["completion_ids"].tolist(), strict=True)
                seen.setdefault(keep, []).append([(tuple(prompt), tuple(answer)) for prompt, answer in rows])
                return super()._compute_loss(model, inputs)

        return Watching

    options = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": steps,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 4 if accumulation == 2 else 2,
        "loss_type": "dapo",
    }
    both.compare_parameters(
        *(both.train(both.make(watching(keep), folders("qwen2"), **options))[0] for keep in (False, True))
    )
    for start in range(0, 8, accumulation):
        before, after = (chain.from_iterable(seen[keep][start : start + accumulation]) for keep in (False, True))
        assert sorted(before) == sorted(after)
    prompts = {keep: sum(len({prompt for prompt, _ in batch}) for batch in found) for keep, found in seen.items()}
    assert prompts[True] < prompts[False]


# --- generation, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=long)])
def test_generation_runs_on_the_attention_that_the_model_came_with(folders, kind, monkeypatch):
    base = both.KINDS[kind][0]
    real, found = GenerationMixin.generate, []

    def generate(model, *args, **options):
        found.append(model.config._attn_implementation)
        return real(model, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    ours = type("Ours", (TreeLogProbs, base), {})
    trainers = [both.make(one, folders("qwen2"), kind, max_steps=2, beta=0.1) for one in (base, ours)]
    both.compare(*map(both.train, trainers))
    assert found == ["sdpa"] * 4
    assert [x.config._attn_implementation for x in (trainers[1].model, trainers[1].ref_model)] == ["treepack"] * 2


def test_evaluation(folders):
    ends = []
    for one in both.classes():
        trainer = both.make(one, folders("qwen2"), beta=0.1, per_device_eval_batch_size=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ends.append(trainer.evaluate(trainer.train_dataset.select(range(2))))
    for name in ("eval_loss", "eval_entropy", "eval_kl"):
        assert ends[1][name] == pytest.approx(ends[0][name], abs=1e-5), name


def test_what_is_refused(folders):
    folder = folders("qwen2")
    _, ours = both.classes()
    for message, options in (
        (r"use_liger_kernel=True: Liger's kernels", {"use_liger_kernel": True}),
        (r"steps_per_generation=3 and gradient_accumulation_steps=2", {"steps_per_generation": 3, "keep": True}),
        (r"lora_dropout.* = 0.1: a shared token would draw once", {"peft": LoraConfig(**LORA, lora_dropout=0.1)}),
        (r"attention_dropout = 0.1", {"model_options": {"attention_dropout": 0.1}}),
    ):
        kind = type("Ours", (ours,), {"keep_groups": True}) if options.pop("keep", False) else ours
        with pytest.raises(ValueError, match=message) as raised:
            both.make(kind, folder, **options)
        if "dropout" in message:
            assert "disable_dropout=True" in "".join(raised.value.__notes__)
    trainer = both.make(ours, folder)
    ids = torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="Ours was given pixel_values: packed trees run text alone"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, pixel_values=ids, num_images=None)


def test_classes_that_are_no_trainers():
    class Older:
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask):
            pass

    for bases, message in (
        ((), r"Ours has no _get_per_token_logps_and_entropies after TreeLogProbs.*trl 1.16.0"),
        ((Older,), r"takes no logits_to_keep, batch_size, compute_entropy, compute_aux_loss; .*trl 1.16.0"),
    ):
        with pytest.raises(TypeError, match=message):
            type("Ours", (TreeLogProbs, *bases), {})()
    with pytest.raises(TypeError, match=r"Ours has GRPOTrainer before TreeLogProbs.*class Ours\(TreeLogProbs, GRPOTr"):
        type("Ours", (GRPOTrainer, TreeLogProbs), {})
