"""DataCollatorForTreePacking: the samples of a batch -> one packed tree, for transformers' Trainer and its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..distributed.foreign import refuse_foreign
from ..errors import PackError, PackTypeError, listed
from ..packing import pack
from ..packing.options import Branching, Order, PackOptions
from ..tree.tree import HostTree

__all__ = ["DataCollatorForTreePacking", "tree_batch"]


def tree_batch(tree: HostTree) -> dict[str, Any]:
    """What Trainer wants to see of a packed tree: the tree, and labels to count.

    Returns:
        `tree`, and `labels` (1, M + 1) int64: -100, then the target of each loss term. Trainer counts the labels of all
        micro-batches of a step and hands the count to `compute_loss` as `num_items_in_batch`, and evaluates what has
        labels. Some versions leave out the first label of a row, as it has no predecessor: that is the -100, so that
        all count M.
    """
    labels = torch.full((1, len(tree.term_target) + 1), -100, dtype=torch.int64)
    labels[0, 1:] = torch.as_tensor(tree.term_target)
    return {"tree": tree, "labels": labels}


@dataclass
class DataCollatorForTreePacking:
    """Folds the samples of a batch into one tree; `tree_batch(tree)` for a `compute_loss` of a few lines.

        class TreeTrainer(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                tree = inputs["tree"].to(self.args.device)
                log_probs = treepack.term_log_probs(model, tree)
                loss = -(log_probs * tree.terms["advantage"]).sum() / (num_items_in_batch or max(len(log_probs), 1))
                if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                    loss = loss * self.accelerator.num_processes
                return (loss, {"log_probs": log_probs[None]}) if return_outputs else loss

    `num_items_in_batch` is the number of loss terms of all micro-batches (and ranks) of the step, so a term weighs the
    same however it was batched. A `.mean()` per tree would not do that.

    Features have the columns of `treepack.pack`: `input_ids` (L,), `completion_mask` (L,) and optionally
    `old_log_probs`, `advantage`, kept sets and more, as lists, NumPy arrays or tensors. Trainer needs
    `remove_unused_columns=False`, the model `attn_implementation="treepack"`.

    Args:
        max_tokens: most positions of the tree; None: as many as there are.
        pad_to_multiple_of: pad the tree to a multiple of this.
        branching: "token", or "label" for heads that take `shift_labels`.
        order: of siblings, as in `treepack.pack`.
        drop: columns that are not packed (texts, metrics).
        train_all: features have no `completion_mask`, and every token that has a predecessor is trained. Without it
            such features are refused: it is how a batch looks whose mask was lost on the way.
    """

    max_tokens: int | None = None
    pad_to_multiple_of: int | None = None
    branching: Branching = "token"
    order: Order = "largest_first"
    drop: Sequence[str] = ()
    train_all: bool = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One tree of all features, as `tree_batch` gives it.

        Raises:
            PackError: no features, features without `completion_mask`, more than fit `max_tokens` positions, or what
                `treepack.pack` refuses.
            ValueError: Trainer runs under accelerate's sequence or context parallelism, which would cut the batch.
            TypeError: a value of the wrong type.
        """
        refuse_foreign()
        for i, feature in enumerate(features):
            if not isinstance(feature, Mapping):
                raise PackTypeError(
                    f"is a {type(feature).__name__}; a batch is a list of dicts of columns", sample=i, joint=" "
                )
        samples = [{name: x for name, x in feature.items() if name not in self.drop} for feature in features]
        if not samples:
            raise PackError("the batch has no samples; at least one is needed")
        self._check_masks(samples)
        if self.train_all:  # so that labels and the like are columns and no mask that was forgotten
            for sample in samples:
                sample["completion_mask"] = np.ones(np.size(sample.get("input_ids", ())), np.uint8)
        limit = self.max_tokens
        if limit is None:
            longest = sum(np.size(sample.get("input_ids", ())) for sample in samples)
            limit = max(longest, 1) + (self.pad_to_multiple_of or 1) - 1
        options = PackOptions.of({**vars(self), "max_tokens": limit})
        packed = pack(samples, **options.pack_keywords())
        if len(packed) != 1:
            (whole,) = pack(samples, **{**options.pack_keywords(), "max_tokens": 2**31 - 1})
            raise PackError(
                f"the batch of {len(samples)} samples needs {len(packed)} trees of {limit} positions; one forward "
                f"takes one: lower per_device_train_batch_size, raise max_tokens to {whole.num_tokens} or more, or use "
                "treepack.Packer in the dataset"
            )
        return tree_batch(packed[0])

    def _check_masks(self, samples: Sequence[Mapping[str, Any]]) -> None:
        for i, sample in enumerate(samples):
            if ("completion_mask" in sample) != self.train_all:
                continue
            if self.train_all:
                raise PackError(
                    "has a completion_mask, but the collator was made with train_all=True; leave out train_all, or "
                    'ignore the mask with drop=["completion_mask"]',
                    sample=i,
                    joint=" ",
                )
            has = listed(sample) or "no columns"
            raise PackError(
                f"has no completion_mask (it has {has}), so every token would be trained, its prompt too. Trainer "
                "drops the column by default: set remove_unused_columns=False. Where labels mark the trained tokens, "
                "completion_mask = (labels != -100); to train every token, DataCollatorForTreePacking(train_all=True)",
                sample=i,
                joint=" ",
            )
