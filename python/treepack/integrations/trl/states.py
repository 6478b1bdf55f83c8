"""Models with layers that carry a state (Qwen3.5 and its kind) under TRL's trainer, on the trees of its rows.

The boundaries of the segments are among the keyword arguments of the model's call, so the layers find the tree there.
TRL's trainer refuses such models by the types of their layers; that holds on for a model with a layer that cannot run
a tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .attention import tree_of_row

__all__ = ["install", "uninstall"]

_before: dict[str, Any] = {}  # what `install` replaced
_runs: set[str] = set()  # types of layers with a state, of the model that the trainer made last, where all run trees


def install(trainer: Any) -> None:
    """Let layers with a state find the tree of a row, and TRL's trainer take models of which all can run it.

    Args:
        trainer: the module of TRL's trainer.
    """
    from ..transformers.mixers import CARRIERS, install_loaded

    install_loaded()
    CARRIERS.append(tree_of_row)
    _before["create"] = trainer.create_model_from_path
    trainer.create_model_from_path = _create_model
    # The refusal is in the midst of the trainer's constructor: a set of the types of layers, less those of attention,
    # is to be empty. The model needs these types, so they are taken out where that set is made. Nothing else at run
    # time of this module calls the name but for an empty set.
    trainer.set = _types_left


def uninstall(trainer: Any) -> None:
    """Put back what `install` replaced."""
    from ..transformers.mixers import CARRIERS

    CARRIERS.remove(tree_of_row)
    trainer.create_model_from_path = _before.pop("create")
    del trainer.set
    _runs.clear()


def _types_left(values: Iterable[Any] = ()) -> set[Any]:
    return set(values) - _runs


def _create_model(*args: Any, **kwargs: Any) -> Any:
    """TRL's own, after which the types of layers that run trees are known."""
    from ..transformers.checks.layers import runnable_types
    from ..transformers.mixers import install_loaded

    model = _before["create"](*args, **kwargs)
    install_loaded()
    _runs.clear()
    _runs.update(runnable_types(model))
    if _runs:  # a pass without checkpointing would fill a cache with states, of which a tree has one for each sample
        model.config.get_text_config().use_cache = False
    return model
