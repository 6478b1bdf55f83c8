"""Real gloo processes that pack their own samples, one of them without any: they take the same steps, and the gradients
are those of every sample run alone in one process."""

import numpy as np
import pytest
from helpers import ARRAYS

import treepack

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import distributed_worker  # noqa: E402
import tiny_model  # noqa: E402

from treepack.distributed import align, connect, dummy_tree, formats_of  # noqa: E402

WAYS = ["plain", "parallel", "parallel_no_sync", "parallel_constant_loss", "sharded", "sharded_no_sync"]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """What each rank found, for 2 and for 4 processes."""
    folder = tmp_path_factory.mktemp("ranks")
    world = request.param
    torch.multiprocessing.spawn(distributed_worker.run, (world, str(folder)), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_of_one_process(ranks, way):
    everything = [sample for rank in range(len(ranks)) for sample in distributed_worker.samples(rank)]
    expected, terms = tiny_model.alone(tiny_model.Model(), everything)
    assert any(x.abs().max() > 1e-3 for x in expected)
    for found in ranks:
        assert found["terms"] == terms
        for gradient, wanted in zip(found[way], expected, strict=True):
            assert gradient.shape == wanted.shape
            assert (gradient - wanted).abs().max() <= 1e-10


def test_every_rank_has_as_many_trees(ranks):
    most = max(found["packed"] for found in ranks)
    assert most > 0
    for rank, found in enumerate(ranks):
        assert found["trees"] == most
        assert found["dummies"] == list(range(found["packed"], most))
        assert found["names"] == (["advantage"], ["advantage"], [])
        if rank == distributed_worker.STARVED:
            assert found["packed"] == 0
    assert len({found["packed"] for found in ranks}) > 1


def test_ranks_that_do_not_fit_each_other_all_raise(ranks):
    for found in ranks:
        branching, absent, dtype = found["mismatch"]
        assert branching == "rank 1 packs with branching='token', rank 0 with 'label'"
        assert "rank 1 has the columns [], rank 0 has [terms.advantage float32" in absent
        assert "rank 1 has the columns [terms.advantage int64" in dtype


def test_no_samples_on_any_rank(ranks):
    assert all(found["nothing"] == ([], 0) for found in ranks)


def test_a_group_of_ranks_is_aligned_by_itself(ranks):
    for rank, found in enumerate(ranks):
        group = range(rank % 2, len(ranks), 2)
        assert found["halves"] == (max(group), 2 * sum(group))


# ----------------------------------------------------------------------------------------------------- one process


def test_without_a_group_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    packed = treepack.pack([{"input_ids": [x, 2, 3]} for x in range(4)], max_tokens=6)
    for world in (None, "1"):
        if world is not None:
            monkeypatch.setenv("WORLD_SIZE", world)
        trees, terms = align(packed)
        assert len(trees) == len(packed) == 2
        assert all(tree is other for tree, other in zip(trees, packed, strict=True))
        assert terms == packed.stats.terms == 8
        assert align([]) == ([], 0)


def test_ranks_that_cannot_hear_each_other_yet_are_not_taken_for_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(treepack.PackError, match=r"WORLD_SIZE is 2 and .* call torch.distributed.init_process_group"):
        align(treepack.pack([{"input_ids": [1, 2, 3]}], max_tokens=6))


SAMPLE = {"input_ids": [1, 2, 3], "old_log_probs": [0.0, -1.0, -2.0], "advantage": 1.0, "table": [[1, 2]] * 3}
SETS = {"sampling_mask": [2, 3], "sampling_mask_counts": [0, 1, 1], "identity": [1, 1, 1], "group_id": "a"}


@pytest.mark.parametrize("branching", ["token", "label"])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("sample", [SAMPLE, {**SAMPLE, **SETS}, {"input_ids": [1, 2]}])
def test_a_dummy_equals_that_of_pack(sample, branching, multiple):
    packed = treepack.pack([sample], max_tokens=8, ranks=2, branching=branching, pad_to_multiple_of=multiple)
    real, expected = packed
    dummy = dummy_tree(formats_of(real), branching == "label", multiple)
    names = [*ARRAYS, *(["shift_labels"] if branching == "label" else [])]
    for name in names:
        got, wanted = getattr(dummy, name), getattr(expected, name)
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist(), name
    for kind in ("terms", "samples", "positions"):
        got, wanted = getattr(dummy, kind), getattr(expected, kind)
        assert sorted(got) == sorted(wanted) == sorted(getattr(real, kind))
        for name in got:
            assert (got[name].dtype, got[name].shape) == (wanted[name].dtype, wanted[name].shape), name
            assert not got[name].any()
    assert dummy.num_tokens == multiple
    assert dummy.path_index() == dummy.unpack(np.zeros(multiple)) == dummy.unpack_terms(np.zeros(0)) == []
    assert all(offset % 64 == 0 for offset, _ in dummy._fields.values())
    assert dummy.buffer.ctypes.data % 64 == 0
    assert dummy.to("cpu").subtree_end.tolist() == dummy.subtree_end.tolist()
    if branching == "token":
        with pytest.raises(AttributeError, match="shift_labels"):
            _ = dummy.shift_labels


def test_a_column_on_which_samples_disagree_is_a_column_of_the_dummy():
    samples = [{"input_ids": [1, 2], "old_log_probs": [0.0, x]} for x in (0.5, 1.5)]
    (tree,) = treepack.pack(samples, max_tokens=8)
    with pytest.raises(treepack.PackError):
        tree.positions["old_log_probs"]
    dummy = dummy_tree(formats_of(tree))
    assert dummy.positions["old_log_probs"].tolist() == [0.0]
    assert dummy.terms["old_log_probs"].shape == (0,)
    with pytest.raises(treepack.PackError, match="pad_to_multiple_of"):
        dummy_tree({}, pad_to_multiple_of=0)


def test_connect_adds_nothing_and_reaches_every_parameter():
    weights = [torch.ones(shape, requires_grad=True) for shape in ((), (3,), (0, 4), (2, 3))]
    outputs = [weights[0] * 2, weights[1] * float("inf"), weights[2] + 1, weights[3].T * float("nan")]
    loss = connect(torch.tensor(1.5), *outputs)
    assert loss.item() == 1.5
    connect(torch.tensor(1.5), weights[0], weights[1], weights[2], weights[3].T).backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights)
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert connect(torch.tensor(1.5), half).dtype == torch.float32
