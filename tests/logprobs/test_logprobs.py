"""Log-probs of the terms from hidden states, against a plain log-softmax over all logits."""

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, add_sets, largest_difference, shared_samples

import treepack
from treepack.logprobs import TermLogProbs, head_log_probs, label_log_probs
from treepack.logprobs import dense as head_dense
from treepack.logprobs import kept_sets as head_sets
from treepack.logprobs.terms import HeadTerms

H = 12


def make(sets=False, dtype=torch.float64, bias=False, seed=0, samples=None):
    """(hidden (N, h), weight (V, h), bias (V,) or None, tree on the CPU); the first three are leaves."""
    samples = shared_samples(seed, sets=sets) if samples is None else samples
    tree = treepack.pack(samples, max_tokens=256)[0].to("cpu")
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return leaf(tree.num_tokens, H), leaf(VOCABULARY, H), leaf(VOCABULARY) if bias else None, tree


def naive(hidden, weight, bias, tree, temperature=1.0, scale=1.0, softcap=None):
    """All R x V logits, the kept sets as -inf, term by term."""
    logits = hidden[tree.row_position.long()].to(torch.float64) @ weight.to(torch.float64).T
    logits = (logits if bias is None else logits + bias) * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    kept = torch.ones_like(logits, dtype=torch.bool)
    end = tree.sampling_mask_counts.cumsum(0).tolist()
    for row, count in enumerate(tree.sampling_mask_counts.tolist()):
        if count:
            kept[row] = False
            kept[row, tree.sampling_mask[end[row] - count : end[row]].long()] = True
    row, target = tree.term_row.long(), tree.term_target.long()
    full = logits.log_softmax(-1)
    inside = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    p = inside.exp()
    entropy = -(p * inside.masked_fill(p == 0, 0)).sum(-1)
    return TermLogProbs(inside[row, target], entropy[row], full[row, target])


def loss(values):
    """One number in which every entry of every result has its own weight."""
    return sum((x * torch.sin(torch.arange(len(x)) + i)).sum() for i, x in enumerate(values) if x is not None)


OPTIONS = [
    {},
    {"temperature": 0.7},
    {"scale": 0.5, "softcap": 2.0, "temperature": 1.3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sets", [False, True, "some"])
@pytest.mark.parametrize("chunks", [False, True])
def test_values_and_gradients(options, sets, chunks, monkeypatch):
    samples = shared_samples(sets=bool(sets))
    if sets == "some":  # a micro-batch of samples with and without sets
        samples = samples[::2] + [
            s | {"sampling_mask_counts": 0 * s["sampling_mask_counts"], "sampling_mask": s["sampling_mask"][:0]}
            for s in samples[1::2]
        ]
    hidden, weight, bias, tree = make(bias=True, samples=samples)
    if chunks:
        monkeypatch.setattr(head_dense, "CHUNK_LOGITS", 75)
        monkeypatch.setattr(head_dense, "CHUNK_ROWS", 5)
        monkeypatch.setattr(head_sets, "CHUNK_IDS", 3 * H)
        monkeypatch.setattr(head_sets, "SET_BLOCK", 7)
    leaves = [hidden, weight, bias]
    for wanted in ((False, False), (True, False), (False, True), (True, True)):
        got = head_log_probs(hidden, weight, tree, bias=bias, entropy=wanted[0], full_log_probs=wanted[1], **options)
        expected = naive(hidden, weight, bias, tree, **options)
        if wanted == (False, False):
            assert isinstance(got, torch.Tensor)
            got = TermLogProbs(got)
        keep = [True, *wanted]
        assert [x is not None for x in got] == [*keep, False, False]
        pairs = [(a, b) for a, b in zip(got, expected, strict=False) if a is not None]
        assert max(float((a - b).abs().max().detach()) for a, b in pairs) < 1e-12
        ours = torch.autograd.grad(loss([a for a, _ in pairs]), leaves)
        theirs = torch.autograd.grad(loss([b for _, b in pairs]), leaves)
        assert largest_difference(list(ours), list(theirs)) < 1e-12


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_gradcheck(sets, removed):
    samples = [{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}, {"input_ids": [1, 2, 0]}]
    if sets:
        samples[0] |= {"sampling_mask_counts": [0, 0, 2, 3], "sampling_mask": [5, 3, 4, 0, 1]}
        samples[1] |= {"sampling_mask_counts": [0, 1, 2], "sampling_mask": [2, 0, 5]}
    tree = treepack.pack([{"completion_mask": [0, 1, 1]} | x for x in samples], max_tokens=8)[0].to("cpu")
    torch.manual_seed(0)
    leaves = [torch.randn(*shape).double().requires_grad_() for shape in ((tree.num_tokens, 3), (6, 3), (6,))]
    softcap = None if removed else 3.0

    def run(hidden, weight, bias):
        bias = bias.masked_fill(torch.arange(6) == 5, -torch.inf) if removed else bias
        values = head_log_probs(
            hidden, weight, tree, bias=bias, temperature=0.8, softcap=softcap, scale=0.7, entropy=True,
            full_log_probs=True)  # fmt: skip
        return values[:3]

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("chunks", [False, True])
def test_a_bias_of_minus_infinity_takes_ids_out(options, sets, chunks, monkeypatch):
    """As samplers mask ids, here whole blocks of the vocabulary too: nothing is NaN, and gradients are those of a
    softmax over the rest (under a softcap the cap is what is left of -inf)."""
    rng = np.random.default_rng(1)
    samples = [s | {"input_ids": 16 + s["input_ids"] % 40} for s in shared_samples()]
    if sets:
        for sample in samples:
            add_sets(sample, rng, VOCABULARY)  # with ids that are taken out
    hidden, weight, bias, tree = make(bias=True, samples=samples)
    removed = torch.ones(VOCABULARY, dtype=torch.bool)
    removed[tree.term_target.long()] = False
    assert removed[:16].all()
    if chunks:
        monkeypatch.setattr(head_dense, "CHUNK_LOGITS", 75)
        monkeypatch.setattr(head_dense, "CHUNK_ROWS", 5)
    results = []
    for run in (head_log_probs, naive):
        out = bias.masked_fill(removed, -torch.inf)
        wanted = {"entropy": True, "full_log_probs": True} if run is head_log_probs else {}
        values = run(hidden, weight, tree=tree, bias=out, **wanted, **options)[:3]
        results.append([*values, *torch.autograd.grad(loss(values), [hidden, weight, bias])])
    assert all(x.isfinite().all() for x in results[1])
    assert largest_difference(*results) < 1e-12


def test_a_target_that_is_taken_out():
    """The log-prob of what cannot be drawn is -inf; the other terms have theirs."""
    hidden, weight, bias, tree = make(bias=True)
    out = bias.detach().clone()
    out[tree.term_target[0].long()] = -torch.inf
    got = head_log_probs(hidden, weight, tree, bias=out, entropy=True)
    expected = naive(hidden, weight, out, tree)
    gone = tree.term_target == tree.term_target[0]
    assert torch.equal(got.log_probs == -torch.inf, gone)
    assert (got.log_probs - expected.log_probs)[~gone].abs().max() < 1e-12
    assert (got.entropy - expected.entropy).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
def test_ids_that_are_taken_out_in_lower_precision(dtype, temperature):
    """What stands for -inf stays far below every logit and far from overflow."""
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}]
    hidden, weight, bias, tree = make(bias=True, dtype=dtype, samples=samples)
    out = bias.detach().clone()
    out[5:] = -torch.inf
    values = head_log_probs(hidden, weight, tree, bias=out, entropy=True, temperature=temperature)
    expected = naive(hidden, weight, out.double(), tree, temperature=temperature)
    ours = [*values[:2], *torch.autograd.grad(loss(values[:2]), [hidden, weight])]
    theirs = [*expected[:2], *torch.autograd.grad(loss(expected[:2]), [hidden, weight])]
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= close * max(1, b.abs().max())


def test_one_id_sets_are_exactly_zero():
    """A sampler that keeps one id took no choice: log-prob 0, entropy 0, and no gradient at all."""
    samples = shared_samples()
    for sample in samples:
        sample["sampling_mask_counts"] = sample["completion_mask"].astype(np.int32)
        sample["sampling_mask"] = sample["input_ids"][sample["completion_mask"] > 0].astype(np.int32)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, weight, _, tree = make(dtype=dtype, samples=samples)
        values = head_log_probs(hidden, weight, tree, entropy=True, temperature=0.3)
        assert values.log_probs.abs().max() == 0
        assert values.entropy.abs().max() == 0
        d_hidden, d_weight = torch.autograd.grad(loss(values[:2]), [hidden, weight])
        assert d_hidden.abs().max() == 0
        assert d_weight.abs().max() == 0


def test_no_terms_is_connected():
    """CASES 33 and 35: M = 0 gives an empty result, loss 0 and zero gradients, not an error and not None."""
    samples = [{"input_ids": [3, 4, 5], "completion_mask": [1, 0, 0]}]
    hidden, weight, bias, tree = make(bias=True, samples=samples)
    values = head_log_probs(hidden, weight, tree, bias=bias, entropy=True, full_log_probs=True)
    assert [x.shape for x in values[:3]] == [(0,)] * 3
    gradients = torch.autograd.grad(loss(values[:3]), [hidden, weight, bias])
    assert all(g is not None and g.abs().max() == 0 for g in gradients)


@pytest.mark.parametrize("sets", [False, True])
def test_half_precision_is_summed_in_float32(sets):
    """bfloat16 states: results are float32, as close to float64 as the inputs allow; gradients are rounded once."""
    hidden, weight, _, tree = make(sets=sets, dtype=torch.bfloat16)
    values = head_log_probs(hidden, weight, tree, entropy=True)
    assert {x.dtype for x in values[:2]} == {torch.float32}
    expected = naive(hidden, weight, None, tree)
    assert (values.log_probs - expected.log_probs).abs().max() < 1e-5
    assert (values.entropy - expected.entropy).abs().max() < 1e-5
    ours = torch.autograd.grad(loss(values[:2]), [hidden, weight])
    theirs = torch.autograd.grad(loss(expected[:2]), [hidden, weight])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b.double()).abs().max() < 2**-7 * b.abs().max()


def test_autocast():
    """Mixed precision: products in bfloat16, sums and results in float32, gradients in the parameters' dtype."""
    hidden, weight, bias, tree = make(dtype=torch.float32, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        values = head_log_probs(hidden, weight, tree, bias=bias)
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    expected = head_log_probs(rounded[0], rounded[1], tree, bias=rounded[2])
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)
    gradients = torch.autograd.grad(loss([values]), [hidden, weight, bias])
    assert {g.dtype for g in gradients} == {torch.float32}
    theirs = [g.float() for g in torch.autograd.grad(loss([expected]), rounded)]
    assert largest_difference(list(gradients), theirs) == 0


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, tree = make()
    frozen = weight.detach()
    (d_hidden,) = torch.autograd.grad(loss([head_log_probs(hidden, frozen, tree)]), [hidden])
    (expected,) = torch.autograd.grad(loss([naive(hidden, frozen, None, tree)[0]]), [hidden])
    assert (d_hidden - expected).abs().max() < 1e-12
    values = head_log_probs(hidden.detach(), weight, tree)
    (d_weight,) = torch.autograd.grad(loss([values]), [weight])
    (expected,) = torch.autograd.grad(loss([naive(hidden, weight, None, tree)[0]]), [weight])
    assert (d_weight - expected).abs().max() < 1e-12


def test_rows_of_one_position_and_a_fixed_order():
    """Samples that share a position and bring different sets have a row each; two runs are equal bit for bit."""
    hidden, weight, _, tree = make(sets=True, dtype=torch.float32)
    assert len(tree.row_position.unique()) < len(tree.row_position)
    runs = []
    for _ in range(2):
        values = head_log_probs(hidden[None], weight, tree, entropy=True)
        runs.append([*values[:2], *torch.autograd.grad(loss(values[:2]), [hidden, weight])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_labels_path():
    """Label branching: a head that takes shift_labels gives (N,) values; every term gets its own."""
    samples = shared_samples()
    tree = treepack.pack(samples, max_tokens=256, branching="label")[0].to("cpu")
    hidden = torch.randn(tree.num_tokens, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, H, dtype=torch.float64, requires_grad=True)
    per_position = -torch.nn.functional.cross_entropy(
        hidden @ weight.T, tree.shift_labels, reduction="none", ignore_index=-100
    )
    values = label_log_probs(per_position[None], tree)
    expected = head_log_probs(hidden, weight, tree)
    assert (values - expected).abs().max() < 1e-12
    ours = torch.autograd.grad(loss([values]), [hidden, weight])
    theirs = torch.autograd.grad(loss([expected]), [hidden, weight])
    assert largest_difference(list(ours), list(theirs)) < 1e-12


def test_labels_path_refuses():
    token = treepack.pack(shared_samples(), max_tokens=256)[0].to("cpu")
    with pytest.raises(ValueError, match="branching='label'"):
        label_log_probs(torch.zeros(token.num_tokens), token)
    kept = treepack.pack(shared_samples(sets=True), max_tokens=256, branching="label")[0].to("cpu")
    with pytest.raises(ValueError, match="kept sets"):
        label_log_probs(torch.zeros(kept.num_tokens), kept)
    label = treepack.pack(shared_samples(), max_tokens=256, branching="label")[0].to("cpu")
    with pytest.raises(ValueError, match=f"has {label.num_tokens} positions"):
        label_log_probs(torch.zeros(3), label)


def test_refusals():
    hidden, weight, _, tree = make()
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be a positive number"):
            head_log_probs(hidden, weight, tree, temperature=bad)
    with pytest.raises(ValueError, match="softcap must be positive"):
        head_log_probs(hidden, weight, tree, softcap=-1.0)
    with pytest.raises(ValueError, match=f"3 hidden states for a tree of {tree.num_tokens}"):
        head_log_probs(hidden[:3], weight, tree)
    with pytest.raises(ValueError, match=r"must be \(N, h\) or \(1, N, h\) and the weight \(V, h\)"):
        head_log_probs(hidden, weight[:, :5], tree)
    with pytest.raises(ValueError, match="bias is"):
        head_log_probs(hidden, weight, tree, bias=weight[:, 0][:4])
    with pytest.raises(ValueError, match="the tree is on cpu, the hidden states are on meta"):
        head_log_probs(hidden.to("meta"), weight.to("meta"), tree)
    with pytest.raises(TypeError, match=r"tree.to\(device\)"):
        head_log_probs(hidden, weight, treepack.pack(shared_samples(), max_tokens=256)[0])


def test_a_target_outside_its_set_is_an_error():
    hidden, weight, _, tree = make(sets=True)

    with pytest.raises(ValueError, match="not in the kept set of its row"):
        head_log_probs(hidden, weight, Other(tree, term_target=(tree.term_target + 1) % VOCABULARY))


class Other:
    """A tree with other arrays."""

    def __init__(self, tree, **arrays):
        self._tree = tree
        vars(self).update(arrays)

    def __getattr__(self, name):
        return getattr(self._tree, name)


def test_ids_that_the_head_does_not_have():
    hidden, weight, _, tree = make()
    big = int(tree.term_target.argmax())
    largest = int(tree.term_target[big])
    assert head_log_probs(hidden, weight[: largest + 1], tree).isfinite().all()
    what = rf"term {big} has the target {largest}, but the LM head has {largest} rows, for ids from 0 to {largest - 1}"
    with pytest.raises(ValueError, match=what):
        head_log_probs(hidden, weight[:largest], tree)
    target = tree.term_target.clone()
    target[7] = -3
    with pytest.raises(ValueError, match="term 7 has the target -3, but the LM head has 64 rows"):
        head_log_probs(hidden, weight, Other(tree, term_target=target))

    masks = {"completion_mask": [0, 0, 1], "sampling_mask_counts": [0, 0, 2]}
    samples = [
        masks | {"input_ids": [1, 2, 3], "sampling_mask": [3, 7]},
        masks | {"input_ids": [1, 4, 5], "sampling_mask": [8, 5]},
    ]
    hidden, weight, _, tree = make(samples=samples)
    assert head_log_probs(hidden, weight[:9], tree).isfinite().all()
    with pytest.raises(ValueError, match="term 1 has the id 8 in its kept set, but the LM head has 8 rows"):
        head_log_probs(hidden, weight[:8], tree)


def test_a_device_that_is_not_waited_for_gives_nan():
    """Where the targets are not looked at (CUDA), one without a row of the weight has no log-prob, not a wrong one."""
    empty, target = torch.zeros(0, dtype=torch.int32), torch.tensor([3, 5, -1, 0])
    terms = HeadTerms(torch.arange(4), torch.arange(4), target, empty, torch.zeros(4, dtype=torch.int32))
    for bias in (None, torch.zeros(5)):
        dense = head_dense.DenseRows(torch.randn(4, 3), torch.randn(5, 3), bias, terms)
        dense.slot, dense.target = terms.term_row, target
        assert dense.forward()[2].isnan().tolist() == [False, True, True, False]
