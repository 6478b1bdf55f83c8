"""How few positions and trees any placement needs: a bound, bottom-up over the segments of the one unlimited tree.

A segment that ends at depth e, with W = the sum of its children's bounds, lies in
k >= max(1, ceil(W / (max_tokens - e))) trees: each tree that holds some of what is below holds the e positions above it
too. Its bound is W + k x its length; the root, a segment of length 0 that ends at depth 0, bounds the number of trees.
"""

from typing import Any

import treepack


def lower_bound(samples: Any, max_tokens: int, **options: Any) -> tuple[int, int]:
    """(positions, trees) that no placement of these samples within `max_tokens` can go below.

    Args:
        samples: what `treepack.pack` takes; none of them longer than `max_tokens`.
        options: of `treepack.pack`, as far as they say which tokens are equal (branching, per_token, per_sample).
    """
    packed = treepack.pack(samples, max_tokens=2**31 - 1, **options)
    if len(packed) == 0:
        return 0, 0
    (tree,) = packed
    cuts, parents = tree.cu_segments.tolist(), tree.segment_parent.tolist()
    below = [0] * (len(parents) + 1)  # W of each segment; the last is the root's, which parent -1 names
    for segment in reversed(range(len(parents))):
        length = cuts[segment + 1] - cuts[segment]
        end = int(tree.position_ids[cuts[segment + 1] - 1]) + 1
        trees = max(1, _ceil(below[segment], max_tokens - end))
        below[parents[segment]] += below[segment] + trees * length
    return below[-1], _ceil(below[-1], max_tokens)


def _ceil(amount: int, room: int) -> int:
    return -(-amount // room) if amount else 0
