"""`ranks=` from a mesh: data parallelism goes over one dimension, and the ranks of the others get the same trees.

        sp 0    sp 1
dp 0    0       1        one tree for ranks 0 and 1
dp 1    2       3        another for ranks 2 and 3
"""

import pickle

import numpy as np
import pytest

import treepack

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from treepack.distributed import align  # noqa: E402

SAMPLES = [{"input_ids": np.array([g, g, g, i])} for g in range(4) for i in range(4)]


def on_rank(rank, ask, shape=(2, 2), names=("dp", "sp")):
    """What a process of this rank finds; a backend that sends nothing stands for the others."""
    from torch.distributed.device_mesh import init_device_mesh

    world = int(np.prod(shape))
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=rank, world_size=world)
    try:
        return ask(init_device_mesh("cpu", shape, mesh_dim_names=names))
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_that_differ_along_sp_get_the_same_trees():
    def ask(mesh):
        packed = treepack.pack(SAMPLES, max_tokens=12, ranks=mesh["dp"])
        assert packed.ranks == 2
        assert pickle.loads(pickle.dumps(packed)).ranks == 2  # a number: no mesh is kept
        return [tree.buffer.tobytes() for tree in packed.for_rank(mesh["dp"])]

    wanted = treepack.pack(SAMPLES, max_tokens=12, ranks=2)
    found = [on_rank(rank, ask) for rank in range(4)]
    assert found == [[tree.buffer.tobytes() for tree in wanted.for_rank(rank)] for rank in (0, 0, 1, 1)]
    assert found[0] != found[2]


def test_streams():
    def ask(mesh):
        packer = treepack.Packer(max_tokens=12, ranks=mesh["dp"])
        (trees,) = [trees for sample in SAMPLES[:4] for trees in packer.add(sample)] + packer.flush()
        return packer.ranks, len(trees)

    assert on_rank(1, ask, shape=(4, 2)) == (4, 4)


def test_align_takes_the_dimension():
    def ask(mesh):
        groups = []
        align([], mesh["dp"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather_object", lambda out, x, group: groups.append(group))
            with pytest.raises(TypeError):  # nothing was gathered
                align([], mesh["dp"])
        return groups == [mesh["dp"].get_group()]

    assert on_rank(2, ask)


def test_what_is_no_dimension_of_data_is_refused():
    def ask(mesh):
        said = []
        packed = treepack.pack(SAMPLES, max_tokens=12, ranks=4)
        for call in (
            lambda: treepack.pack(SAMPLES, max_tokens=12, ranks=mesh),
            lambda: treepack.Packer(max_tokens=12, ranks=mesh),
            lambda: packed.for_rank(mesh),
            lambda: align([], mesh),
            lambda: packed.for_rank(mesh["dp"]),
        ):
            with pytest.raises(treepack.PackError) as error:
                call()
            said.append(str(error.value))
        return said

    *several, another = on_rank(0, ask)
    for name, said in zip(("ranks", "ranks", "rank", "group"), several, strict=True):
        assert said.startswith(f"{name} is a mesh of 2 dimensions (dp, sp); samples go over one of them")
        assert 'mesh["dp"]' in said
    assert another == "the mesh dimension has 2 ranks; this packing is for 4"


def test_a_mesh_without_names():
    def ask(mesh):
        with pytest.raises(treepack.PackError, match=r'^ranks is a mesh of 2 dimensions; .* mesh\["dp"\], say'):
            treepack.pack(SAMPLES, max_tokens=12, ranks=mesh)

    on_rank(0, ask, names=None)


def test_a_rank_outside_the_mesh():
    def ask(mesh):
        from torch.distributed.device_mesh import DeviceMesh

        some = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        packed = treepack.pack(SAMPLES, max_tokens=12, ranks=some)
        for call in (lambda: align([], some), lambda: packed.for_rank(some)):
            with pytest.raises(treepack.PackError, match=r"^this process is on no rank of the mesh$"):
                call()

    on_rank(3, ask)
