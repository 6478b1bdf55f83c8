"""One tree over 2 and 4 ranks, by rows and by heads: values and gradients are those of one process, in float64."""

import multiprocessing
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import shards_worker  # noqa: E402
from tiny_models import shared_samples, tiny  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import treepack  # noqa: E402

WORLDS = (2, 4)
#: For all ranks of both runs: what takes longest to import.
IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "peft",
    "transformers.models.qwen2.modeling_qwen2",
    "treepack.integrations.transformers",
]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def ranks(request, tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("shards")
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    torch.multiprocessing.start_processes(
        shards_worker.run, (request.param, str(folder)), nprocs=request.param, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def test_values_and_gradients_are_those_of_one_process(ranks):
    differences = {}
    for found in ranks:
        for case, off in found.items():
            if isinstance(off, dict):
                differences |= {f"{case}: {what}": value for what, value in off.items()}
    assert len(differences) > 100
    assert {case: off for case, off in differences.items() if not off < 1e-12} == {}


REFUSED = {
    "two dimensions": r'mesh has 2 dimensions \(dp, sp\); one of them is needed: mesh\["sp"\]',
    "no mesh": "mesh is a ProcessGroup; one dimension of a DeviceMesh is needed",
    "shard without mesh": "shard='rows' says how the ranks of a mesh run one tree, and there is no mesh",
    "another form": "shard='columns'; allowed are 'rows' and 'heads'",
    "forms that differ": "rank 1 of the mesh dimension 'sp' has shard='heads', rank 0 'rows'",
    "another tree": "rank 1 of .* holds another tree than rank 0: its own has 42 positions and 68 terms",
    "a tree on the host": "the tree holds NumPy arrays|rank 1 of the mesh dimension 'sp' could not take its part",
    "several trees": "one PackedTree is needed, not a list of 2: loop over it",
    "a cut tree": "packed with cut=True and has 2 ranges",
    "heads": '3 attention heads, which . ranks cannot part evenly; use shard="rows"',
    "key heads": '3 key and value heads: . ranks neither divide them nor are a multiple of them; use shard="rows"',
    "whole forests": "impl='flex' takes whole forests; shard=\"rows\" runs by",
    "rotary embeddings": "dynamic rotary embeddings, which change above 8 tokens",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_on_every_rank(ranks, case):
    """So that none waits for another."""
    for found in ranks:
        assert re.search(REFUSED[case], found[case]), found[case]


@pytest.fixture(scope="module")
def one_rank():
    """A mesh dimension of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shard", shards_worker.FORMS)
def test_a_dimension_of_one_rank(one_rank, shard):
    model, tree = tiny("qwen2"), treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    with torch.no_grad():
        found = treepack.term_log_probs(model, tree, mesh=one_rank, shard=shard)
        assert (found - treepack.term_log_probs(model, tree)).abs().max() < 1e-12


def test_what_a_rank_cannot_run(one_rank):
    tree = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    with pytest.raises(ValueError, match=r"a state \(Qwen3NextGatedDeltaNet\), which does not go from rank to rank"):
        treepack.term_log_probs(tiny("qwen3_next"), tree, mesh=one_rank)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM is compiled \(torch.compile\)"):
        treepack.term_log_probs(torch.compile(tiny("qwen2")), tree, mesh=one_rank)
