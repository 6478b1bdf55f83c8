"""Offline packing: a file of rollouts -> Parquet shards with a row per tree -> the same trees, for SFT and DPO.

    from treepack import offline

    offline.pack_file("rollouts.parquet", "packed", max_tokens=16384)
    trees = offline.load("packed", shuffle_seed=0, rank=rank, world_size=world_size)

Needs pyarrow (`pip install 'treepack[cli]'`) once one of its functions is used; docs/offline.md has recipes, with
`datasets` and Ray Data as well.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import pack_batch
    from .files import pack_file
    from .loader import Trees, load
    from .manifest import Manifest, Shard
    from .options import Options
    from .pair_files import Pairs, open_pairs
    from .rows import table_of, trees_of
    from .writer import Progress, write

__all__ = [
    "Manifest",
    "Options",
    "Pairs",
    "Progress",
    "Shard",
    "Trees",
    "load",
    "open_pairs",
    "pack_batch",
    "pack_file",
    "table_of",
    "trees_of",
    "write",
]

_HOMES = {
    "batches": ("pack_batch",),
    "files": ("pack_file",),
    "loader": ("Trees", "load"),
    "manifest": ("Manifest", "Shard"),
    "options": ("Options",),
    "pair_files": ("Pairs", "open_pairs"),
    "rows": ("table_of", "trees_of"),
    "writer": ("Progress", "write"),
}


def __getattr__(name: str) -> Any:
    # pyarrow takes a while, and the command line wants the options alone.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'treepack.offline' has no attribute {name!r}")
