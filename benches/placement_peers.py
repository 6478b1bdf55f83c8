"""Placements to compare with, on the nodes of the one trie over all samples: textbook rules, and the slow search."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import treepack

SEARCH = Path(__file__).with_name("placement_search.rs")
Batch = dict[str, np.ndarray]


class Size(NamedTuple):
    tokens: int
    trees: int

    def __str__(self) -> str:
        return f"{self.tokens:,} ({self.trees})"


def price(max_tokens: int) -> int:
    """What a tree costs beside its tokens, in tokens: as in the planner, a thirty-second part of a full one."""
    return max_tokens // 32


def cost(size: Size, max_tokens: int) -> int:
    return size.tokens + size.trees * price(max_tokens)


@dataclass
class Trie:
    """Segments of the one tree without a budget; node 0 is the root."""

    parent: np.ndarray
    length: np.ndarray
    leaf: np.ndarray
    """The last node of each sample."""
    first: np.ndarray
    """The first id of each node."""

    @classmethod
    def of(cls, batch: Batch) -> Trie:
        (tree,) = treepack.pack(batch, max_tokens=2**31 - 1)
        leaf = np.empty(len(tree.sample_index), np.int64)
        leaf[tree.sample_index] = tree.sample_last_segment + 1
        return cls(
            np.append(0, tree.segment_parent + 1),
            np.append(0, np.diff(tree.cu_segments)),
            leaf,
            np.append(-1, tree.input_ids[tree.cu_segments[:-1]]),
        )

    def paths(self) -> list[list[int]]:
        """The nodes of each sample, last first."""
        parent = self.parent.tolist()
        out = []
        for node in self.leaf.tolist():
            path = []
            while node:
                path.append(node)
                node = parent[node]
            out.append(path)
        return out

    def size(self, tree_of: np.ndarray) -> Size:
        """Positions and trees of a placement, counted node by node."""
        node, tree, tokens = self.leaf, np.asarray(tree_of, np.int64), 0
        trees = len(np.unique(tree))
        # A level at a time from the deepest node up, so that what two paths share is met once.
        depth = np.zeros(len(self.parent), np.int64)
        for child in range(1, len(self.parent)):
            depth[child] = depth[self.parent[child]] + 1
        for level in range(int(depth.max()), 0, -1):
            here = depth[node] == level
            keys = np.unique(tree[here] * len(self.parent) + node[here])
            above = self.parent[keys % len(self.parent)]
            tokens += int(self.length[keys % len(self.parent)].sum())
            node = np.concatenate([node[~here], above])
            tree = np.concatenate([tree[~here], keys // len(self.parent)])
        return Size(tokens, trees)


def tree_of(packed: treepack.Packed) -> np.ndarray:
    """The tree of each sample."""
    out = np.empty(packed.stats.samples, np.int64)
    for number, tree in enumerate(packed):
        out[tree.sample_index] = number
    return out


def reordered(batch: Batch, order: np.ndarray) -> Batch:
    ends = batch["cu_seqlens"]
    ids = np.concatenate([batch["input_ids"][ends[i] : ends[i + 1]] for i in order])
    return {"input_ids": ids, "cu_seqlens": np.concatenate(([0], np.cumsum(np.diff(ends)[order])))}


def by_falling_length(batch: Batch, max_tokens: int) -> np.ndarray:
    """First fit decreasing: the longest sample first."""
    order = np.argsort(-np.diff(batch["cu_seqlens"]), kind="stable")
    out = np.empty(len(order), np.int64)
    out[order] = tree_of(treepack.pack(reordered(batch, order), max_tokens=max_tokens, placement="first_fit"))
    return out


def next_fit(trie: Trie, order: list[int], max_tokens: int) -> np.ndarray:
    """Samples in an order, each into the open tree; where it does not fit, the next tree is opened."""
    paths, length = trie.paths(), trie.length.tolist()
    out = np.empty(len(paths), np.int64)
    inside: set[int] = set()
    tree = used = 0
    for sample in order:
        added = sum(length[node] for node in paths[sample] if node not in inside)
        if used + added > max_tokens:
            tree, used, inside = tree + 1, 0, set()
            added = sum(length[node] for node in paths[sample])
        inside.update(paths[sample])
        used += added
        out[sample] = tree
    return out


def sorted_order(trie: Trie) -> list[int]:
    """Samples in lexicographic order."""
    paths, first = trie.paths(), trie.first.tolist()
    return sorted(range(len(paths)), key=lambda sample: [first[node] for node in reversed(paths[sample])])


def peers(batch: Batch, trie: Trie, max_tokens: int) -> dict[str, np.ndarray]:
    """The tree of each sample under the four textbook rules."""
    return {
        "first fit": tree_of(treepack.pack(batch, max_tokens=max_tokens, placement="first_fit")),
        "falling length": by_falling_length(batch, max_tokens),
        "arrival order": next_fit(trie, list(range(len(trie.leaf))), max_tokens),
        "sorted order": next_fit(trie, sorted_order(trie), max_tokens),
    }


def build_search(folder: Path) -> Path:
    """Compiles the slow search; it needs `rustc` alone."""
    out = folder / "placement_search"
    command = [
        "rustc",
        "-C",
        "opt-level=3",
        "-C",
        "target-cpu=native",
        "--edition",
        "2021",
        "-o",
        str(out),
        str(SEARCH),
    ]
    subprocess.run(command, check=True)
    return out


def search(
    program: Path, trie: Trie, max_tokens: int, most_trees: int, starts: list[np.ndarray], seconds: float, seed: int = 0
) -> np.ndarray:
    """The best placement that the slow search finds: see placement_search.rs."""
    dense = [np.unique(start, return_inverse=True)[1] for start in starts]
    head = [len(trie.parent), len(trie.leaf), max_tokens, price(max_tokens), most_trees, len(starts)]
    words = np.concatenate([np.array(head), trie.parent, trie.length, trie.leaf, *dense]).astype("<u4")
    with tempfile.TemporaryDirectory() as name:
        given, found = Path(name) / "input", Path(name) / "output"
        words.tofile(given)
        subprocess.run(["nice", "-n", "15", program, given, found, f"{seconds}", f"{seed}"], check=True)
        return np.fromfile(found, "<u4").astype(np.int64)
