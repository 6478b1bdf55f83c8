"""What goes wrong in a loop over ranges is said: which range, what was done, what is allowed."""

import re
from contextlib import contextmanager

import pytest
import tiny_hybrids  # noqa: F401
import torch
from helpers import says
from range_trees import cut_at, gradients, whole
from tiny_models import shared_samples, tiny

import treepack
from treepack.integrations.transformers import RangeRunner


@pytest.fixture
def model():
    return tiny("qwen2")


@pytest.fixture
def runner(model):
    return RangeRunner(model, cut_at(whole(shared_samples()), 3, 9, 14))


@contextmanager
def refused(*parts):
    """A block that must raise a ValueError which says all of these."""
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        yield
    says(error, *parts)


def test_out_of_order(runner):
    with refused("range 0 of 4", "part.term_log_probs() was not called before the next range"):
        list(runner)
    with refused("range 0 of 4", "part.backward(loss) was not called before the next range"):
        for part in runner:
            part.term_log_probs()
    kept = []
    for part in runner:
        kept.append(part)
        part.backward(part.term_log_probs().sum())
        if part.index:
            with refused("range 0 of 4 is not at its turn", f"range {part.index} of 4 is the present one"):
                kept[0].term_log_probs()
    with refused("range 3 of 4 is not at its turn: the loop has ended"):
        part.backward()


def test_twice(runner):
    for part in runner:
        loss = part.term_log_probs().sum()
        with refused(f"range {part.index} of 4 has run", "ask for all that you need in one call"):
            part.term_log_probs(entropy=True)
        part.backward(loss)
        with refused(f"range {part.index} of 4 has had its backward", "once for each range"):
            part.backward(loss)


def test_losses_that_are_none(runner):
    for part in runner:
        if part.index == 0:
            with refused("range 0 of 4", "it has a loss but has not run"):
                part.backward(torch.zeros((), requires_grad=True))
        log_probs = part.term_log_probs()
        for loss, has in ((log_probs.new_zeros(3), "a tensor (3,)"), (1.5, "a float")):
            with refused(f"range {part.index} of 4: its loss is {has}", "one number"):
                part.backward(loss)
        if part.num_terms:
            with refused(f"range {part.index} of 4: its loss does not depend on its log-probs"):
                part.backward(log_probs.sum().detach())
        part.backward(log_probs.sum())


def test_a_loss_that_goes_its_own_way(runner):
    loop = iter(runner)
    with refused("range 0 of 4", "call part.backward(loss) in place of loss.backward()"):
        next(loop).term_log_probs().sum().backward()
    with pytest.warns(UserWarning, match="ended at range 0 of 4"):
        loop.close()
    total = 0
    with refused("the loss of range", "goes back through it", "loss.detach()"):
        for part in runner:
            total = total + part.term_log_probs().sum()
            part.backward(total)


def test_parameters_that_change(runner, model):
    with refused("range 1 of 4: parameters of the model have changed", "optimizer.step() after the loop"):
        for part in runner:
            part.backward(part.term_log_probs().sum())
            with torch.no_grad():
                model.lm_head.weight.mul_(0.5)


def test_gradients_on_and_off(runner):
    with refused("range 1 of 4: gradients are on, and were not so for the first range"):
        for part in runner:
            with torch.set_grad_enabled(part.index > 0):
                part.term_log_probs()
    with torch.no_grad(), refused("range 0 of 4 ran without gradients"):
        for part in runner:
            part.term_log_probs()
            part.backward()


def test_a_loop_that_is_left(runner):
    loop = iter(runner)
    next(loop).backward()
    with pytest.warns(UserWarning, match="ended at range 0 of 4: gradients are those of a part of the tree"):
        loop.close()


def test_the_last_range_ends_it(runner, model):
    """A loop that is left after the last range lacks nothing."""
    for part in runner:
        part.backward(part.term_log_probs().sum())
    wanted = gradients(model)
    for part in runner:
        part.backward(part.term_log_probs().sum())
        if part.index == len(runner) - 1:
            break
    found = gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_trees(model):
    packed = treepack.pack(shared_samples(), max_tokens=9, cut=True)
    with pytest.raises(TypeError, match=r"tree\.to\(device\)"):
        RangeRunner(model, packed[0])
    with pytest.raises(TypeError, match="a PackedTree is needed, not a Packed"):
        RangeRunner(model, packed)
    tree = packed[0].to("cpu")
    ranges = len(tree.ranges)
    with refused(f"has {ranges} ranges", f"{tree.num_tokens} positions", "loop over RangeRunner(model, tree)"):
        treepack.term_log_probs(model, tree)
    runner = RangeRunner(model, tree)
    with refused("the tree was moved from cpu"):
        for part in runner:
            part.term_log_probs()
            runner.tree = tree.to("meta")
            part.backward()


def test_models(model):
    tree = treepack.pack(shared_samples(), max_tokens=9, cut=True)[0].to("cpu")
    with refused("is compiled"):
        RangeRunner(torch.compile(model, backend="eager"), tree)
    with refused("attn_implementation='sdpa'"):
        RangeRunner(tiny("qwen2", attention="sdpa"), tree)
    with refused("impl='flex' takes whole forests", "'triton'", "'reference'"):
        RangeRunner(model, tree, impl="flex")
    with refused("Qwen3NextForCausalLM has layers that carry a state (Qwen3NextGatedDeltaNet)", "pack without cut"):
        RangeRunner(tiny("qwen3_next"), tree)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4, "factor": 2.0}
    scaled = tiny("llama", rope_parameters=rope | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4})
    long = [{"input_ids": [1, 2, 3, 4, 5, x]} for x in (1, 2, 3)]
    with refused("longrope rotary embeddings", "above 4 tokens", "a sample of 6", "pack without cut"):
        RangeRunner(scaled, treepack.pack(long, max_tokens=4, cut=True)[0].to("cpu"))


def test_wrappers(model):
    tree = treepack.pack(shared_samples(), max_tokens=9, cut=True)[0].to("cpu")

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    class DeepSpeedEngine(Wrapper):
        pass

    class DistributedDataParallel(Wrapper):
        static_graph = True

    with refused("DistributedDataParallel(static_graph=True)", "leave static_graph out"):
        RangeRunner(DistributedDataParallel(model), tree)
    with refused("DistributedDataParallel is within Wrapper", "outermost"):
        RangeRunner(Wrapper(DistributedDataParallel(model)), tree)
    with refused("DeepSpeedEngine does not run a tree by ranges", "engine.backward"):
        RangeRunner(DeepSpeedEngine(model), tree)
