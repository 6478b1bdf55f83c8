"""TRL on treepack: the prefix packing and the tree attention of its asynchronous GRPO trainer, by one switch.

    import treepack.integrations.trl
    treepack.integrations.trl.install()          # before AsyncGRPOTrainer is made

TRL's `FixedCountBatcher`, `TokenBudgetBatcher` and `DataCollatorForRollout` then make the same batches, byte for byte,
and its attention "tree_fa3" runs on `treepack.tree_attention`. For every other trainer, TRL's own of other versions
included, there is `DataCollatorForTreePacking`, which needs no TRL. TRL is imported by `install` alone.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import _core
from ...attention import TreeTiles
from ..collator import DataCollatorForTreePacking
from ..transformers.checks.tree import ROW_CHECKED, row_is_short
from .row import TreeRow

__all__ = ["WORKS_WITH", "DataCollatorForTreePacking", "TreeRow", "install", "tree_attention", "uninstall"]

#: Versions of TRL that `install` is tested with.
WORKS_WITH = ("1.16.0",)

_PACKAGE = "trl.experimental.async_grpo"
_before: dict[str, Any] = {}  # what `install` replaced


def install() -> None:
    """Put treepack in place of TRL's packing and tree attention. A second call does nothing.

    Replaced are `TreeRow` where the batchers look it up, the attention that "tree_fa3" names (triton on CUDA, the
    reference elsewhere), and, around `DataCollatorForRollout.torch_call`, the rows of a micro-batch are made to have
    the same columns. Batchers and collators made before see the change, rows made before do not.

    Raises:
        ImportError: TRL is not installed, lacks `trl.experimental.async_grpo.packing`, or packs otherwise than the
            versions known to work.
    """
    if _before:
        return
    packing, trainer = _modules()
    collator = trainer.DataCollatorForRollout
    _check_same(packing.TreeRow)
    _before.update(row=packing.TreeRow, attention=packing.tree_attention, torch_call=collator.torch_call)
    _put(packing, trainer, TreeRow, tree_attention, _torch_call)


def uninstall() -> None:
    """Put back what `install` replaced."""
    if _before:
        packing, trainer = _modules()
        _put(packing, trainer, _before["row"], _before["attention"], _before["torch_call"])
        _before.clear()


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    tree_kv_index: Any = None,
    tree_max_seqlen_q: Any = None,
    tree_max_seqlen_k: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """TRL's tree attention on treepack's kernel: the tree is read off the lengths, and no key is gathered.

    Args:
        module: the attention layer. query (1, H, N, D), key and value (1, H_kv, N, D).
        tree_cu_seqlens_q, tree_cu_seqlens_k: (S + 1,) boundaries of the segments and of their paths, depth first. The
            first layer waits for the device once; what it finds stays with `tree_cu_seqlens_q` for the other layers.
        tree_kv_index, tree_max_seqlen_q, tree_max_seqlen_k: not needed.
        kwargs: as for `treepack.integrations.transformers.tree_attention_forward`.

    Returns:
        (output (1, N, H, D), None).

    Raises:
        ValueError: lengths that are not those of these tokens, or an option that tree attention does not compute.
    """
    from transformers.integrations.flash_attention import get_target_dtype

    from ..transformers.forward import tree_attention_forward

    tiles = getattr(tree_cu_seqlens_q, "_treepack_tiles", None)
    if tiles is None:
        tiles = tiles_of_segments(tree_cu_seqlens_q, tree_cu_seqlens_k)
        tree_cu_seqlens_q._treepack_tiles = tiles  # type: ignore[attr-defined]
        # A sample may end within the tree, so all that is known of their lengths is the longest.
        tiles.derived[ROW_CHECKED] = row_is_short(module.config, tiles.derived["longest"])
    dtype = get_target_dtype(query, module) or query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    # A cache that this pass fills is as long as the row; one from before it is longer, and refused there.
    kwargs.pop("use_cache", None)
    return tree_attention_forward(module, query, key, value, attention_mask, **{**kwargs, "tree_tiles": tiles})


def tiles_of_segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> TreeTiles:
    """The tree of segments in depth-first order from how long they and their paths are; O(N), on the host.

    Args:
        cu_seqlens_q, cu_seqlens_k: (S + 1,) int32, boundaries of the segments and of their paths.

    Returns:
        The metadata of attention, on their device.

    Raises:
        ValueError: a path that is shorter than its segment, or than what lies above it.
    """
    cuts = np.ascontiguousarray(cu_seqlens_q.cpu().numpy(), np.int32)
    length = np.diff(cuts)
    reach = np.diff(cu_seqlens_k.cpu().numpy()).astype(np.int32)
    if len(reach) != len(length) or (reach < length).any() or (length < 1).any():
        raise ValueError(
            f"{len(length)} segments of {length.tolist()[:8]} tokens with paths of {reach.tolist()[:8]}: a path holds "
            "its segment, and a segment at least one token"
        )
    # What lies below a segment starts at the depth at which it ends; the first segment that starts higher up ends it.
    ends = np.full(len(length), cuts[-1], np.int32)
    open_segments: list[tuple[int, int]] = []  # (segment, depth at which it ends)
    for segment, (depth, end) in enumerate(zip((reach - length).tolist(), reach.tolist(), strict=True)):
        while open_segments and open_segments[-1][1] > depth:
            ends[open_segments.pop()[0]] = cuts[segment]
        above = open_segments[-1][1] if open_segments else 0
        if above != depth:
            raise ValueError(f"segment {segment} starts at depth {depth}; what lies above it ends at depth {above}")
        open_segments.append((segment, end))
    subtree_end = np.repeat(ends, length)
    depths = np.arange(cuts[-1], dtype=np.int64) + np.repeat(reach - length - cuts[:-1], length)
    device = cu_seqlens_q.device
    tiles = {}
    for size in (128, 64):
        rows, items = _core.tile_lists(cuts, subtree_end, size)
        tiles[size] = torch.from_numpy(rows).to(device).reshape(-1, 4), torch.from_numpy(items).to(device)
    made = TreeTiles(torch.from_numpy(subtree_end).to(device), torch.from_numpy(depths).to(device), tiles)
    made.derived["longest"] = int(reach.max(initial=0))
    return made


# --- the switch -----------------------------------------------------------------------------------------------------


def _modules() -> tuple[Any, Any]:
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"TRL is not installed; treepack is known to work with trl {_known()}") from error
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
        "treepack.Packer or DataCollatorForTreePacking, which do not depend on TRL: docs/migrating-trl.md"
    )
