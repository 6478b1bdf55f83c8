"""The first use of a model: two tiny samples packed and alone find a layer that leaks, by what it does, and leave
nothing behind."""

import copy
import gc
import threading

import leaking_layers
import pytest
import torch
from leaking_layers import HARMLESS, LEAKING, put
from tiny_models import FAMILIES, shared_samples, tiny
from transformers import AutoModelForTokenClassification

import treepack
from treepack import term_log_probs
from treepack.integrations.transformers import model_inputs
from treepack.integrations.transformers.checks.leaks import check_leaks
from treepack.integrations.transformers.checks.rows import rows_for

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
RUNS = 4  # of a model in which nothing is found


def one_tree():
    return treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")


def counted(model):
    """How often the first layer has run."""
    runs = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LEAKING)
def test_a_layer_that_leaks(kind, dtype):
    model = put(tiny("qwen2", dtype), LEAKING[kind]())
    message = r"Qwen2ForCausalLM: layer model\.layers\.1\.mlp(\.part|\.inner)? \((\w+)\) leaks between samples"
    with pytest.raises(ValueError, match=message) as error:
        term_log_probs(model, one_tree())
    later = "takes in what comes later in the row"
    assert (later if kind == "Centre" else "takes in the branch that lies before in the row") in str(error.value)
    if kind != "Centre":  # whose own output has no value for each token
        assert f"layer model.layers.1.mlp.part ({kind})" in str(error.value)
    with pytest.raises(ValueError, match=message):  # and again, from what is remembered
        model_inputs(one_tree(), model=model)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral", "qwen3_moe"])
def test_a_leak_in_a_deep_model(family):
    """Far from the last layer, with windows, caps and experts around it."""
    depth = {"num_hidden_layers": 8}
    if "layer_types" in FAMILIES[family]:
        depth["layer_types"] = FAMILIES[family]["layer_types"] * 4
    model = put(tiny(family, torch.bfloat16, **depth), LEAKING["Smooth"](), layer=2)
    with pytest.raises(ValueError, match=r"layer model\.layers\.2\.mlp\.part \(Smooth\) leaks"):
        term_log_probs(model, one_tree())
    model = put(tiny(family, torch.bfloat16, **depth), HARMLESS["Scale"](), layer=2)
    assert torch.isfinite(term_log_probs(model, one_tree())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HARMLESS)
def test_a_layer_that_does_not_leak(kind, dtype):
    model = put(tiny("qwen2", dtype), HARMLESS[kind]())
    assert torch.isfinite(term_log_probs(model, one_tree())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_families(dtype):
    """Every family, with its windows and experts, at other roundings than those of float64."""
    tree = one_tree()
    for family in FAMILIES:
        model = tiny(family, dtype, seed=3)
        runs = counted(model)
        check_leaks(model, model, tree)
        assert len(runs) >= RUNS, family


def test_experts_that_are_chosen_by_a_hair():
    """One expert of many, whose choice rounding turns."""
    for seed in range(4):
        model = tiny("mixtral", torch.bfloat16, seed=seed, num_local_experts=16, num_experts_per_tok=1)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight[1:] = layer.mlp.gate.weight[:1] * (1 + 1e-2 * torch.rand(15, 1))
        term_log_probs(model, one_tree())


def test_positions_that_the_model_counts_itself():
    """Not by a layer: what the layers are given differs already, so the model is named."""
    model = tiny("qwen2")
    forward = model.model.forward

    def count(input_ids, position_ids, **kwargs):
        return forward(input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)

    model.model.forward = count
    with pytest.raises(ValueError, match=r"layer model \(Qwen2Model\) leaks.*counts places along the row"):
        term_log_probs(model, one_tree())


def test_left_out(monkeypatch):
    model = put(tiny("qwen2"), LEAKING["Sum"]())
    assert torch.isfinite(term_log_probs(model, one_tree(), model_check=False)).all()
    assert model_inputs(one_tree(), model=model, model_check=False)["use_cache"] is False
    monkeypatch.setenv("TREEPACK_MODEL_CHECK", "0")
    assert torch.isfinite(term_log_probs(model, one_tree())).all()
    monkeypatch.setenv("TREEPACK_MODEL_CHECK", "1")
    with pytest.raises(ValueError, match="leaks between samples"):
        term_log_probs(model, one_tree())


def test_once_and_again_after_a_change():
    model, tree = tiny("qwen2"), one_tree()
    runs = counted(model)

    def more(act=lambda: None):
        before = len(runs)
        act()
        term_log_probs(model, tree)
        return len(runs) - before

    assert more() == RUNS + 1
    assert more() == 1
    assert more(lambda: setattr(model.config, "rms_norm_eps", 1e-5)) == RUNS + 1
    assert more(lambda: model.set_attn_implementation("treepack")) == 1
    assert more(lambda: put(model, HARMLESS["Scale"]())) == RUNS + 1
    put(model, LEAKING["Sum"](), layer=0)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.part \(Sum\) leaks"):
        term_log_probs(model, tree)
    other = copy.deepcopy(model)
    other.model.layers[0].mlp = other.model.layers[0].mlp.inner
    term_log_probs(other, tree)


def test_nothing_is_left(monkeypatch):
    """Modes, hooks, buffers, numbers, gradients, generators; no tensor of the two samples."""
    monkeypatch.setattr(leaking_layers.Keeper, "train", lambda self, mode=True: 1 / 0)
    model = put(tiny("qwen2", torch.float32), leaking_layers.Keeper())
    model.model.layers[0].training = True
    torch.manual_seed(5)
    keeper, tree = model.model.layers[1].mlp.part, one_tree()

    def state():
        return {
            path: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), dict(m._buffers), list(vars(m)))
            for path, m in model.named_modules()
        }

    before, drawn = state(), torch.random.get_rng_state()
    check_leaks(model, model, tree)
    after = state()
    for path, (mode, hooks, first, buffers, names) in before.items():
        assert after[path][:3] == (mode, hooks, first), path
        assert after[path][4] == names, path
        assert all(after[path][3][name] is buffer for name, buffer in buffers.items()), path
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert keeper.calls == 0
    assert keeper.last is None
    assert float(keeper.seen.sum() + keeper.swapped.sum()) == 0
    assert all(p.grad is None for p in model.parameters())
    gc.collect()
    left = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.shape[:2] == (1, 63)]
    assert not left


def test_gradients_after_it_under_autocast():
    """Weights that autocast cast without a gradient are not used again."""
    model, tree = tiny("qwen2", torch.float32), one_tree()
    with torch.autocast("cpu", torch.bfloat16):
        term_log_probs(model, tree).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.model.layers[0].mlp.parameters())
    leaking = put(tiny("qwen2", torch.float32), LEAKING["Smooth"]())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"part \(Smooth\) leaks"):
        term_log_probs(leaking, tree)


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_of_it_is_compiled(whole):
    """As many graphs as without it, and a leak is found under the compiler too."""
    tree, graphs = one_tree(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    found = []
    for check in (False, True):
        torch.compiler.reset()
        model = tiny("qwen2", num_hidden_layers=2)
        compiled = torch.compile(model, backend=backend) if whole else model
        if not whole:
            for layer in model.model.layers:
                layer.compile(backend=backend)
        with torch.no_grad():
            values = [term_log_probs(compiled, tree, model_check=check) for _ in range(2)]
        found.append((len(graphs), values[1]))
        graphs.clear()
    assert found[0][0] == found[1][0] > 0
    assert torch.equal(found[0][1], found[1][1])
    torch.compiler.reset()
    leaking = put(tiny("qwen2"), LEAKING["Clock"]())
    with pytest.raises(ValueError, match=r"part \(Clock\) leaks"):
        term_log_probs(torch.compile(leaking, backend=backend), tree)
    assert not graphs
    torch.compiler.reset()


def test_a_model_that_is_used_within_itself():
    """A hook of the user calls the model again; other threads wait for the first use."""
    model, tree, entered, within = tiny("qwen2"), one_tree(), [], []

    def again(*_):
        if not entered:
            entered.append(1)
            within.append(term_log_probs(model, tree))

    hook = model.model.layers[0].register_forward_hook(again)
    expected = term_log_probs(model, tree)
    hook.remove()
    assert torch.equal(within[0], expected)
    other, values = tiny("qwen2"), []
    threads = [threading.Thread(target=lambda: values.append(term_log_probs(other, tree).detach())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == 3
    assert all(torch.equal(value, expected) for value in values)


@pytest.mark.parametrize("positions", [4, 12, 64])
def test_few_positions(positions):
    """Samples as long as the model's table of positions allows."""
    sizes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = tiny("gpt2", max_position_embeddings=positions, **sizes)
    rows = rows_for(model, 0)
    assert (rows is None) == (positions == 4)
    if rows is not None:
        assert max(rows.packed.positions) < positions
        assert len(rows.first.ids) == len(rows.second.ids) == len(rows.packed.ids)
    check_leaks(model, model, one_tree())


def test_tokens_without_a_meaning_of_their_own():
    model = tiny("qwen2", vocab_size=8, eos_token_id=[2, 3])
    row = rows_for(model, 0).packed
    assert set(row.ids) == {4, 5, 6, 7}
    assert row == rows_for(model, 0).packed != rows_for(model, 1).packed
    assert rows_for(tiny("qwen2", vocab_size=6, eos_token_id=[2, 3]), 0) is None


def test_weights_that_are_not_there():
    """Nothing to run, and nothing remembered."""
    model, tree = put(tiny("qwen2"), LEAKING["Sum"]()), one_tree()
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.to("meta"))
    check_leaks(model, model, tree)
    model.model.layers[0].mlp.up_proj.weight = weight
    with pytest.raises(ValueError, match="leaks between samples"):
        check_leaks(model, model, tree)


def test_a_model_with_another_head():
    critic = AutoModelForTokenClassification.from_config(tiny("qwen2").config, attn_implementation="treepack").eval()
    model_inputs(one_tree(), model=critic)
    put(critic, LEAKING["Smooth"]())
    with pytest.raises(ValueError, match=r"Qwen2ForTokenClassification: layer model\.layers\.1\.mlp\.part"):
        model_inputs(one_tree(), model=critic)
