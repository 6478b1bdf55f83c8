"""Gradient checkpointing of both kinds, torch.compile, PEFT, DDP and Trainer around a model on packed trees."""

import copy
import pickle
import threading
import time

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import alone_log_probs, gradients, largest_difference, packed_log_probs, shared_samples, tiny
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import treepack
from treepack import term_log_probs
from treepack.integrations.collator import tree_batch
from treepack.integrations.transformers import model_inputs

FAMILIES = ["qwen2", "gemma2", "gpt_oss"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family, reentrant):
    """CASES 24: the tree reaches the recomputation too; same values and gradients as without."""
    model = tiny(family).train()
    samples = shared_samples(sets=True)
    plain = packed_log_probs(model, samples)
    expected = gradients(model, plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    values = packed_log_probs(model, samples)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    assert largest_difference(gradients(model, values), expected) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_all_of_it_in_a_checkpoint(reentrant):
    """The first call of a model compares its logits, the recomputation does not: nothing of that may be saved."""
    model = tiny("qwen2")
    tree = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    values = checkpoint(lambda x: term_log_probs(model, tree) + x, x, use_reentrant=reentrant)
    values.sum().backward()
    expected = tiny("qwen2")
    term_log_probs(expected, tree).sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compile(family):
    """One graph, trees of several lengths, no graph break; values and gradients as without."""
    samples = shared_samples()
    model = tiny(family)
    plain = packed_log_probs(model, samples, {"max_tokens": 30})
    expected = gradients(model, plain)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    values = packed_log_probs(compiled, samples, {"max_tokens": 30})
    assert largest_difference(values, plain) < 1e-12
    assert largest_difference(gradients(model, values), expected) < 1e-7
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_autocast(family):
    """Rotary embeddings leave float32 there and projections bfloat16: both meet in attention. As far from float64 as
    each sample alone under the same autocast, by transformers' own attention."""
    samples = shared_samples(sets=True)
    exact = torch.cat(packed_log_probs(tiny(family), samples))
    model, stock = (tiny(family, torch.float32) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        packed = torch.cat(packed_log_probs(model, samples))
        alone = torch.cat(alone_log_probs(stock, samples, "eager"))
    loss = packed.sum()
    loss.backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters()
    )
    off, allowed = ((x.double() - exact).abs().max() for x in (packed, alone))
    assert 1e-4 < off < 2 * allowed


def test_compiled_forward():
    model = tiny("qwen2")
    tree = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    expected = term_log_probs(copy.deepcopy(model), tree)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.allclose(term_log_probs(model, tree), expected)
    torch.compiler.reset()


def test_one_model_in_two_threads():
    """A scoring server: each call gets the hidden states of its own tree."""
    model = tiny("qwen2")
    trees, expected = [], []
    for shift in (0, 7):
        samples = [dict(s, input_ids=(s["input_ids"] + shift) % 64) for s in shared_samples()]
        trees.append(treepack.pack(samples, max_tokens=256)[0].to("cpu"))
        expected.append(term_log_probs(model, trees[-1]).detach())
    model.lm_head.register_forward_hook(lambda *_: time.sleep(0.002))  # a head as slow as a real one
    wrong = []

    def score(at):
        with torch.no_grad():
            for _ in range(20):
                wrong.append((term_log_probs(model, trees[at]) - expected[at]).abs().max() > 1e-9)

    threads = [threading.Thread(target=score, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 40
    assert not any(wrong)


def test_calls_beside_a_call():
    """The model called within its own forward, and plainly after its layers or by another thread: each call gets its
    own hidden states."""
    model = tiny("qwen2")
    tree, other = (treepack.pack(shared_samples(seed=seed), max_tokens=256)[0].to("cpu") for seed in (0, 1))
    expected = term_log_probs(model, tree)
    nested, again = [], []

    def within(*_):
        if not again:
            again.append(True)
            nested.append(term_log_probs(model, other))
            if len(nested) > 1:
                model(**model_inputs(other))
            again.clear()

    for hooked in (model.model.layers[0], model.lm_head):
        hook = hooked.register_forward_hook(within)
        assert torch.equal(term_log_probs(model, tree), expected)
        hook.remove()
    assert torch.equal(nested[0], term_log_probs(model, other))

    def elsewhere(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: model(**model_inputs(other)))
            thread.start()
            thread.join()

    hook = model.model.layers[0].register_forward_hook(elsewhere)
    assert torch.equal(term_log_probs(model, tree), expected)
    hook.remove()


def test_compiled_before_the_hook():
    """Hooks are compiled in: a model that has run before gets an error that says what to do, and then works."""
    model = tiny("llama")
    tree = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(**model_inputs(tree), logits_to_keep=1)
    with pytest.raises(ValueError, match=r"torch\.compiler\.reset\(\)"):
        term_log_probs(compiled, tree)
    torch.compiler.reset()
    assert torch.allclose(term_log_probs(compiled, tree), term_log_probs(model, tree))
    torch.compiler.reset()


def test_lora_and_its_reference():
    """Adapters train, the base does not; reference log-probs come from the same model with the adapter off."""
    samples = shared_samples()
    base = tiny("qwen2")
    reference = packed_log_probs(base, samples)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    packed = packed_log_probs(model, samples)
    ours = gradients(model, packed)
    alone = alone_log_probs(model.get_base_model(), samples)
    theirs = gradients(model, alone)
    assert ours
    assert all("lora" in name for name in ours)
    assert largest_difference(packed, alone) < 1e-9
    assert largest_difference(ours, theirs) < 1e-6
    with model.disable_adapter(), torch.no_grad():
        off = packed_log_probs(model, samples)
    assert largest_difference(off, reference) < 1e-12
    assert largest_difference(off, packed) > 1e-3


def test_lora_dropout_and_prompts_are_refused():
    tree = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    model = get_peft_model(tiny("qwen2"), LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)).train()
    with pytest.raises(ValueError, match=r"lora_dropout.*= 0.1"):
        term_log_probs(model, tree)
    prompts = get_peft_model(tiny("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="adds virtual tokens"):
        term_log_probs(prompts, tree)


def test_ddp(tmp_path):
    """The wrapper's own forward runs, so that it sees the step and reduces the gradients."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        samples = shared_samples()
        model = tiny("qwen2")
        expected = gradients(model, packed_log_probs(model, samples))
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        forwards = []
        wrapped.register_forward_hook(lambda *_: forwards.append(1))
        got = gradients(model, packed_log_probs(wrapped, samples, {"max_tokens": 256}))
        assert forwards
        assert largest_difference(got, expected) < 1e-7
    finally:
        torch.distributed.destroy_process_group()


class LogProbTrainer(Trainer):
    """The policy gradient of packed trees; a batch is one tree."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tree = inputs["tree"].to(self.args.device)
        loss = -(term_log_probs(model, tree) * tree.terms["advantage"]).sum()
        return loss / (num_items_in_batch or tree.num_terms)


class LabelTrainer(Trainer):
    """A trainer that calls the model on what the collator gives, and wants logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("shift_labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("kind", "bf16"), [(LogProbTrainer, False), (LogProbTrainer, True), (LabelTrainer, False)])
def test_trainer(kind, bf16, tmp_path):
    """Columns survive: trees, or the keyword tensors of a tree, reach the model. With `bf16` the model's own forward
    runs under autocast and returns float32."""
    packed = treepack.pack(shared_samples(), max_tokens=40, branching="label")

    def collate(batch):
        (tree,) = batch
        if kind is LogProbTrainer:
            return tree_batch(tree)
        device = tree.to("cpu")
        names = ("input_ids", "position_ids", "subtree_end", "use_cache")
        return {n: v for n, v in model_inputs(device).items() if n in names} | {"shift_labels": device.shift_labels}

    model = tiny("qwen2", dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=1, remove_unused_columns=False,
        report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, learning_rate=1e-2, bf16=bf16)  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=list(packed), data_collator=collate)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 3
    assert all(torch.isfinite(torch.tensor(losses)))
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_models_still_copy_and_pickle():
    """What term_log_probs leaves on a model is one hook, which copies with it and keeps no tensor."""
    model = tiny("qwen2", dtype=torch.float32)
    tree = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    first = term_log_probs(model, tree)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(term_log_probs(other, tree), first)
        assert len(other.model._forward_hooks) == len(model.model._forward_hooks)
    assert torch.equal(term_log_probs(model, tree), first)
    assert model.model._treepack_capture.hidden is None
