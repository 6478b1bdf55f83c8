"""verl 0.9.1 with treepack switched on by its one line: equal to verl's own engines, on the CPU under gloo.

verl wants other versions of packages than these tests, so its ranks are processes of their own (`verl_worker.py`) that
see the folder `verl/` of the environment (where `make test` puts it) in front of all others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(os.environ.get("TREEPACK_VERL", Path(sys.prefix) / "verl"))
WORKER = Path(__file__).resolve().parents[1] / "verl_worker.py"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "verl").is_dir(),
    reason=f"verl is not in {FOLDER}: make test-verl (TREEPACK_VERL names another folder)",
)
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
FAMILIES = [f"{family} {strategy}" for family in ("qwen2", "qwen3_moe") for strategy in ("fsdp", "fsdp2")]
#: (ranks, job) of the comparisons of an actor.
ACTORS = [(world, job) for world in (1, 2) for job in FAMILIES] + [(1, "checkpointing")]
HALF = [(1, "bf16 fsdp"), (1, "bf16 fsdp2")]
ADAPTERS = [(1, "lora fsdp2"), (2, "lora fsdp")]
CRITICS = [(1, "critic fsdp"), (2, "critic fsdp2")]
REST = [(1, "fixed"), (1, "sft"), (1, "refused"), (2, "unequal")]
if not LONG:  # every family, every strategy and both numbers of ranks are still met
    ACTORS = [(1, "qwen2 fsdp2"), (1, "qwen3_moe fsdp"), (2, "qwen2 fsdp"), (2, "qwen3_moe fsdp2")]
    HALF = HALF[1:]


@pytest.fixture(scope="module")
def found(treepack_data, tmp_path_factory):
    """What each rank has found: found[ranks][rank][job]. One start of the processes for each number of ranks."""
    folder = tmp_path_factory.mktemp("verl")
    rollouts = str(treepack_data / "data" / "qwen_math_n8.npz")
    # A path of treepack's own: it may be a checkout that is not installed.
    paths = [str(FOLDER), str(WORKER.parent), *[path for path in sys.path if path]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    out = {}
    for world in (1, 2):
        jobs = [job for ranks, job in [*ACTORS, *HALF, *ADAPTERS, *CRITICS, *REST] if ranks == world]
        command = [sys.executable, str(WORKER), str(folder), rollouts, str(world), *jobs]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        out[world] = [torch.load(folder / f"{world}_{rank}.pt", weights_only=False) for rank in range(world)]
    return out


def close(found, wanted, tolerance=1e-5):
    """Within a tolerance of the value, or of 1 where it is smaller."""
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    assert found.shape == wanted.shape
    off = (found - wanted).abs() / wanted.abs().clamp(min=1)
    assert not off.numel() or off.max() < tolerance


def same_step(one):
    """Losses of the micro-batches, every metric, the norm and every gradient."""
    ours, theirs = one["ours"], one["theirs"]
    close(ours["loss"], theirs["loss"])
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    for name, values in theirs["metrics"].items():
        close(ours["metrics"][name], values)
    assert ours["over ranks"].keys() == theirs["over ranks"].keys()
    for name, value in theirs["over ranks"].items():
        close(ours["over ranks"][name], value)
    close(ours["norm"], theirs["norm"])
    same_gradients(ours, theirs)


def same_gradients(ours, theirs):
    assert len(ours["gradients"]) == len(theirs["gradients"]) > 0
    assert any(gradient.numel() and gradient.abs().max() > 1e-3 for gradient in theirs["gradients"])
    for gradient, wanted in zip(ours["gradients"], theirs["gradients"], strict=True):
        close(gradient, wanted)


@pytest.mark.parametrize(("world", "job"), ACTORS)
def test_actor(found, world, job):
    ranks = [rank[job] for rank in found[world]]
    for one in ranks:
        assert one["class"] == "TreeEngineWithLMHead"  # what verl itself looked up
        assert one["positions"] < 0.7 * one["tokens"]
        for step in ("step 0", "step 1"):
            # An entropy is the difference of two numbers of the size of the logits, 15 here: their last bits are 1e-6.
            for name, tolerance in (("log_probs", 1e-5), ("entropy", 2e-5)):
                close(*one[step][name], tolerance)
                assert torch.equal(*one[step][f"{name} offsets"])
            assert one[step]["ours"]["metrics"]["actor/pg_clipfrac"] != [0.0] * one[step]["trees"]
            same_step(one[step])
            # As verl would have cut it: other micro-batches, the same sum and gradients.
            own, ours = one[step]["own split"], one[step]["ours"]
            assert len(own["loss"]) > len(ours["loss"]) > 1
            close(sum(ours["loss"]), sum(own["loss"]))
            for name in ("actor/pg_loss", "actor/entropy_loss", "kl_loss"):  # sums; the others are means over cuts
                close(ours["over ranks"][name], own["over ranks"][name])
            same_gradients(ours, own)
    assert len({(one["step 0"]["trees"], one["step 1"]["trees"]) for one in ranks}) == 1


@pytest.mark.parametrize(("world", "job"), HALF)
def test_half_precision(found, world, job):
    """As near as bfloat16 lets two ways of adding up be."""
    one = found[world][0][job]["step 0"]
    ours, theirs = one["log_probs"][1], one["log_probs"][0]
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.02
    close(sum(one["ours"]["loss"]), sum(one["theirs"]["loss"]), 0.01)
    close(one["ours"]["norm"], one["theirs"]["norm"], 0.05)


@pytest.mark.parametrize(("world", "job"), ADAPTERS)
def test_adapter_and_reference(found, world, job):
    for rank in found[world]:
        one = rank[job]
        close(*one["log_probs"])
        close(*one["reference"])
        assert (one["log_probs"][0] - one["reference"][0]).abs().max() > 0.01
        same_step(one)


@pytest.mark.parametrize(("world", "job"), CRITICS)
def test_critic(found, world, job):
    for rank in found[world]:
        one = rank[job]
        assert one["class"] == "TreeEngineWithValueHead"
        close(*one["values"])
        same_step(one)


def test_fixed_micro_batches(found):
    one = found[1][0]["fixed"]
    close(*one["log_probs"])
    assert len(one["ours"]["loss"]) == 2
    same_step(one)


def test_supervised_loss_under_a_softcap(found):
    same_step(found[1][0]["sft"])


def test_refusals(found):
    said = found[1][0]["refused"]
    wanted = {
        "ulysses": "ulysses_sequence_parallel_size is 2",
        "fused kernels": "use_fused_kernels is on",
        "fused kernels in the batch": "use_fused_kernels is on in the batch",
        "grouper": "use_prefix_grouper is on",
        "grouper in the batch": "use_prefix_grouper is on",
        "top-k distillation": "top-k",
        "sum of squares": "calculate_sum_pi_squared",
        "pairs": "force_group_size is 2",
        "images": "multi_modal_inputs",
        "axes": "position_ids have several axes",
        "chunks": "8 samples in micro-batches of micro_batch_size_per_gpu=3",
    }
    assert said.keys() == wanted.keys()
    for name, text in wanted.items():
        assert text in said[name], said[name]


def test_what_one_rank_cannot_do_is_raised_on_all(found):
    first, second = (rank["unequal"] for rank in found[2])
    assert "another rank has a sample of 97 tokens; max_token_len_per_gpu allows 60" in first["too long"]
    assert "sample 6: it has 97 tokens; max_token_len_per_gpu allows 60" in second["too long"]
    assert first["too few"] == second["too few"]
    assert "a rank has 2 samples and another needs 4 trees" in first["too few"]
    assert "another rank cannot pack its samples" in first["no id"]
    assert "sample 0" in second["no id"]
    assert "-1" in second["no id"]
