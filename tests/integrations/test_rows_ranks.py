"""Ranks whose rows take different numbers of trees: with a group, each runs its model as often as the others."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import rows_worker  # noqa: E402
from tiny_models import shared_samples, tiny  # noqa: E402

import treepack  # noqa: E402

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rows_worker.run, (WORLD, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", rows_worker.WAYS)
def test_gradients_are_those_of_all_rows(ranks, way):
    """Rank 1 has few rows, or none: the fully sharded model would wait for it forever."""
    budget = rows_worker.WAYS[way][1]
    trees = 1 if budget is None else len(treepack.pack(shared_samples(seed=0), max_tokens=budget))
    assert trees == (1 if budget is None else 3)
    assert [found[way]["forwards"] for found in ranks] == [trees] * WORLD
    model = tiny("qwen2")
    for rank in range(WORLD):
        values = rows_worker.values(model, *rows_worker.rows(way, rank))
        assert (ranks[rank][way]["values"] - values).abs().max() < 1e-10
        rows_worker.loss(values).backward()
    for found in ranks:
        for name, parameter in model.named_parameters():  # norms are float32 in any model
            off = (found[way]["gradients"][name] - parameter.grad / WORLD).abs().max()
            assert off < 1e-6 * max(1.0, parameter.grad.abs().max()), name
