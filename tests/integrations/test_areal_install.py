"""Switching AReaL 1.0.4 to treepack: install, attention of the FSDP engine, ranks, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import areal_stubs  # noqa: E402
import tiny_models  # noqa: E402
from areal_stubs import Spec, padded, same_place  # noqa: E402

AREAL = areal_stubs.loaded()

from treepack.integrations import areal  # noqa: E402
from treepack.integrations.areal import theirs as areal_lookup  # noqa: E402
from treepack.integrations.areal.attention import KEYWORD, tree_metadata  # noqa: E402

CPU = torch.device("cpu")
SAMPLES = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], [4, 4], [1, 2]]
THEIRS = AREAL.tree.build_packed_tree_batch


@pytest.fixture
def engine():
    """A stand-in for an engine that took AReaL's function by name before `install`."""
    module = ModuleType("areal.engine_that_was_there")
    module.build_packed_tree_batch = THEIRS
    module.build_tree_attn_kwargs = AREAL.tree.build_tree_attn_kwargs
    module.other = 1
    sys.modules[module.__name__] = module
    yield module
    areal.uninstall()
    del sys.modules[module.__name__]


@pytest.fixture
def flash():
    """transformers' module that AReaL patches, as it was afterwards."""
    module = pytest.importorskip("transformers.integrations.flash_attention")
    original = module._flash_attention_forward
    yield module
    AREAL.module_fsdp.ORIGINAL_FLASH_ATTENTION_FORWARD = None
    module._flash_attention_forward = original


# ------------------------------------------------------------------------------------------------------- install


def test_install_reaches_what_is_loaded_and_what_will_be(engine):
    theirs = AREAL.tree.build_tree_attn_kwargs
    for _ in range(2):
        areal.install()
        assert engine.build_packed_tree_batch is areal.build_packed_tree_batch
        assert AREAL.tree.build_packed_tree_batch is areal.build_packed_tree_batch
        assert engine.build_tree_attn_kwargs is AREAL.tree.build_tree_attn_kwargs is theirs
    batch = engine.build_packed_tree_batch(padded(SAMPLES), mb_spec=Spec(16), pad_to_maximum=True, parallel_size=2)
    assert batch.group_lens == [9]
    areal.uninstall()
    areal.uninstall()
    assert engine.build_packed_tree_batch is AREAL.tree.build_packed_tree_batch is THEIRS


def test_a_version_that_is_not_known(monkeypatch):
    monkeypatch.setattr(areal_lookup, "_found", None)
    monkeypatch.setattr(AREAL.tree, "build_packed_tree_batch", lambda data, budget: None)
    with pytest.raises(ImportError, match=r"takes \('data', 'budget'\); known to work: areal 1\.0\.4"):
        areal.install()


def test_no_areal(monkeypatch):
    monkeypatch.setattr(areal_lookup, "_found", None)
    monkeypatch.setitem(sys.modules, "areal.models.tree_attn.tree", None)
    with pytest.raises(ImportError, match=r"needs areal, known to work: 1\.0\.4"):
        areal.install()


# ----------------------------------------------------------------------------------------------------- attention


def through_transformers(flash, query, key, value, **kwargs):
    """What a layer of a Hugging Face model does when it is set to flash attention."""
    module = torch.nn.Module()
    module.is_causal, module.config = True, type("", (), {"_attn_implementation": "flash_attention_2"})
    return flash.flash_attention_forward(module, query, key, value, None, **kwargs)[0]


def dense(query, key, value, mask, scale):
    """(1, N, H, D): the same by softmax over a dense mask; rows without a key are 0."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


@pytest.mark.parametrize("patched_first", [False, True])
def test_attention_of_the_fsdp_engine(engine, flash, patched_first):
    """Values and gradients through transformers equal those of a dense mask made by AReaL from its own trie."""
    if patched_first:
        AREAL.module_fsdp.patch_fsdp_for_tree_training()
    areal.install(attention=True)
    if not patched_first:
        AREAL.module_fsdp.patch_fsdp_for_tree_training()
    data = padded(SAMPLES)
    for a, b in zip(THEIRS(data, Spec(8)).mbs, engine.build_packed_tree_batch(data, Spec(8)).mbs, strict=True):
        kwargs = engine.build_tree_attn_kwargs(b["trie_node"], 8, CPU)
        assert list(kwargs) == [KEYWORD]
        place = same_place(a["trie_node"], b["trie_node"], 8)
        mask = AREAL.tree.build_attention_mask_from_trie(a["trie_node"], 8, CPU)
        q, k, v = (torch.randn(1, heads, 8, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
        ours = through_transformers(flash, *(x[:, :, place.argsort()] for x in (q, k, v)), scaling=0.3, **kwargs)
        wanted = dense(q, k, v, mask, 0.3)
        count = b["trie_node"].num_tokens
        torch.testing.assert_close(ours[:, place], wanted)
        assert not ours[:, count:].any()
        weight = torch.randn_like(wanted)
        mine = torch.autograd.grad((ours[:, place] * weight).sum(), (q, k, v), retain_graph=True)
        torch.testing.assert_close(mine, torch.autograd.grad((wanted * weight)[:, :count].sum(), (q, k, v)))
    areal.uninstall()
    assert AREAL.module_fsdp._tree_attn_fwd_func.__module__ == "areal.models.tree_attn.module_fsdp"


def test_attention_with_a_window(engine, flash):
    areal.install(attention=True)
    AREAL.module_fsdp.patch_fsdp_for_tree_training()
    (mb,) = engine.build_packed_tree_batch(padded([[1, 2, 3, 4, 5, 6]]), Spec(8)).mbs
    kwargs = engine.build_tree_attn_kwargs(mb["trie_node"], 8, CPU)
    q, k, v = torch.randn(3, 1, 2, 8, 8, dtype=torch.float64).unbind()
    index = torch.arange(8)
    mask = (index <= index[:, None]) & (index > index[:, None] - 2) & (index[:, None] < 6)
    found = through_transformers(flash, q, k, v, sliding_window=2, **kwargs)
    torch.testing.assert_close(found, dense(q, k, v, mask, 8**-0.5))


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_that_would_not_see_the_tree(engine, name):
    """AReaL patches flash attention alone; under any other its packed rows run as one sequence."""
    model = tiny_models.tiny("qwen2", attention=name)
    rows = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "use_cache": False}
    before = model(**rows).logits
    areal.install(attention=True)
    assert torch.equal(model(**rows).logits, before)
    (mb,) = engine.build_packed_tree_batch(padded([[1, 2, 3], [1, 2, 4]]), Spec(8)).mbs
    kwargs = engine.build_tree_attn_kwargs(mb["trie_node"], 8, CPU)
    for keyword in (*kwargs, "tree_block_mask", "tree_triton_data"):  # AReaL's own as well
        message = f"Qwen2Attention of AReaL's engine has attn_impl='{name}', under which no tree attention runs"
        with pytest.raises(ValueError, match=message):
            model(input_ids=mb["input_ids"].reshape(1, -1), use_cache=False, **{keyword: kwargs[KEYWORD]})
    areal.uninstall()
    assert torch.equal(model(**rows, **kwargs).logits, before)  # as AReaL leaves it: nothing is refused


def test_an_engine_that_is_configured_so(monkeypatch):
    made = []

    class FSDPEngine:
        def __init__(self, attn_impl, enable_tree_training=True):
            self.config, self.enable_tree_training = SimpleNamespace(attn_impl=attn_impl), enable_tree_training

        def initialize(self, *args):
            made.append((self.config.attn_impl, *args))

    theirs = FSDPEngine.initialize
    monkeypatch.setitem(sys.modules, "areal.engine", ModuleType("areal.engine"))
    monkeypatch.setitem(sys.modules, "areal.engine.fsdp_engine", SimpleNamespace(FSDPEngine=FSDPEngine))
    areal.install(attention=True)
    for name in ("sdpa", "eager", "flex_attention"):
        with pytest.raises(ValueError, match=f"attn_impl='{name}'.*flash_attention_2.*enable_tree_training"):
            FSDPEngine(name).initialize(None)
    FSDPEngine("flash_attention_2").initialize(None, 1)
    FSDPEngine("sdpa", enable_tree_training=False).initialize(None, 2)
    assert made == [("flash_attention_2", None, 1), ("sdpa", None, 2)]
    areal.uninstall()
    assert FSDPEngine.initialize is theirs


def test_what_is_not_ours_stays_areals(engine):
    """Their tries, the dense mask of Megatron, and calls without our metadata."""
    data = padded(SAMPLES)
    mine, theirs = (build(data, Spec(16)).mbs[0]["trie_node"] for build in (areal.build_packed_tree_batch, THEIRS))
    areal.install(attention=True)
    assert list(engine.build_tree_attn_kwargs(theirs, 16, CPU)) == ["tree_block_mask"]
    kwargs = engine.build_tree_attn_kwargs(mine, 16, CPU, dense_mask=True)
    assert torch.equal(kwargs["attention_mask"], torch.from_numpy(mine.tree.attention_mask()))
    with pytest.raises(ValueError, match="BlockMask"):
        AREAL.module_fsdp._tree_attn_fwd_func(*torch.zeros(3, 1, 8, 2, 8).unbind())
    with pytest.raises(ValueError, match="padded to 16 positions; 24 were asked for"):
        engine.build_tree_attn_kwargs(mine, 24, CPU)


def test_a_dummy_sees_nothing(engine):
    dummy = areal.PackedTrie(3)
    assert (dummy.all_sequence_ids, dummy.nodes, dummy.num_tokens, dummy.children) == ([], [], 0, {})
    assert tree_metadata(dummy, 8, CPU).subtree_end.tolist() == list(range(8))
    for dense_mask in (False, True):
        kwargs = AREAL.tree.build_tree_attn_kwargs(dummy, 8, CPU, dense_mask=dense_mask)
        mask = kwargs["attention_mask"] if dense_mask else kwargs["tree_block_mask"].to_dense()
        assert not mask.any()
    assert not AREAL.tree.build_triton_attn_data_from_trie(dummy, 8).packed_mask.any()
    assert (AREAL.tree.trie_to_parent_array(dummy, 8) == -1).all()
    assert AREAL.functional.gather_packed_tree_logprobs(torch.zeros(8, 4), dummy, torch.zeros(1, 8)).shape == (0,)


# --------------------------------------------------------------------------------------------------------- ranks


def test_ranks_get_the_same_number_of_micro_batches(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    torch.multiprocessing.spawn(areal_stubs.rank, (str(tmp_path / "store"),), nprocs=len(areal_stubs.RANKS))
    for number in range(len(areal_stubs.RANKS)):
        theirs, ours = torch.load(tmp_path / f"{number}.pt")
        assert len(ours["group_lens"]) == 3
        assert len(ours["dummies"]) == [0, 2][number]
        for name in ("group_lens", "padding_lengths", "padded_to_lengths", "sequences"):
            assert ours[name] == theirs[name]
        for x, y in zip(theirs["dummies"], ours["dummies"], strict=True):
            for name, value in x.items():
                assert torch.equal(y[name], value), name
                assert y[name].dtype == value.dtype, name


# -------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mb_spec": Spec()}, "max_tokens_per_mb is None"),
        ({"mb_spec": Spec(0)}, "max_tokens_per_mb is 0"),
        ({"mb_spec": Spec(16), "pad_to_maximum": False}, "pad_to_maximum is False"),
        ({"mb_spec": Spec(12)}, "12; it must be a multiple of 8"),
        ({"mb_spec": Spec(16), "parallel_size": 3}, "multiple of 24, the lcm of the block size 8 and parallel_size 3"),
        ({"mb_spec": Spec(8)}, "sample 1 has 9 tokens; a tree holds max_tokens=8"),
    ],
)
def test_both_refuse(options, message):
    data = padded([[], list(range(9)), [1]])
    with pytest.raises(ValueError, match=message):
        areal.build_packed_tree_batch(data, **options)
    with pytest.raises(ValueError):  # noqa: PT011
        THEIRS(data, **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": torch.tensor([[0, 0], [3, -5]])}, r"^sample 1: input_ids\[1\] is -5"),  # row 0 has no token
        ({"attention_mask": torch.ones(2, 3)}, r"input_ids has shape \(2, 2\) and attention_mask \(2, 3\)"),
        ({"input_ids": torch.zeros(4), "attention_mask": torch.zeros(4)}, r"must be \(B, S\)"),
        (
            {"input_ids": torch.zeros(0, 2).long(), "attention_mask": torch.zeros(0, 2).long()},
            "no rows, on any rank",
        ),
    ],
)
def test_refused(changed, message):
    data = {"input_ids": torch.tensor([[1, 2], [1, 3]]), "attention_mask": torch.tensor([[0, 0], [1, 1]])}
    with pytest.raises(ValueError, match=message):
        areal.build_packed_tree_batch(data | changed, Spec(8))


def test_what_tree_packing_does_not_read_is_logged(caplog):
    areal.build_packed_tree_batch(padded([[1]]), Spec(8, n_mbs=2))
    assert "'n_mbs': 2" in caplog.text
    assert "n_mbs" in caplog.records[0].getMessage()


def test_depths_of_the_batch_do_not_hide_those_of_the_tree():
    data = padded(SAMPLES)
    data["position_ids"] = torch.zeros_like(data["input_ids"])
    (mb,) = areal.build_packed_tree_batch(data, Spec(16)).mbs
    assert mb["position_ids"].tolist() == [mb["trie_node"].tree.position_ids.tolist()]
