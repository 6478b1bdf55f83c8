"""DDP and FSDP2 around models with layers that carry a state: every rank ends with the average of all gradients."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import model_ranks_worker  # noqa: E402
from tiny_hybrids import RUN  # noqa: E402
from tiny_models import tiny  # noqa: E402

WORLD = 2
WRAPPERS = ("ddp", "fsdp2")
LONG = [
    pytest.param(family, marks=pytest.mark.long) for family in ("lfm2", "falcon_h1", "olmo_hybrid") if family in RUN
]


@pytest.mark.parametrize("family", ["qwen3_5_text", *LONG])
def test_gradients_are_averaged(family, tmp_path):
    arguments = (WORLD, str(tmp_path), "cpu", torch.float64, family, WRAPPERS)
    torch.multiprocessing.spawn(model_ranks_worker.run, arguments, nprocs=WORLD)
    model = tiny(family)
    for rank in range(WORLD):
        model_ranks_worker.step(model, model_ranks_worker.tree_of(rank))
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt")
        for wrapper in WRAPPERS:
            for name, parameter in model.named_parameters():
                assert (found[wrapper][name] - parameter.grad / WORLD).abs().max() < 1e-7, (wrapper, name)
