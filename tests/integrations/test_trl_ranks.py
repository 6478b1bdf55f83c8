"""TRL's GRPO trainer on two ranks: on trees it ends where it ends without, and on both ranks in the same place."""

import socket

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import trl_trainers as both  # noqa: E402
import trl_worker  # noqa: E402

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    model = both.folder_of(tmp_path_factory.mktemp("model"), "qwen2")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(trl_worker.run, (WORLD, port, str(folder), model), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", trl_worker.RUNS)
def test_ranks_end_where_trl_ends(ranks, name):
    for found in ranks:
        theirs, ours = found[name]
        both.compare_parameters(theirs[0], ours[0])
    both.compare(*ranks[0][name])  # the first rank logs for all
    both.compare_parameters(*(found[name][1][0] for found in ranks))
