"""DDP and FSDP2 around a model: every rank ends with the average of all ranks' gradients, the head's too."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import model_ranks_worker  # noqa: E402
from tiny_models import tiny  # noqa: E402

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(model_ranks_worker.run, (WORLD, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


WRAPPERS = [
    *model_ranks_worker.WRAPPERS,
    *(f"ranges, {name}{more}" for name in model_ranks_worker.BY_RANGE for more in ("", ", checkpointed")),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_averaged(ranks, wrapper):
    """The hidden states leave the model beside its outputs, at which wrappers start to gather gradients."""
    model = tiny("qwen2")
    for rank in range(WORLD):
        model_ranks_worker.step(model, model_ranks_worker.tree_of(rank))
    for found in ranks:
        trained = dict(model.named_parameters()).keys()
        assert found[wrapper].keys() == ({"lm_head.weight"} if "head alone" in wrapper else trained)
        for name, parameter in model.named_parameters():
            if name not in found[wrapper]:  # frozen
                continue
            assert (found[wrapper][name] - parameter.grad / WORLD).abs().max() < 1e-10, name


@pytest.mark.parametrize("wrapper", model_ranks_worker.WRAPPERS)
def test_a_leak_is_found_on_every_rank(ranks, wrapper):
    """The first use runs at the same place on all of them, so that shards are gathered; the message is the same."""
    said = {found["refusals"][wrapper] for found in ranks}
    assert len(said) == 1
    assert "part (Smooth) leaks between samples" in said.pop()
