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

from ._core import PackError
from .logprobs import head_log_probs, term_log_probs
from .packing import pack
from .testing import as_samples

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
    gradients: float
    """Largest difference of a gradient, as a share of the largest gradient of the model."""
    worst: str
    """The parameter with that difference."""


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
) -> Parity:
    """Compare log-probs and parameter gradients of packed trees with those of each sample alone.

    Args:
        model: a Hugging Face causal language model with `attn_implementation="treepack"`, wrapped or not, on its
            device. Its gradients are left as they were; dropout must be off.
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

    Returns:
        A `Parity`.

    Raises:
        PackError: something differs by more; the message says what, by how much, and what is allowed.
        ValueError: a model that is refused, as in `term_log_probs`; samples without a loss term.

    Example:
        >>> parity = treepack.testing.check_parity(model, samples)
    """
    listed = as_samples(samples)
    packed = pack(
        listed, max_tokens=max_tokens or max(1, sum(len(s["input_ids"]) for s in listed)), branching=branching
    )
    if not packed.stats.terms:
        raise ValueError("the samples have no trained token after their first, so there is nothing to compare")
    options: dict[str, Any] = {"temperature": temperature, "impl": impl}
    dtype = next(model.parameters()).dtype
    ours = _run_packed(model, packed, len(listed), packed.stats.terms, options)
    theirs = _run_alone(model, listed, packed.stats.terms, alone, branching, options)
    difference, worst, scale = _compare(ours[1], theirs[1])
    log_probs = _largest([a - b for a, b in zip(ours[0], theirs[0], strict=True)])
    stats = packed.stats
    found = Parity(
        stats.samples, stats.terms, stats.raw_tokens, stats.packed_tokens, stats.trees, log_probs,
        difference / scale, worst)  # fmt: skip
    if dtype in _TOLERANCES or log_prob_tolerance is not None or gradient_tolerance is not None:
        defaults = _TOLERANCES.get(dtype, (float("inf"), float("inf")))
        allowed = defaults[0] if log_prob_tolerance is None else log_prob_tolerance
        if not log_probs <= allowed:
            raise PackError(f"log-probs: {_first(ours[0], theirs[0], allowed)}; {allowed:g} is allowed")
        allowed = defaults[1] if gradient_tolerance is None else gradient_tolerance
        if not found.gradients <= allowed:
            raise PackError(
                f"gradient of {worst}: packed and alone differ by {difference:.3g}, {found.gradients:.3g} of the "
                f"largest gradient of the model; {allowed:g} is allowed"
            )
        return found
    from .integrations.models import unwrap

    exact = _run_alone(copy.deepcopy(unwrap(model)).float(), listed, stats.terms, alone, branching, options)
    _check_half(ours, theirs, exact)
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
            ((log_probs * weights).sum() / terms).backward()
            for i, value in zip(indexes, tree.unpack_terms(log_probs.detach()), strict=True):
                values[i] = value.double()
    return values, gradients


def _run_alone(
    model: Any, samples: list[Any], terms: int, attention: str | None, branching: Any, options: dict[str, Any]
) -> Run:
    from .integrations.models import check_model, logit_options, output_head
    from .integrations.transformers import ATTENTION, hidden_alone

    device = next(model.parameters()).device
    inner = check_model(model)
    values, at = [], 0
    weight, bias = output_head(inner)
    scale, softcap = logit_options(inner)
    shape = {"bias": bias, "scale": scale, "softcap": softcap, "temperature": options["temperature"]}
    try:
        # Until the last backward pass, since checkpointed layers run again in it.
        inner.set_attn_implementation(attention or ATTENTION)
        with _collected(model) as gradients:
            for sample in samples:
                tree = pack([sample], max_tokens=len(sample["input_ids"]), branching=branching)[0].to(device)
                if attention is None:
                    log_probs = term_log_probs(model, tree, **options)
                else:
                    log_probs = head_log_probs(hidden_alone(model, tree.input_ids), weight, tree, **shape)
                weights = _weights(at, at := at + log_probs.shape[0]).to(log_probs)
                ((log_probs * weights).sum() / terms).backward()
                values.append(log_probs.detach().double())
    finally:
        inner.set_attn_implementation(ATTENTION)
    return values, gradients


@contextmanager
def _collected(model: Any) -> Iterator[dict[str, Tensor]]:
    """Gradients of a block of backward passes as a dict, filled at the end; the model's own come back untouched.

    Not `torch.autograd.grad`: reentrant checkpointing refuses it.
    """
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients: dict[str, Tensor] = {}
    try:
        for parameter in model.parameters():
            parameter.grad = None
        yield gradients
        gradients.update(
            {n.rpartition("module.")[2]: p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = before[name]


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


def _first(ours: list[Tensor], theirs: list[Tensor], allowed: float) -> str:
    for sample, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        apart = ((a - b).abs().nan_to_num(float("inf")) > allowed).nonzero()[:, 0]
        if len(apart):
            m = int(apart[0])
            return f"sample {sample}, term {m}: packed {float(a[m]):.9g}, alone {float(b[m]):.9g}"
    return "equal"


def _check_half(ours: Run, theirs: Run, exact: Run) -> None:
    """Both sides against float32: packed may be off a little further than alone, never much."""
    errors = []
    for run in (ours, theirs):
        off = [a - b for a, b in zip(run[0], exact[0], strict=True)]
        flat = torch.cat(off).abs()
        gradient = {name: g.float() for name, g in run[1].items()}
        errors.append((_largest(off), float(flat.mean()), _compare(gradient, exact[1])[0]))
    names = ("log-probs, largest", "log-probs, mean", "gradients, largest")
    for name, a, b, factor in zip(names, *errors, _HALF, strict=True):
        if not a <= factor * b + 1e-7:
            raise PackError(
                f"{name} error against float32: packed {a:.3g}, alone {b:.3g}; {factor:g} times that is allowed"
            )
