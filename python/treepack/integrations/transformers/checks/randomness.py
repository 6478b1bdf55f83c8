"""Randomness in training that a packed tree would draw once where its samples draw apart.

Found by what modules hold: dropout modules of any kind, and numbers whose name speaks of dropout, jitter or noise, as
functional dropout, jitter in routers, the adapters of PEFT and NEFTune keep them. No tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["check_randomness"]

_RANDOM = re.compile(r"dropout|pdrop|layerdrop|drop_?(path|prob|rate)|jitter|noise")
# Settings that forward functions read from the config itself.
_CONFIG = ("attention_dropout", "router_jitter_noise")


def check_randomness(name: str, config: Any, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for a module in training mode that draws at random.

    Args:
        name: of the model, for the message.
        config: the text config of the model.
        modules: (path, module) of everything that runs, a module before its parts.
    """
    modules = list(modules)
    for setting in _CONFIG if any(module.training for _, module in modules) else ():
        if getattr(config, setting, 0):
            raise ValueError(_refusal(name, setting, getattr(config, setting)))
    adapters: dict[str, frozenset[str]] = {}  # by the path of a layer of PEFT: the adapters that it runs
    for path, module in modules:
        live = _live_adapters(module)
        if live is not None:
            adapters[path] = live
        if not module.training:
            continue
        if adapters:
            layer, holder, adapter = ("", "", *path.rsplit(".", 2))[-3:]  # of "q_proj.lora_dropout.default"
            if holder != "base_layer" and adapter not in adapters.get(layer, (adapter,)):
                continue
        for setting, amount in _drawn(module, live):
            where = f"{path}.{setting}" if setting and path else path or setting
            raise ValueError(_refusal(name, where if setting else f"{path} (dropout)", amount))


def _drawn(module: nn.Module, live: frozenset[str] | None) -> Iterator[tuple[str, float]]:
    """(attribute, amount) of what a module draws, the attribute empty for the probability of a dropout module."""
    kind: Any = type(module)
    if _is_dropout(kind) and _positive(getattr(module, "p", 0)):
        yield "", float(module.p)  # type: ignore[arg-type]
    attributes = vars(module)
    for attribute in _random_names(tuple(attributes)):
        value = attributes[attribute]
        if isinstance(value, dict):  # PEFT: by adapter
            for adapter, amount in value.items():
                if _positive(amount) and (live is None or adapter in live):
                    yield f"{attribute}[{adapter!r}]", amount
        elif _positive(value):
            yield attribute, value


def _live_adapters(module: nn.Module) -> frozenset[str] | None:
    """The adapters that a layer of PEFT runs; None for any other module."""
    layer: Any = module
    kind: Any = type(module)
    if not _is_adapter(kind):
        return None
    return frozenset() if layer.disable_adapters or layer.merged else frozenset(layer.active_adapters)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


@cache
def _is_adapter(kind: type) -> bool:
    return hasattr(kind, "adapter_layer_names") and isinstance(getattr(kind, "merged", None), property)


@cache
def _is_dropout(kind: type) -> bool:
    return issubclass(kind, _DropoutNd) or "Drop" in kind.__name__


@cache
def _random_names(attributes: tuple[str, ...]) -> tuple[str, ...]:
    """Those that speak of randomness; a model has a few sets of attributes for thousands of modules."""
    return tuple(name for name in attributes if _RANDOM.search(name))


def _refusal(name: str, what: str, amount: float) -> str:
    return (
        f"{name} trains with {what} = {amount}: a shared token would draw once where its samples draw apart, so packed "
        "and alone differ; set it to 0, or model.eval()"
    )
