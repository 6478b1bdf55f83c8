"""The switch: treepack in place of TRL's packing and tree attention, and back."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import numpy as np

from ..._pages import page
from . import states
from .attention import tree_attention
from .row import TreeRow

__all__ = ["WORKS_WITH", "install", "uninstall"]

#: Versions of TRL that `install` is tested with.
WORKS_WITH = ("1.16.0",)

_PACKAGE = "trl.experimental.async_grpo"
_before: dict[str, Any] = {}  # what `install` replaced


def install() -> None:
    """Put treepack in place of TRL's packing and tree attention. A second call does nothing.

    Replaced are `TreeRow` where the batchers look it up, the attention that "tree_fa3" names (triton on CUDA, the
    reference elsewhere), and, around `DataCollatorForRollout.torch_call`, the rows of a micro-batch are made to have
    the same columns. Batchers and collators made before see the change, rows made before do not. Layers that carry a
    state run the row's tree too, and the trainer's refusal of them is lifted for models in which all of them can.

    Raises:
        ImportError: TRL is not installed (ModuleNotFoundError), lacks `trl.experimental.async_grpo.packing`, or packs
            otherwise than the versions known to work.
    """
    if _before:
        return
    packing, trainer = _modules()
    collator = trainer.DataCollatorForRollout
    _check_same(packing.TreeRow)
    _before.update(row=packing.TreeRow, attention=packing.tree_attention, torch_call=collator.torch_call)
    _put(packing, trainer, TreeRow, tree_attention, _torch_call)
    states.install(trainer)


def uninstall() -> None:
    """Put back what `install` replaced."""
    if _before:
        packing, trainer = _modules()
        _put(packing, trainer, _before["row"], _before["attention"], _before["torch_call"])
        states.uninstall(trainer)
        _before.clear()


def _modules() -> tuple[Any, Any]:
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"TRL is not installed; treepack is known to work with trl {_known()}", name="trl"
        ) from error
    try:
        packing = importlib.import_module(f"{_PACKAGE}.packing")
        trainer = importlib.import_module(f"{_PACKAGE}.async_grpo_trainer")
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("trl"):
            raise
        raise _unknown(version, f"has no {error.name}") from error
    for module, name in (
        (packing, "TreeRow"),
        (packing, "tree_attention"),
        (packing, "register_tree_attention"),
        (trainer, "TreeRow"),
        (trainer, "DataCollatorForRollout"),
        (trainer, "create_model_from_path"),
    ):
        if not hasattr(module, name):
            raise _unknown(version, f"has no {module.__name__}.{name}")
    return packing, trainer


def _put(packing: Any, trainer: Any, row: Any, attention: Any, torch_call: Any) -> None:
    packing.TreeRow = trainer.TreeRow = row
    packing.tree_attention = attention
    packing.register_tree_attention()  # looks the function up when called
    trainer.DataCollatorForRollout.torch_call = torch_call


def _torch_call(self: Any, examples: list[Any]) -> Any:
    """Rows of a micro-batch get the same columns, since a batch has one shape: kept sets in one row, counts of 0 in the
    others."""
    rows = [row for row in examples[0] if isinstance(row, TreeRow)]
    extras = {name: shape for row in rows for name, shape in row.extras.items()}
    for row in rows:
        row.extras = {**extras, **row.extras}
    return _before["torch_call"](self, examples)


def _check_same(theirs: Any) -> None:
    """Both rows on two samples that part, so that a TRL that packs otherwise is refused and not replaced."""
    try:
        same = _probe(theirs) == _probe(TreeRow)
    except Exception as error:  # whatever another class raises
        raise _unknown(metadata.version("trl"), f"has a TreeRow of another kind ({error})") from error
    if not same:
        raise _unknown(metadata.version("trl"), "has a TreeRow that packs otherwise")


def _probe(row_class: Any) -> Any:
    row, fits = row_class(), []
    for ids in ([5, 6, 7, 8], [5, 6, 9]):
        mask = np.array([0, 0] + [1] * (len(ids) - 2))
        sample = {"input_ids": np.array(ids), "completion_mask": mask, "old_log_probs": mask * 0.5}
        sample |= {"advantage": 0.25, "group_id": 3, "metrics": {}}  # type: ignore[dict-item]
        fits.append([row.fits(sample, budget) for budget in (4, 5, 6, 7)])
        row.add(sample)
    numbers = (row.load, row.trained, list(row.tokens), row.groups, len(row.samples), fits)
    return numbers, [(name, x.dtype, x.tolist()) for name, x in row.pack().items()]


def _known() -> str:
    return ", ".join(WORKS_WITH)


def _unknown(version: str, what: str) -> ImportError:
    return ImportError(
        f"trl {version} {what}; install() is known to work with trl {_known()}. With other versions pack with "
        f"treepack.Packer or DataCollatorForTreePacking, which do not depend on TRL: {page('migrating-trl')}"
    )
