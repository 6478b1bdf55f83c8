"""DataCollatorForTreePacking: the samples of a batch -> one packed tree, for transformers' Trainer and its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .._core import PackError
from ..packing import pack

__all__ = ["DataCollatorForTreePacking"]


@dataclass
class DataCollatorForTreePacking:
    """Folds the samples of a batch into one tree; `{"tree": PackedTree}` for a `compute_loss` of a line or two.

        class TreeTrainer(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                tree = inputs["tree"].to(model.device)
                log_probs = treepack.term_log_probs(model, tree)
                return -(log_probs * tree.terms["advantage"]).mean()

    Features have the columns of `treepack.pack`: `input_ids` (L,) and optionally `completion_mask`, `old_log_probs`,
    `advantage`, kept sets and more, as lists, NumPy arrays or tensors. Trainer needs `remove_unused_columns=False`, the
    model `attn_implementation="treepack"`.

    Args:
        max_tokens: most positions of the tree; None: as many as there are.
        pad_to_multiple_of: pad the tree to a multiple of this.
        branching: "token", or "label" for heads that take `shift_labels`.
        order: of siblings, as in `treepack.pack`.
        drop: columns that are not packed (texts, metrics).
    """

    max_tokens: int | None = None
    pad_to_multiple_of: int | None = None
    branching: Literal["token", "label"] = "token"
    order: Literal["largest_first", "first_seen"] = "largest_first"
    drop: Sequence[str] = ()

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One tree of all features.

        Raises:
            PackError: no features, more than fit `max_tokens` positions, or what `treepack.pack` refuses.
            TypeError: a value of the wrong type.
        """
        samples = [{name: x for name, x in feature.items() if name not in self.drop} for feature in features]
        if not samples:
            raise PackError("the batch has no samples; at least one is needed")
        limit = self.max_tokens
        if limit is None:
            longest = sum(np.size(sample.get("input_ids", ())) for sample in samples)
            limit = max(longest, 1) + (self.pad_to_multiple_of or 1) - 1
        packed = pack(
            samples,
            max_tokens=limit,
            branching=self.branching,
            order=self.order,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        if len(packed) != 1:
            raise PackError(
                f"the batch of {len(samples)} samples needs {len(packed)} trees of {limit} positions; one forward "
                "takes one: lower per_device_train_batch_size, raise max_tokens, or use treepack.Packer in the dataset"
            )
        return {"tree": packed[0]}
