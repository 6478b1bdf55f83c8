"""AReaL 1.0.4: its tree training on treepack's packing, and on request on treepack's attention.

    from treepack.integrations import areal

    areal.install()                  # build_packed_tree_batch of all engines is the one below
    areal.install(attention=True)    # ... and attention of the FSDP engine runs on treepack's kernels

A padded batch goes through `treepack.pack(placement="first_fit")` and comes out as AReaL's `MicroBatchList`: the same
samples in the same micro-batches. Costs one pass over the batch; no dense mask is made. Tokens of a tree lie
depth-first, where AReaL lays them out in order of insertion.
"""

from .batch import build_packed_tree_batch, build_tries
from .switch import install, uninstall
from .trie import PackedTrie, TrieNode

__all__ = ["PackedTrie", "TrieNode", "build_packed_tree_batch", "build_tries", "install", "uninstall"]
