"""Other libraries' sequence and context parallelism around a model on trees is refused by name, at every way in.

Asked are the real accelerate, torch and TRL; verl where it is installed (`make test`). accelerate takes no CPU for
cp_size above 1, and says so once its state is set, so here that refusal is caught or left out. DeepSpeed is not
installed: what its Ulysses does to transformers is done by hand.
"""

import contextlib
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from tiny_models import shared_samples, tiny  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import treepack  # noqa: E402
from treepack.distributed.foreign import refuse_foreign  # noqa: E402
from treepack.integrations.collator import DataCollatorForTreePacking  # noqa: E402
from treepack.integrations.transformers import RangeRunner, check_model, model_inputs, tree_attention_forward  # noqa: E402

ULYSSES = Path(__file__).resolve().parents[2] / ".venv" / "verl" / "verl" / "utils" / "ulysses.py"


@pytest.fixture
def tree():
    return treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")


@pytest.fixture
def fresh_state():
    """accelerate keeps its state for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def ways_in(model, tree):
    """Everything that takes a model or a batch to a tree."""
    features = [{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}]
    return {
        "term_log_probs": lambda: treepack.term_log_probs(model, tree),
        "row_log_probs": lambda: treepack.row_log_probs(model, torch.tensor([[1, 2, 3]])),
        "check_model": lambda: check_model(model),
        "model_inputs": lambda: model_inputs(tree, model=model),
        "RangeRunner": lambda: RangeRunner(model, tree),
        "a call of the model": lambda: model(**model_inputs(tree)),
        "a call with the mask alone": lambda: model(
            input_ids=tree.input_ids[None],
            position_ids=tree.position_ids[None],
            subtree_end=tree.subtree_end,
            use_cache=False,
        ),
        "collator": lambda: DataCollatorForTreePacking()(features),
    }


def refused_everywhere(model, tree, text):
    for name, way in ways_in(model, tree).items():
        with pytest.raises(ValueError, match=text) as error:
            way()
        for said in ("does not know the tree", "mesh=", "shards"):
            assert said in str(error.value), name


@pytest.mark.parametrize(("setting", "kind"), [("cp_size", "context parallelism"), ("sp_size", "ALST/Ulysses")])
def test_accelerate(tree, setting, kind, fresh_state):
    with contextlib.suppress(ValueError):
        accelerate.Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{setting: 2}))
    text = rf"accelerate's ParallelismConfig has {setting}=2 \(.*{kind}.*allowed is 1\)"
    refused_everywhere(tiny("qwen2"), tree, text)


def test_accelerate_without_it(tree, fresh_state):
    accelerate.Accelerator(cpu=True)
    refuse_foreign()
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.suppress(ValueError):  # other kinds of parallelism are no business of trees
        accelerate.Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))
    refuse_foreign()
    for way in ways_in(tiny("qwen2"), tree).values():
        way()


def test_torch(tree):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    model = tiny("qwen2")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh, ids = init_device_mesh("cpu", (1,)), torch.arange(8)[None]
            with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
                refused_everywhere(model, tree, r"within torch's context_parallel \(leave the block\)")
            refuse_foreign()
            assert len(treepack.term_log_probs(model, tree)) == tree.num_terms
    finally:
        torch.distributed.destroy_process_group()


def test_deepspeed(tree, monkeypatch):
    """Ulysses of DeepSpeed puts its own function under the name of every implementation."""
    model = tiny("qwen2")

    def uattn_wrapper(*args, **kwargs):
        return tree_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "treepack", uattn_wrapper)
    with pytest.raises(ValueError, match=r"uattn_wrapper was registered in place of .*DeepSpeed.*set sp_size to 1"):
        treepack.term_log_probs(model, tree)
    monkeypatch.undo()
    check_model(model)


@pytest.mark.skipif(not ULYSSES.is_file(), reason="verl is not installed (make test)")
def test_verl(tree, monkeypatch):
    """A worker of one's own beside verl's engines, with verl's real file; what the engines say themselves is in
    test_verl_engine.py."""
    spec = importlib.util.spec_from_file_location("verl.utils.ulysses", ULYSSES)
    ulysses = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ulysses)
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", ulysses)
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=2)
    try:
        refuse_foreign()
        ulysses.set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
        refused_everywhere(tiny("qwen2"), tree, r"verl's Ulysses group has 2 ranks \(ulysses_sequence_parallel_size;")
        ulysses.set_ulysses_sequence_parallel_group(None)
        refuse_foreign()
    finally:
        torch.distributed.destroy_process_group()


def test_trl(tmp_path, monkeypatch, fresh_state):
    """TRL refuses its own argument; the settings of a launcher's file come by the environment, and pass it by."""
    import trl_trainers as trainers  # skips where TRL is not installed

    folder = trainers.folder_of(tmp_path, "qwen2")
    _, ours = trainers.classes()
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    # What a CPU cannot have: a mesh of two devices, in one process.
    monkeypatch.setattr(ParallelismConfig, "get_device_mesh", lambda self, device=None: None)
    monkeypatch.setattr(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None)
    with pytest.raises(ValueError, match=r"ParallelismConfig has cp_size=2") as error:
        trainers.make(ours, folder)
    assert not getattr(error.value, "__notes__", [])
