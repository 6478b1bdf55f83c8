"""Rows of ids through trees: values, entropies and gradients are those of each row alone, in the row's own places."""

import warnings

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, gradients, largest_difference, shared_samples, tiny
from torch.nn.utils import parameters_to_vector
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import treepack
from treepack import PackError, row_log_probs, term_log_probs

SIDES = ("left", "right", "both", "hole")


def padded(seed=0, side="left", extra=2, empty=()):
    """(ids, attention_mask) of samples that share prefixes, with junk at padding; rows of padding alone at `empty`."""
    rng = np.random.default_rng(seed)
    rows = [sample["input_ids"] for sample in shared_samples(seed)]
    for at in empty:
        rows.insert(at, rows[0][:0])
    width = max(map(len, rows)) + extra
    ids, mask = rng.integers(0, VOCABULARY, (len(rows), width)), np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        start = {"left": width - len(row), "right": 0, "both": int(rng.integers(0, width - len(row) + 1))}.get(side)
        at = np.sort(rng.permutation(width)[: len(row)]) if start is None else np.arange(start, start + len(row))
        ids[i, at], mask[i, at] = row, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def alone(model, ids, mask, temperature=1.0):
    """(log-probs, entropies), each (B, S): of every token given those before it in its row, each row by itself through
    dense attention; 0 where there is no such thing."""
    model.set_attn_implementation("dense64")
    heats = torch.as_tensor(temperature, dtype=torch.float64).expand(len(ids)).tolist()
    out = []
    for row, real, heat in zip(ids, mask.bool(), heats, strict=True):
        at = real.nonzero()[:, 0]
        values = torch.zeros(2, len(row), dtype=model.dtype)
        if len(at) > 1:
            logits = model(row[at][None], use_cache=False).logits[0, :-1] / heat
            log_probs = logits.log_softmax(-1)
            found = log_probs.gather(1, row[at[1:], None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
            values = values.index_copy(1, at[1:], torch.stack(found))
        out.append(values)
    model.set_attn_implementation("treepack")
    return torch.stack(out, 1)


def check(model, ours, theirs):
    """Values and the gradients of every parameter, for a loss with the fixed weights. Each a tensor, or several."""
    ours, theirs = ([values] if torch.is_tensor(values) else list(values) for values in (ours, theirs))
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 1e-10
        assert torch.equal(got == 0, wanted == 0)
    expected, found = (gradients(model, [values.reshape(-1) for values in side]) for side in (theirs, ours))
    assert found.keys() == expected.keys()
    assert largest_difference(found, expected) < 1e-7


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("budget", [None, 30])
def test_padding_anywhere(side, budget):
    model = tiny("qwen2")
    ids, mask = padded(side=side, empty=(0, 4))
    for last in (None, 9, 1):
        ours = row_log_probs(model, ids, mask, last=last, entropy=True, max_tokens=budget)
        columns = slice(1, None) if last is None else slice(ids.shape[1] - last, None)
        check(model, ours[:2], [*alone(model, ids, mask)[..., columns]])
    assert ours.aux_loss is None
    if budget:
        assert len(treepack.pack(shared_samples(), max_tokens=budget)) > 1


@pytest.mark.parametrize("family", ["qwen2_window", "qwen3_moe", "gemma2"])
def test_other_models(family):
    model = tiny(family)
    ids, mask = padded(side="both")
    check(model, row_log_probs(model, ids, mask), alone(model, ids, mask)[0, :, 1:])


@pytest.mark.parametrize("budget", [None, 30])
def test_a_temperature_for_each_row(budget):
    """Rows of one prompt may have been sampled at different temperatures: they share positions, not softmaxes."""
    model = tiny("gemma2")  # scaled before and capped after
    ids, mask = padded(empty=(2,))
    heat = torch.tensor([1.0, 0.5, 2.0, 0.5, 0.7, 1.3, 0.5, 1.0, 0.7])
    for temperature in (heat, heat.tolist()):
        ours = row_log_probs(model, ids, mask, temperature=temperature, entropy=True, max_tokens=budget)
        check(model, ours[:2], [*alone(model, ids, mask, heat)[..., 1:]])
    same = row_log_probs(model, ids, mask, temperature=[0.5] * 9)
    assert torch.equal(same, row_log_probs(model, ids, mask, temperature=torch.tensor(0.5)))


def flat(ids, mask):
    """(ids (R,), offsets, values (2, B, S) -> (2, R) as flat batches have them: entry t of token t + 1)."""
    real = mask.bool()
    lengths = real.sum(1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def in_place(values):
        out = values[..., real].roll(-1, -1)
        out[..., offsets[1:] - 1] = 0  # nothing follows the last token of a sample
        return out

    return ids[real], offsets, in_place


@pytest.mark.parametrize("budget", [None, 30])
def test_flat_and_jagged(budget):
    model = tiny("qwen2")
    padded_ids, mask = padded(side="right")
    ids, offsets, in_place = flat(padded_ids, mask)
    theirs = in_place(alone(model, padded_ids, mask)).detach()
    for shaped, cu in (
        (ids, offsets),
        (ids[None], offsets.int()),
        (ids, torch.cat([offsets[:1], offsets, offsets[-1:]])),
    ):
        ours = row_log_probs(model, shaped, cu_seqlens=cu, entropy=True, max_tokens=budget)
        assert ours.log_probs.shape == ours.entropy.shape == shaped.shape
        assert (torch.stack([ours.log_probs.view(-1), ours.entropy.view(-1)]) - theirs).abs().max() < 1e-10
    nested = torch.nested.nested_tensor_from_jagged(ids, offsets)
    ours = row_log_probs(model, nested, entropy=True, max_tokens=budget)
    assert (torch.stack([ours.log_probs.values(), ours.entropy.values()]) - theirs).abs().max() < 1e-10
    assert ours.log_probs.offsets() is nested.offsets()  # so that torch knows them to be of one shape
    masked = ours.log_probs * (nested > 5)
    check(model, masked.values(), in_place(alone(model, padded_ids, mask))[0] * (ids > 5))


@pytest.mark.parametrize("form", ["padded", "flat", "jagged"])
def test_values_that_are_not_wanted(form):
    """The LM head is spared the rows of tokens whose values nobody asked for."""
    model = tiny("qwen2")
    padded_ids, mask = padded(side="right")
    wanted = torch.from_numpy(np.random.default_rng(1).integers(0, 2, mask.shape)) * mask
    ids, offsets, in_place = flat(padded_ids, mask)
    theirs = alone(model, padded_ids, mask)[0] * wanted
    if form == "padded":
        check(model, row_log_probs(model, padded_ids, mask, completion_mask=wanted.bool(), last=7), theirs[:, -7:])
        return
    chosen = wanted[mask.bool()]
    if form == "flat":
        ours = row_log_probs(model, ids, cu_seqlens=offsets, completion_mask=chosen)
    else:
        jagged = torch.nested.nested_tensor_from_jagged
        ours = row_log_probs(model, jagged(ids, offsets), completion_mask=jagged(chosen, offsets)).values()
    check(model, ours, in_place(theirs))


def test_nothing_to_compute():
    """Rows of padding alone, no rows, no wanted value: zeros that every parameter is connected to."""
    model = tiny("qwen2")
    ids, mask = padded()
    for run, shape in (
        (lambda: row_log_probs(model, ids, torch.zeros_like(mask), last=3), (8, 3)),
        (lambda: row_log_probs(model, ids[:0], mask[:0], last=3), (0, 3)),
        (lambda: row_log_probs(model, ids, mask, last=0), (8, 0)),
        (lambda: row_log_probs(model, ids[:, :1], mask[:, :1]), (8, 0)),
        (lambda: row_log_probs(model, ids, mask, completion_mask=torch.zeros_like(mask)), (8, ids.shape[1] - 1)),
        (lambda: row_log_probs(model, ids[0, :0], cu_seqlens=torch.zeros(3, dtype=torch.int32)), (0,)),
    ):
        ours = run()
        assert ours.shape == shape
        assert not ours.any()
        model.zero_grad()
        ours.sum().backward()
        assert not parameters_to_vector(p.grad for p in model.parameters()).any()


@pytest.mark.parametrize("budget", [None, 30])
@pytest.mark.parametrize("asked", [False, True])
def test_the_loss_of_a_router(budget, asked):
    """That of all rows as one batch, however many trees they took, and whatever the config says."""
    model = tiny("qwen3_moe", output_router_logits=asked, router_aux_loss_coef=0.1)
    ids, mask = padded(side="left", empty=(1,))
    out = row_log_probs(model, ids, mask, aux_loss=True, max_tokens=budget)
    model.set_attn_implementation("sdpa")
    rows = [model(row[real][None], use_cache=False, output_router_logits=True) for row, real in
            zip(ids, mask.bool(), strict=True) if real.any()]  # fmt: skip
    model.set_attn_implementation("treepack")
    together = tuple(map(torch.cat, zip(*(row.router_logits for row in rows), strict=True)))
    theirs = load_balancing_loss_func(together, 4, 2)
    assert (out.aux_loss - theirs).abs() < 1e-5  # routers are float32 in any model
    expected, found = (gradients(model, [loss[None]]) for loss in (theirs, out.aux_loss))
    assert largest_difference(found, expected) < 1e-5
    without = row_log_probs(model, ids, mask, max_tokens=budget)
    assert torch.equal(without, out.log_probs)
    assert not torch.equal(row_log_probs(model, ids[:3], mask[:3], aux_loss=True).aux_loss, out.aux_loss)


def test_types_devices_and_modes():
    ids, mask = padded()
    model = tiny("qwen2", torch.float32)
    with torch.no_grad():
        values = row_log_probs(model, ids, mask)
    assert values.dtype == torch.float32
    assert not values.requires_grad
    with torch.inference_mode():
        assert torch.equal(row_log_probs(model, ids.int(), mask.bool()), values)
    half = row_log_probs(tiny("qwen2", torch.bfloat16), ids, mask)
    assert half.dtype == torch.float32
    for kind in (torch.uint8, torch.int32, torch.bool):
        assert torch.equal(row_log_probs(model, ids, mask.to(kind)), values)
    columns = torch.stack([ids, mask], -1)  # not contiguous
    assert torch.equal(row_log_probs(model, columns[..., 0], columns[..., 1]), values)
    full = torch.ones_like(mask)
    assert torch.equal(row_log_probs(model, ids), row_log_probs(model, ids, full))


def test_a_row_that_does_not_fit():
    model = tiny("qwen2")
    ids, mask = padded(empty=(0,))
    longest = int(mask.sum(1).argmax())
    length = int(mask.sum(1).max())
    with pytest.raises(PackError, match=rf"^row {longest}: .*{length} tokens.*max_tokens.*{length - 1}") as raised:
        row_log_probs(model, ids, mask, max_tokens=length - 1)
    assert raised.value.sample == longest
    ids, offsets, _ = flat(*padded())
    with pytest.raises(PackError, match=rf"^sample {longest - 1}: "):
        row_log_probs(model, ids, cu_seqlens=offsets, max_tokens=length - 1)


def test_refusals():
    model = tiny("qwen2")
    ids, mask = padded()
    width = ids.shape[1]
    offsets = torch.tensor([0, width])
    nested = torch.nested.nested_tensor_from_jagged(ids[0], offsets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([ids[0], ids[1]])
    for message, call in (
        (
            rf"last is {width}; allowed is 0 to {width - 1} for rows of {width}",
            lambda: row_log_probs(model, ids, last=width),
        ),
        (r"last is -1; allowed", lambda: row_log_probs(model, ids, last=-1)),
        (r"last is 2.0; allowed", lambda: row_log_probs(model, ids, last=2.0)),
        (r"attention_mask has shape \(8, 3\); input_ids", lambda: row_log_probs(model, ids, mask[:, :3])),
        (
            r"^row 2: attention_mask\[2, 1\] is 2; allowed are 0 \(padding\)",
            lambda: row_log_probs(model, ids, changed(mask, 2)),
        ),
        (r"^row 2: completion_mask.* is -1", lambda: row_log_probs(model, ids, completion_mask=changed(mask, -1))),
        (r"shape \(\d+,\); rows are \(B, S\)", lambda: row_log_probs(model, ids[0])),
        (r"beside cu_seqlens it is \(R,\) or \(1, R\)", lambda: row_log_probs(model, ids, cu_seqlens=offsets)),
        (
            r"attention_mask is given beside input_ids with cu_seqlens",
            lambda: row_log_probs(model, ids[0], mask, cu_seqlens=offsets),
        ),
        (r"last=3 is given beside a nested input_ids", lambda: row_log_probs(model, nested, last=3)),
        (r"cu_seqlens is given beside a nested", lambda: row_log_probs(model, nested, cu_seqlens=offsets)),
        (r"layout torch.strided; allowed is torch.jagged", lambda: row_log_probs(model, strided)),
        (r"completion_mask is not nested", lambda: row_log_probs(model, nested, completion_mask=mask[0])),
        (r"ends at 3; input_ids has", lambda: row_log_probs(model, ids[0], cu_seqlens=torch.tensor([0, 3]))),
        (
            r"temperature has shape \(2,\); .*\(8,\): one for each row",
            lambda: row_log_probs(model, ids, mask, temperature=[1.0, 2.0]),
        ),
        (
            r"row 3: temperature must be a positive number, not 0.0",
            lambda: row_log_probs(model, ids, mask, temperature=[1.0] * 3 + [0.0] * 5),
        ),
        (r"attn_implementation='sdpa'", lambda: row_log_probs(tiny("qwen2", attention="sdpa"), ids, mask)),
        (r"returned no router logits", lambda: row_log_probs(model, ids, mask, aux_loss=True)),
        (r"row 0, token 0: .*-5|row 0: input_ids\[0\] is -5", lambda: row_log_probs(model, torch.full_like(ids, -5))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for message, call in (
        ("input_ids is a list; a tensor", lambda: row_log_probs(model, [[1, 2]])),
        ("attention_mask has dtype float32; allowed are booleans", lambda: row_log_probs(model, ids, mask.float())),
        ("completion_mask has dtype float32", lambda: row_log_probs(model, ids, mask, completion_mask=mask.float())),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def changed(mask, value):
    mask = mask.clone()
    mask[2, 1] = value
    return mask


def test_temperatures_of_the_samples_of_a_tree():
    """Also where rows have kept sets, and terms of one position have different temperatures."""
    model = tiny("qwen2")
    samples = shared_samples(sets=True)
    samples.append(dict(samples[1]))
    packed = treepack.pack(samples, max_tokens=256)
    tree = packed[0].to("cpu")
    heat = np.where(np.arange(len(samples)) % 3 == 0, 0.5, np.where(np.arange(len(samples)) % 3 == 1, 1.5, 1.0))
    every = {t: term_log_probs(model, tree, temperature=t, entropy=True, full_log_probs=True) for t in set(heat)}
    ours = term_log_probs(model, tree, temperature=torch.tensor(heat), entropy=True, full_log_probs=True)
    of_term = heat[tree.sample_index.numpy()][tree.term_sample.numpy()]
    for got, *by_heat in zip(ours[:3], *(x[:3] for x in every.values()), strict=True):
        at = [list(every).index(t) for t in of_term]
        expected = torch.stack(by_heat)[at, torch.arange(len(at))]
        assert (got - expected).abs().max() < 1e-12
