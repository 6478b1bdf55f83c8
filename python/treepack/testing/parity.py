"""Packed against one by one: run a model on packed trees and on each sample alone, compare log-probs and gradients.

    model, samples -> Parity, or a PackError that names what differs

Costs a forward and backward pass of both forms (and of a float32 copy of the model where it is in half precision).
Nobody sees from a loss curve that samples of a row leak into each other; this does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._core import PackError
from ..distributed.gradients import sum_gradients
from ..distributed.shard import Form
from ..integrations.transformers.checks.model import check_model
from ..integrations.transformers.forward import hidden_alone
from ..integrations.transformers.logprobs import term_log_probs
from ..integrations.transformers.model import logit_options, output_head, unwrap
from ..logprobs import head_log_probs
from ..packing import pack
from .samples import as_samples

__all__ = ["Parity", "check_parity"]

# Log-probs, and gradients as a share of the largest gradient of the model. The float64 share is what models leave that
# compute norms and rotary angles in float32 whatever their dtype.
_TOLERANCES = {torch.float64: (1e-9, 1e-6), torch.float32: (2e-4, 2e-3)}
# Half precision: the error against float32, packed over alone. The largest of the log-probs, their mean, the gradients.
_HALF = (2.0, 1.25, 3.0)

Run = tuple[list[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Parity:
    """What `check_parity` found; differences of packed and alone."""

    samples: int
    terms: int
    raw_tokens: int
    packed_tokens: int
    trees: int
    log_probs: float
    """Largest difference of a log-prob, in nats."""
    gradients: float | None
    """Largest difference of a gradient, as a share of the largest gradient of the model. None: no parameter that the
    log-probs depend on requires one, so the log-probs alone were compared."""
    worst: str
    """The parameter with that difference, by its name in the model inside all wrappers; empty without gradients."""


def check_parity(
    model: Any,
    samples: Any,
    *,
    max_tokens: int | None = None,
    branching: Literal["token", "label"] = "token",
    temperature: float = 1.0,
    impl: str | None = None,
    alone: str | None = None,
    log_prob_tolerance: float | None = None,
    gradient_tolerance: float | None = None,
    mesh: Any = None,
    shard: Form | None = None,
) -> Parity:
    """Compare log-probs and parameter gradients of packed trees with those of each sample alone.

    Args:
        model: a Hugging Face causal language model with `attn_implementation="treepack"`, wrapped or not, on its
            device. Its gradients and attention implementations are left as they were; dropout must be off. Gradients
            are compared under `torch.no_grad()` too; where all parameters are frozen, only the log-probs are.
        samples: what `treepack.pack` takes. The loss compared is a weighted mean of the log-probs of all terms, with
            fixed weights of both signs.
        max_tokens: budget of a tree; None: all samples in one.
        branching: as in `treepack.pack`.
        temperature, impl: as in `term_log_probs`.
        alone: the attention implementation of the other side, for example "sdpa"; None: tree attention of one sample.
        log_prob_tolerance: largest difference in nats. Default 1e-9 in float64, 2e-4 in float32.
        gradient_tolerance: largest difference as a share of the model's largest gradient. Default 1e-6 in float64
            (models round norms to float32), 2e-3 in float32. In half precision, where neither is given, both sides are
            compared with a float32 copy of the model instead: the log-probs of the packed side may be off at most twice
            as far as those of the other, 1.25 times in the mean, and the gradients three times.
        mesh, shard: run each packed tree over the ranks of a mesh dimension, as in `term_log_probs`, and add up their
            gradients; the other side runs on every rank. Every rank of the dimension calls this, with the same samples.

    Returns:
        A `Parity`.

    Raises:
        PackError: something differs by more; the message says what, by how much, and what is allowed.
        ValueError: a model that is refused, as in `term_log_probs`; samples without a loss term; a
            `gradient_tolerance` for a model without gradients.

    Example:
        >>> parity = treepack.testing.check_parity(model, samples)
    """
    listed = as_samples(samples)
    packed = pack(
        listed, max_tokens=max_tokens or max(1, sum(len(s["input_ids"]) for s in listed)), branching=branching
    )
    if not packed.stats.terms:
        raise ValueError("the samples have no trained token after their first, so there is nothing to compare")
    # A model that its first use refuses is measured here.
    options: dict[str, Any] = {"temperature": temperature, "impl": impl, "model_check": False}
    dtype = next(model.parameters()).dtype
    ours = _run_packed(model, packed, len(listed), packed.stats.terms, options | {"mesh": mesh, "shard": shard})
    theirs = _run_alone(model, listed, packed.stats.terms, alone, branching, options)
    some = bool(ours[1] or theirs[1])
    if gradient_tolerance is not None and not some:
        raise ValueError(
            f"gradient_tolerance is {gradient_tolerance:g}, but the log-probs depend on no parameter that requires a "
            "gradient; leave gradient_tolerance out, or call model.requires_grad_(True) first"
        )
    difference, worst, scale = _compare(ours[1], theirs[1])
    log_probs = _largest([a - b for a, b in zip(ours[0], theirs[0], strict=True)])
    stats = packed.stats
    found = Parity(
        stats.samples,
        stats.terms,
        stats.raw_tokens,
        stats.packed_tokens,
        stats.trees,
        log_probs,
        difference / scale if some else None,
        worst,
    )
    if dtype in _TOLERANCES or log_prob_tolerance is not None or gradient_tolerance is not None:
        defaults = _TOLERANCES.get(dtype, (float("inf"), float("inf")))
        allowed = defaults[0] if log_prob_tolerance is None else log_prob_tolerance
        if not log_probs <= allowed:
            raise _first(ours[0], theirs[0], allowed)
        allowed = defaults[1] if gradient_tolerance is None else gradient_tolerance
        if found.gradients is not None and not found.gradients <= allowed:
            raise PackError(
                f"gradient of {worst}: packed and alone differ by {difference:.3g}, {found.gradients:.3g} of the "
                f"largest gradient of the model; {allowed:g} is allowed"
            )
        return found
    inner = copy.deepcopy(unwrap(model)).float()
    exact = _run_alone(inner, listed, stats.terms, alone, branching, options)
    known = dict(inner.named_parameters())  # a wrapper's own parameters have no float32 side
    runs = [
        (values, {n: g.float() for n, g in gradients.items() if n in known}) for values, gradients in (ours, theirs)
    ]
    _check_half(runs[0], runs[1], exact)
    return found


def _run_packed(model: Any, packed: Any, count: int, terms: int, options: dict[str, Any]) -> Run:
    device = next(model.parameters()).device
    cuts = _cuts(packed, count)
    values: list[Tensor] = [torch.empty(0)] * count
    with _collected(model) as gradients:
        for tree in packed:
            tree = tree.to(device)
            log_probs = term_log_probs(model, tree, **options)
            indexes = tree.sample_index.tolist()
            weights = torch.cat([_weights(cuts[i], cuts[i + 1]) for i in indexes]).to(log_probs)
            _backward((log_probs * weights).sum() / terms)
            for i, value in zip(indexes, tree.unpack_terms(log_probs.detach()), strict=True):
                values[i] = value.double()
        if options["mesh"] is not None:
            sum_gradients(model, options["mesh"])
    return values, gradients


def _run_alone(
    model: Any, samples: list[Any], terms: int, attention: str | None, branching: Any, options: dict[str, Any]
) -> Run:
    device = next(model.parameters()).device
    inner = check_model(model)
    values, at = [], 0
    weight, bias = output_head(inner)
    scale, softcap = logit_options(inner)
    shape = {"bias": bias, "scale": scale, "softcap": softcap, "temperature": options["temperature"]}
    # Until the last backward pass, since checkpointed layers run again in it.
    with _attention(inner, attention), _collected(model) as gradients:
        for sample in samples:
            tree = pack([sample], max_tokens=len(sample["input_ids"]), branching=branching)[0].to(device)
            if attention is None:
                log_probs = term_log_probs(model, tree, **options)
            else:
                log_probs = head_log_probs(hidden_alone(model, tree.input_ids), weight, tree, **shape)
            weights = _weights(at, at := at + log_probs.shape[0]).to(log_probs)
            _backward((log_probs * weights).sum() / terms)
            values.append(log_probs.detach().double())
    return values, gradients


@contextmanager
def _attention(model: Any, name: str | None) -> Iterator[None]:
    """A block with a model on another attention implementation (None: as it is). Afterwards every config within it, as
    those of a vision tower, has its own again: transformers sets all of them."""
    if name is None:
        yield
        return
    tops = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    before = {id(c): (c, c._attn_implementation) for top in tops for c in _configs(top)}
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, own in before.values():
            config._attn_implementation_internal = own  # without its sub-configs
            vars(config).pop("_attn_was_changed", None)  # left where transformers refused one half-way


def _configs(config: Any) -> Iterator[Any]:
    """A config of transformers and those within it."""
    yield config
    for key in config.sub_configs:
        if getattr(config, key, None) is not None:
            yield from _configs(getattr(config, key))


@contextmanager
def _collected(model: Any) -> Iterator[dict[str, Tensor]]:
    """Gradients of a block of backward passes as a dict, filled at the end; the model's own come back untouched.

    By their names in the model inside all wrappers; parameters of a wrapper's own say so. Not `torch.autograd.grad`:
    reentrant checkpointing refuses it.
    """
    names = {parameter: f"{name} (of the wrapper)" for name, parameter in model.named_parameters()}
    names |= {parameter: name for name, parameter in unwrap(model).named_parameters()}
    before = {parameter: parameter.grad for parameter in names}
    gradients: dict[str, Tensor] = {}
    try:
        for parameter in names:
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield gradients
        gradients.update({name: p.grad for p, name in names.items() if p.grad is not None})
    finally:
        for parameter in names:
            parameter.grad = before[parameter]


def _backward(loss: Tensor) -> None:
    """Nothing where all parameters are frozen."""
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def _cuts(packed: Any, count: int) -> list[int]:
    """Where the terms of each sample start if all samples are listed in order."""
    lengths = [0] * count
    for tree in packed:
        cu = tree.cu_terms.tolist()
        for place, index in enumerate(tree.sample_index.tolist()):
            lengths[index] = cu[place + 1] - cu[place]
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length)
    return cuts


def _weights(start: int, stop: int) -> Tensor:
    """Weights of both signs that differ from term to term, so that no term can stand for another."""
    return torch.cos(torch.arange(start, stop, dtype=torch.float64))


def _largest(tensors: list[Tensor]) -> float:
    """The largest absolute value; NaN is infinite."""
    return max([float(x.abs().nan_to_num(float("inf")).max()) for x in tensors if x.numel()], default=0.0)


def _compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str, float]:
    """(largest difference, its parameter, largest gradient). A gradient on one side only counts in full."""
    worst, where = 0.0, ""
    for name in [*ours, *(n for n in theirs if n not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        gap = a - b if a is not None and b is not None else a if a is not None else b
        assert gap is not None
        here = _largest([gap])
        if here >= worst:
            worst, where = here, name
    return worst, where, max(_largest(list(theirs.values())), 1e-300)


def _first(ours: list[Tensor], theirs: list[Tensor], allowed: float) -> PackError:
    """The first term whose log-probs are further apart."""
    for sample, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        apart = ((a - b).abs().nan_to_num(float("inf")) > allowed).nonzero()[:, 0]
        if len(apart):
            m = int(apart[0])
            text = f"term {m}: packed {float(a[m]):.9g}, alone {float(b[m]):.9g}; {allowed:g} is allowed"
            return PackError(text, sample=sample, source="log-probs", joint=", ")
    return PackError(f"log-probs differ; {allowed:g} is allowed")


def _check_half(ours: Run, theirs: Run, exact: Run) -> None:
    """Both sides against float32: packed may be off a little further than alone, never much."""
    errors = []
    for run in (ours, theirs):
        off = [a - b for a, b in zip(run[0], exact[0], strict=True)]
        flat = torch.cat(off).abs()
        errors.append((_largest(off), float(flat.mean()), _compare(run[1], exact[1])[0]))
    names = ("log-probs, largest", "log-probs, mean", "gradients, largest")
    for name, a, b, factor in zip(names, *errors, _HALF, strict=True):
        if not a <= factor * b + 1e-7:
            raise PackError(
                f"{name} error against float32: packed {a:.3g}, alone {b:.3g}; {factor:g} times that is allowed"
            )
