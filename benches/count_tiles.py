"""Partial tiles by what their mask needs, counted on the CPU: which of them could be told apart.

    python benches/count_tiles.py [--trees FOLDER]          FOLDER of .npz files with subtree_end (int32)

For 128 x 128 tiles, as the kernels list them: full ones, and of the partial ones

    diagonal      key <= query, on the diagonal, and nothing ends within the tile
    one bound     beside the diagonal, all keys end at one place: one number masks the rows of the whole tile
    two bounds    they end at two places, where before the query tile and behind it are one place each
    more          at more, or on the diagonal with ends of its own

and, as each consumer has 64 of the query rows, how many 64 x 128 halves of partial tiles are full or empty by
themselves.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "tests" / "gpu")]
import source_tree  # noqa: E402, F401, I001
import forests  # noqa: E402
import torch  # noqa: E402

from treepack.attention import tiles  # noqa: E402

BLOCK = 128
KINDS = ("diagonal", "one bound", "two bounds", "more")


def kind(end: np.ndarray, m0: int, n0: int) -> str:
    """What the mask of a partial tile needs."""
    m1 = min(m0 + BLOCK, len(end))
    keys = end[n0 : n0 + BLOCK]
    if m0 == n0:
        return "diagonal" if (keys >= m1).all() else "more"
    places = len(np.unique(np.clip(keys, m0, m1)))
    return {1: "one bound", 2: "two bounds"}.get(places, "more")


def halves(end: np.ndarray, m0: int, n0: int) -> tuple[int, int]:
    """(full, empty) of the two halves of a tile."""
    n, full, empty = len(end), 0, 0
    keys = end[n0 : n0 + BLOCK]
    for first in (m0, m0 + BLOCK // 2):
        last = min(first + BLOCK // 2, n)
        if first >= n or n0 >= last or keys.max() <= first:
            empty += 1
        elif n0 + BLOCK - 1 <= first and keys.min() >= last:
            full += 1
    return full, empty


def count(end: np.ndarray) -> dict[str, int]:
    partial, full = tiles.tile_relation(torch.from_numpy(end), BLOCK, BLOCK)
    found = dict.fromkeys(("full", "partial", *KINDS, "full halves", "empty halves"), 0)
    found["full"], found["partial"] = int(full.sum()), int(partial.sum())
    for m, n in partial.nonzero().tolist():
        found[kind(end, m * BLOCK, n * BLOCK)] += 1
        whole, none = halves(end, m * BLOCK, n * BLOCK)
        found["full halves"] += whole
        found["empty halves"] += none
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, help="folder of .npz files")
    options = parser.parse_args()
    trees = {name: forests.layout(nests).subtree_end for name, nests in forests.gpu_trees().items()}
    for path in sorted(options.trees.glob("*.npz")) if options.trees else ():
        trees[path.stem] = np.load(path)["subtree_end"].astype(np.int32)
    names = ("full", "partial", *KINDS, "full halves", "empty halves")
    print(f"{'tree':16}" + "".join(f"{name:>14}" for name in names))
    for name, end in trees.items():
        found = count(end)
        print(f"{name:16}" + "".join(f"{found[x]:14,}" for x in names), flush=True)


if __name__ == "__main__":
    main()
