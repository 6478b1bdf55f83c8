"""Rollout files of the common formats -> samples for `treepack.pack` and `treepack.Packer`, in bounded memory.

    from treepack.readers import open_rollouts

    for samples in open_rollouts("rollouts.parquet").batches():
        packed = treepack.pack(samples, max_tokens=16384)

JSONL and NPZ need NumPy alone, Parquet, .zst and folders of Hugging Face `datasets` need pyarrow, chat messages need
transformers: each is imported when such a file is opened.
"""

from ..inputs.aliases import USUAL
from .rollouts import Rollouts, open_rollouts
from .source import ReadError, ReadWarning

__all__ = ["USUAL", "ReadError", "ReadWarning", "Rollouts", "open_rollouts"]
