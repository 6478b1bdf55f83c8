"""One rank of `test_shards.py`: trees over the ranks of a mesh dimension, compared with one process.

Every case runs on all ranks; the ranks take turns in computing what one process gets.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from range_trees import cut_at, drawn_samples, whole
from range_trees import tiny as exact
from tiny_models import KeepDouble, shared_samples, tiny, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import treepack
from treepack.distributed import TreeShard, dummy_tree, shard, sum_gradients
from treepack.distributed.split import RowSplit, split_rows
from treepack.distributed.traffic import AttentionShape, heads_traffic, rows_traffic
from treepack.integrations.transformers import model_inputs
from treepack.logprobs import head_log_probs
from treepack.testing import check_parity
from treepack.tree.ranges import ancestors_of

FORMS = ("rows", "heads")


class Ranks:
    """The ranks of one run, and what each case found on this one."""

    def __init__(self, world: int):
        self.world, self.rank = world, dist.get_rank()
        self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
        self.square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "sp"))
        self.found: dict[str, dict[str, float] | str] = {}
        self.turn = 0

    def compare(self, case, model, trees, loss_of, *, mesh=None, alone=None, **options):
        """Steps over trees with their rows over the mesh and in one process; differences of values and gradients."""
        mesh = self.mesh if mesh is None else mesh
        values, gradients = steps(model, trees, loss_of, mesh, **options)
        self.turn = (self.turn + 1) % self.world
        if self.turn == self.rank:
            options.pop("shard", None)
            wanted, expected = steps(alone or model, trees, loss_of, **options)
            self.found[case] = {"values": apart(values, wanted), "gradients": worst(gradients, expected)}

    def refused(self, case, call):
        try:
            call()
        except (ValueError, TypeError) as error:
            self.found[case] = f"{type(error).__name__}: {error}"
        else:
            self.found[case] = ""


def weighted(out, tree):
    """A loss of every value that was asked for, each term with a weight of its own."""
    if isinstance(out, torch.Tensor):
        return (out * weights_of(len(out))).sum()
    parts = [x for x in out[:3] if x is not None]
    total = sum(((i + 1) * x * weights_of(len(x)).roll(i)).sum() for i, x in enumerate(parts))
    return total if out.aux_loss is None else total + out.aux_loss


def steps(model, trees, loss_of, mesh=None, **options):
    """(values of every tree, gradients by name) of steps over trees, whose gradients are added up."""
    model.zero_grad()
    values = []
    for tree in trees:
        where = {} if mesh is None else {"mesh": mesh}
        out = treepack.term_log_probs(model, tree, **where, **options)
        loss_of(out, tree).backward()
        values += [out] if isinstance(out, torch.Tensor) else [x for x in (*out[:3], out.aux_loss) if x is not None]
    if mesh is not None:
        sum_gradients(model, mesh)
    gradients = {name: whole_gradient(x.grad).clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return [x.detach() for x in values], gradients


def whole_gradient(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def apart(a, b):
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1)) for x, y in zip(a, b, strict=True) if x.numel())


def worst(found, wanted):
    """Each gradient as a share of its own largest; a key's bias has none, but for rounding."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    return max(float((found[k] - x).abs().max()) / max(float(x.abs().max()), 1e-3 * largest) for k, x in wanted.items())


@contextlib.contextmanager
def split_at(*edges):
    """Trees within this block are split before these rows, wherever they are."""

    def split(tree, ranks):
        cuts = np.array([0, *edges, tree.num_tokens], np.int32)
        assert len(cuts) == ranks + 1
        above = ancestors_of(tree.numpy(), cuts[:-1])
        sizes = np.diff(cuts)
        return RowSplit(cuts, [rows if size else rows[:0] for rows, size in zip(above, sizes, strict=True)])

    with patch.object(shard, "split_rows", split):
        yield


def drawn_split(rng, tree, world):
    return split_at(*np.sort(rng.integers(0, tree.num_tokens + 1, world - 1)).tolist())


# --- cases ------------------------------------------------------------------------------------------------------------


def drawn_trees(ranks):
    """Forks and samples across the cuts, ranks without rows, kept sets, padding, in both forms."""
    model = tiny("llama")
    for seed in range(6):
        rng = np.random.default_rng(seed)
        options = {"branching": "label"} if seed % 2 else {}
        tree = whole(drawn_samples(rng), pad_to_multiple_of=4 if seed == 2 else 1, **options)
        with drawn_split(rng, tree, ranks.world):
            ranks.compare(f"drawn {seed}, rows", model, [tree], weighted, shard="rows")
        ranks.compare(f"drawn {seed}, heads", model, [tree], weighted, shard="heads")


def trees(ranks):
    """Several trees one after the other, and trees that are too small for all ranks."""
    model = tiny("qwen2")
    chain = whole([{"input_ids": np.arange(1, 23)}])
    short = whole([{"input_ids": [5, 6, 7]}])
    several = [whole(shared_samples(seed=seed, sets=seed == 1)) for seed in range(3)]
    dummy = dummy_tree({}).to("cpu")
    for form in FORMS:
        ranks.compare(f"three trees, {form}", model, several, weighted, shard=form)
        ranks.compare(f"one chain, {form}", model, [chain], weighted, shard=form)
        ranks.compare(f"three tokens, {form}", model, [short], weighted, shard=form)
        ranks.compare(f"a tree without samples, {form}", model, [dummy, short], weighted, shard=form)
    with split_at(*[0] * (ranks.world - 1)):
        ranks.compare("all rows on the last rank", model, [several[0]], weighted, shard="rows")
    with split_at(*[several[1].num_tokens] * (ranks.world - 1)):
        ranks.compare("all rows on the first rank", model, [several[1]], weighted, shard="rows")


def families(ranks):
    """Windows, caps, sinks, one key head for several ranks."""
    tree = whole(shared_samples(seed=3))
    for family in ("gemma2", "gpt_oss", "qwen2_window"):
        model = tiny(family, num_key_value_heads=1 if family == "gemma2" else 2)
        for form in FORMS:
            ranks.compare(f"{family}, {form}", model, [tree], weighted, shard=form)


def values(ranks):
    """Whatever `term_log_probs` gives: entropy, temperatures, a router's loss, another head."""
    samples = shared_samples(seed=4, sets=True)
    tree = whole(samples)
    heat = np.where(np.arange(tree.num_samples) % 3, 0.7, 1.3)
    model, experts = tiny("llama"), tiny("qwen3_moe")
    labels = whole(shared_samples(seed=5), branching="label")

    def head(hidden, wanted):
        return hidden[0].sin().cumsum(1)[torch.arange(hidden.shape[1]), wanted[0].clamp(min=0) % hidden.shape[2]]

    short = whole([{"input_ids": [5, 6, 7]}])  # ranks without rows have no router choices either
    for form in FORMS:
        more = {"entropy": True, "full_log_probs": True, "temperature": heat, "shard": form}
        ranks.compare(f"all values, {form}", model, [tree], weighted, **more)
        ranks.compare(f"a router, {form}", experts, [tree, short], weighted, aux_loss=True, shard=form)
        ranks.compare(f"another head, {form}", model, [labels], weighted, head=head, shard=form)


def checkpointing(ranks):
    tree = whole(shared_samples(seed=6))
    for reentrant in (False, True):
        model = exact("qwen2").train()  # in a recomputation norms are not under `KeepDouble`
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        for form in FORMS:
            ranks.compare(f"checkpointing, reentrant {reentrant}, {form}", model, [tree], weighted, shard=form)


def adapters(ranks):
    peft = __import__("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny("llama"), config).double()
    for form in FORMS:
        ranks.compare(f"LoRA, {form}", model, [whole(shared_samples(seed=7))], weighted, shard=form)


def wrappers(ranks):
    """DDP and FSDP2 over the other dimension, whose ranks run other trees; and over all ranks."""
    sp, dp = ranks.square["sp"], ranks.square["dp"]
    half = ranks.world // 2
    mine = [whole(shared_samples(seed=10 + dp.get_local_rank()))]
    both = [whole(shared_samples(seed=10 + i)) for i in range(2)]
    ways = {
        "FSDP2": lambda model: sharded(model, dp),
        "DDP": lambda model: DistributedDataParallel(model, process_group=dp.get_group()),
    }
    for name, wrap in ways.items():
        for form in FORMS:
            _, gradients = steps(wrap(tiny("qwen2")), mine, weighted, sp, shard=form)
            _, expected = steps(tiny("qwen2"), both, weighted)
            gradients = {key.removeprefix("module."): 2 * x for key, x in gradients.items()}  # they are means over dp
            ranks.found[f"{name} over the other dimension, {form}"] = {"gradients": worst(gradients, expected)}
    expected = steps(tiny("qwen2"), both[:1], weighted)[1]
    for name, wrap in {"FSDP2": lambda model: sharded(model, ranks.mesh), "DDP": DistributedDataParallel}.items():
        model = tiny("qwen2")
        wrapped = wrap(model)  # DDP has to live until the backward pass
        out = treepack.term_log_probs(wrapped, both[0], mesh=ranks.mesh)
        (weighted(out, None) * ranks.world).backward()  # a mean over all ranks, whose gradients are parts of a sum
        gradients = {key: whole_gradient(x.grad) for key, x in model.named_parameters()}
        ranks.found[f"{name} over all ranks"] = {"gradients": worst(gradients, expected)}
    assert half == sp.size()


def sharded(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_loops(ranks):
    """`model_inputs` and `TreeShard`, without `term_log_probs`; `check_parity`; what went over the wire."""
    model, tree = tiny("qwen2"), whole(shared_samples(seed=8))
    rank, split = ranks.rank, split_rows(tree, ranks.world)
    shape = AttentionShape(query_heads=4, kv_heads=2, head_dim=8, bytes_per_value=8)
    counts = {"rows": (1, rows_traffic(split, shape)), "heads": (2, heads_traffic(tree.num_tokens, ranks.world, shape))}
    for form in FORMS:
        part = TreeShard(tree, ranks.mesh, form)
        inputs = model_inputs(tree, model=model, mesh=ranks.mesh, shard=form)
        wire = inputs["tree_hook"].wire
        hidden = model.model(**inputs).last_hidden_state
        exchanges, received = wire.exchanges, wire.received
        log_probs = part.gather(head_log_probs(hidden, model.lm_head.weight, part.rows))
        weighted(log_probs, tree).backward()
        returned = wire.received - received
        sum_gradients(model, ranks.mesh)
        gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
        wanted, expected = steps(model, [tree], weighted)
        ranks.found[f"own loop, {form}"] = {
            "values": apart([log_probs.detach()], wanted),
            "gradients": worst(gradients, expected),
        }
        layers = model.config.num_hidden_layers
        passes, traffic = counts[form]
        ranks.found[f"exchanges, {form}"] = {"layers": abs(exchanges - passes * layers)}
        ranks.found[f"bytes, {form}"] = {
            "forward": float(abs(received - layers * traffic.forward[rank])),
            "backward": float(abs(returned - layers * traffic.backward[rank])),
        }
        parity = check_parity(model, shared_samples(seed=9), mesh=ranks.mesh, shard=form)
        ranks.found[f"check_parity, {form}"] = {"values": parity.log_probs, "gradients": parity.gradients}
    states = treepack.term_log_probs(model, tree, mesh=ranks.mesh, hidden_states=True).hidden_states
    start, stop = split.edges[rank : rank + 2]
    everything = treepack.term_log_probs(model, tree, hidden_states=True).hidden_states
    ranks.found["hidden states"] = {"values": apart([states.detach()], [everything[start:stop].detach()])}
    with torch.no_grad():
        q, k, v = (torch.randn(1, heads, tree.num_tokens, 8, dtype=torch.float64).cos() for heads in (4, 2, 2))
        for x in (q, k, v):
            dist.broadcast(x, 0)
        for form in FORMS:
            part = TreeShard(tree, ranks.mesh, form)
            start, stop = part.edges[rank : rank + 2]
            mine = [x[:, :, start:stop] for x in (q, k, v)]
            sinks = torch.arange(4.0, dtype=torch.float64)
            out = part.attention(*mine, sinks=sinks, sliding_window=5)
            wanted = treepack.tree_attention(q, k, v, tree, sinks=sinks, sliding_window=5)
            ranks.found[f"attention, {form}"] = {"values": apart([out], [wanted[:, :, start:stop]])}


def added_up(ranks):
    """A parameter that some ranks have no gradient for, several dtypes, one that is frozen."""
    model = torch.nn.ParameterList([torch.zeros(3), torch.zeros(2, 2).double(), torch.zeros(5), torch.zeros(1)])
    model[3].requires_grad_(False)
    for at, parameter in enumerate(model[:2]):
        if at == 0 or ranks.rank:
            parameter.grad = torch.full_like(parameter, 10.0**ranks.rank)
    sum_gradients(model, ranks.mesh)
    total = sum(10.0**r for r in range(ranks.world))
    off = float((model[0].grad - total).abs().max() + (model[1].grad - (total - 1)).abs().max())
    ranks.found["gradients of some ranks"] = {"gradients": off + 1.0 * (model[2].grad is not None)}


def refusals(ranks):
    model, samples = tiny("qwen2"), shared_samples(seed=0)
    tree, mesh = whole(samples), ranks.mesh
    other = whole(shared_samples(seed=min(ranks.rank, 1)))

    def run(model=model, tree=tree, mesh=mesh, **options):
        return lambda: treepack.term_log_probs(model, tree, mesh=mesh, **options)

    ranks.refused("two dimensions", run(mesh=ranks.square))
    ranks.refused("no mesh", run(mesh=dist.group.WORLD))
    ranks.refused("shard without mesh", run(mesh=None, shard="rows"))
    ranks.refused("another form", run(shard="columns"))
    ranks.refused("forms that differ", run(shard=FORMS[ranks.rank % 2]))
    ranks.refused("another tree", run(tree=other))
    ranks.refused("a tree on the host", run(tree=tree.numpy() if ranks.rank else tree))
    ranks.refused("several trees", run(tree=[tree, tree]))
    ranks.refused("a cut tree", run(tree=cut_at(whole(samples), 5)))
    ranks.refused("heads", run(tiny("qwen2", num_attention_heads=3, num_key_value_heads=3), shard="heads"))
    ranks.refused("key heads", run(tiny("qwen2", num_attention_heads=12, num_key_value_heads=3), shard="heads"))
    ranks.refused("whole forests", run(impl="flex"))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    scaled = tiny("llama", rope_parameters=rope, max_position_embeddings=8)
    ranks.refused("rotary embeddings", run(scaled))
    values, _ = steps(model, [tree], weighted, mesh)  # after all that, the ranks are still in step
    ranks.found["in step"] = {"values": apart(values, steps(model, [tree], weighted)[0])}


CASES = (
    drawn_trees,
    trees,
    families,
    values,
    checkpointing,
    adapters,
    wrappers,
    own_loops,
    added_up,
    refusals,
)


def run(rank: int, world: int, folder: str, cases=CASES) -> None:
    """Saves what the cases found on this rank as `<rank>.pt` in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=90)
    )
    try:
        ranks = Ranks(world)
        with KeepDouble():
            for case in cases:
                case(ranks)
        torch.save(ranks.found, Path(folder) / f"{rank}.pt")
        dist.barrier()  # no rank leaves while another still reads from it
    finally:
        dist.destroy_process_group()
