"""Models with a table of positions, learned or computed once: a sample that is longer than the table has no row there.

On the CPU that is an IndexError, on a GPU an assert that ends the process; so it is said before anything runs. Rotary
embeddings that are computed from the positions have no table, and no limit but what the model was trained on.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from torch import Tensor, nn

from ....tree.segments import sample_lengths

__all__ = ["check_length", "position_table"]

#: What models call their table: an embedding, or a tensor made from sines.
_NAMES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed", "pos_encoding")
#: Encoders of images and sounds have tables of their own.
_OTHER = ("vision", "visual", "image", "audio", "speech", "encoder")

# Where the table of a model is: (the module that holds it, its name there), or None. Looked for once.
_found: WeakKeyDictionary[Any, tuple[ref[Any], str] | None] = WeakKeyDictionary()


def position_table(model: Any) -> tuple[str, int] | None:
    """(name of the table, positions in it) of a Hugging Face model without its wrappers; None where it has no table."""
    if model not in _found:
        _found[model] = _look(model)
    found = _found[model]
    owner = None if found is None else found[0]()
    if found is None or owner is None:
        return None
    table = getattr(owner, found[1])
    if isinstance(table, nn.Embedding):
        offset = getattr(table, "offset", 0)  # rows in front that stand for no position (OPT, BioGPT)
        return found[1], table.num_embeddings - (offset if isinstance(offset, int) else 0)
    return found[1], int(table.shape[0])


def _look(model: Any) -> tuple[ref[Any], str] | None:
    for path, module in model.named_modules():
        if any(other in part for part in path.split(".") for other in _OTHER):
            continue
        for name in _NAMES:
            table = getattr(module, name, None)
            if isinstance(table, nn.Embedding) or (isinstance(table, Tensor) and table.dim() == 2):
                return ref(module), name
    return None


def check_length(name: str, model: Any, tree: Any) -> None:
    """Refuse a tree with a sample that is longer than the model's table of positions."""
    table = position_table(model)
    host = tree.numpy()
    if table is None or not host.num_samples:
        return
    tokens = sample_lengths(host)
    over = np.flatnonzero(tokens > table[1])
    if over.size:
        at = over[0]
        more = f" ({len(over)} samples of the tree are too long)" if len(over) > 1 else ""
        raise ValueError(
            f"sample {host.sample_index[at]} has {tokens[at]} tokens; {name} has {table[1]} positions "
            f"({table[0]}){more}: leave such samples out or cut them"
        )
