"""Models with layers that carry a state under TRL's trainer and AReaL's engine, by their own calls of the model."""

import builtins

import numpy as np
import pytest
import torch
from tiny_hybrids import RUN
from tiny_models import alone_log_probs, gradients, largest_difference, shared_samples, tiny

from treepack.integrations.transformers.mixers import CARRIERS

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference:UserWarning")
KINDS = [kind for kind in ("qwen3_5_text", "lfm2", "falcon_h1") if kind in RUN]
KEYS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def assert_same(model, packed, samples):
    """Log-probs and gradients of a float32 model are those of each sample alone, by transformers' own attention."""
    found = gradients(model, packed)
    alone = alone_log_probs(model, samples, "sdpa")
    expected = gradients(model, alone)
    assert largest_difference([torch.cat(packed)], [torch.cat(alone)]) < 1e-4
    assert largest_difference(found, expected) < 1e-4 * max(1.0, *(float(x.abs().max()) for x in expected.values()))


@pytest.fixture
def trl():
    """The module of the tests with TRL's classes."""
    pytest.importorskip("trl", reason="needs trl 1.16.0 (Python 3.11 and newer)")
    return pytest.importorskip("trl_rows")


@pytest.mark.parametrize("kind", KINDS)
def test_trl_log_probs_and_gradients(trl, kind):
    more = {"group_id": 0, "metrics": {"r": 0.0}}
    samples = [s | {"old_log_probs": np.zeros(len(s["input_ids"]), np.float32)} | more for s in shared_samples()]
    model = tiny(kind, torch.float32)
    with trl.installed():
        model.set_attn_implementation(trl.packing.TREE_ATTENTION)
        ((batch,), *_) = trl.batches(samples, 1, count=len(samples))
        kwargs = {key: batch[key][batch[key] >= 0] for key in KEYS}
        model.config.use_cache = False  # as of a model that the trainer makes
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **kwargs)
    index = batch["token_index"][0]
    rows = out.logits[0][index].log_softmax(-1)
    assert_same(model, [rows[torch.arange(len(index)), batch["shift_labels"][0][index]]], samples)


JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}


@pytest.mark.parametrize(("kind", "lifted"), [("qwen3_5_text", True), ("lfm2", "lfm2" in RUN), ("jamba", False)])
def test_trl_refuses_what_cannot_run(trl, kind, lifted, tmp_path):
    """The trainer's own constructor: where all layers can run a tree it comes as far as its data."""
    made = tiny(kind, torch.float32, **(JAMBA if kind == "jamba" else {}))
    made.save_pretrained(tmp_path)
    arguments = trl.trainer.AsyncGRPOConfig(str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False)

    def construct():
        trl.trainer.AsyncGRPOTrainer(model=str(tmp_path), args=arguments, reward_funcs=lambda **_: [0.0])

    with pytest.raises(ValueError, match="Tree packing only routes attention layers"):
        construct()
    further = "train_dataset|tokenizer"  # what comes after
    with trl.installed(), pytest.raises(ValueError, match=further if lifted else "only routes attention"):
        construct()
    with pytest.raises(ValueError, match="Tree packing only routes attention layers"):
        construct()


def test_trl_is_put_back(trl):
    before, create = list(CARRIERS), trl.trainer.create_model_from_path
    with trl.installed():
        assert len(CARRIERS) == len(before) + 1
        assert trl.trainer.set([1, 1]) == {1}
    assert before == CARRIERS
    assert trl.trainer.create_model_from_path is create
    assert getattr(trl.trainer, "set", builtins.set) is builtins.set


@pytest.fixture
def engine():
    """AReaL's modules, with treepack's attention in them and in transformers."""
    import areal_stubs

    from treepack.integrations import areal

    loaded = areal_stubs.loaded()
    flash = pytest.importorskip("transformers.integrations.flash_attention")
    before = flash._flash_attention_forward
    areal.install(attention=True)
    loaded.module_fsdp.patch_fsdp_for_tree_training()
    yield loaded, flash
    areal.uninstall()
    loaded.module_fsdp.ORIGINAL_FLASH_ATTENTION_FORWARD = None
    flash._flash_attention_forward = before


@pytest.mark.parametrize("kind", KINDS)
def test_areal_log_probs_and_gradients(engine, kind):
    """The engine's keyword arguments through the model, flash attention being AReaL's."""
    from areal_stubs import Spec, padded
    from transformers import AttentionInterface

    loaded, flash = engine
    AttentionInterface.register("areal", flash.flash_attention_forward)
    samples = [s | {"completion_mask": np.ones(len(s["input_ids"]), np.uint8)} for s in shared_samples()]
    model = tiny(kind, torch.float32)
    data = padded([s["input_ids"].tolist() for s in samples])
    found = {}
    model.set_attn_implementation("areal")
    for mb in loaded.tree.build_packed_tree_batch(data, Spec(32)).mbs:
        trie, ids = mb["trie_node"], mb["input_ids"].reshape(1, -1)
        kwargs = loaded.tree.build_tree_attn_kwargs(trie, ids.shape[1], torch.device("cpu"))
        depth = torch.as_tensor(mb["position_ids"]).reshape(1, -1)
        logits = model(input_ids=ids, position_ids=depth, use_cache=False, **kwargs).logits
        values = loaded.functional.gather_packed_tree_logprobs(logits[0], trie, ids)
        assert values.isfinite().all()
        cuts = [len(samples[i]["input_ids"]) for i in trie.all_sequence_ids]
        found.update(zip(trie.all_sequence_ids, (x[:-1] for x in values.split(cuts)), strict=True))
    assert_same(model, [found[i] for i in range(len(samples))], samples)
