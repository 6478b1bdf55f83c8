"""The least work of the slowest ranks, by trying every way to place a few samples."""

import functools


def prefixes(ids):
    return {tuple(ids[: end + 1]) for end in range(len(ids))}


def work_of(positions):
    """(query, key) pairs and 8,192 for each position, as in docs/placement.md."""
    return sum(len(position) + 8192 for position in positions)


def least_slowest(samples, ranks, trees, max_tokens):
    """The least sum, over micro-batches, of the slowest tree's work.

    Args:
        samples: lists of ids, at most about nine.
        trees: how many there are, a multiple of `ranks`; none is empty.

    A placement is one block after the other; micro-batches are made of trees of similar work, which is the best order.
    """
    paths = [prefixes(ids) for ids in samples]

    @functools.cache
    def work(block):
        positions = set().union(*(paths[i] for i in range(len(samples)) if block >> i & 1))
        return work_of(positions) if len(positions) <= max_tokens else None

    best = None

    def place(left, blocks):
        nonlocal best
        if not left:
            if len(blocks) == trees:
                slowest = sum(sorted(blocks, reverse=True)[::ranks])
                best = slowest if best is None else min(best, slowest)
            return
        if len(blocks) == trees:
            return
        first = left & -left
        rest = left ^ first
        more = rest
        while True:  # every subset of what is left that has its first sample
            found = work(first | more)
            if found is not None:
                place(rest ^ more, [*blocks, found])
            if not more:
                return
            more = (more - 1) & rest

    place((1 << len(samples)) - 1, [])
    return best


def small_instance(random):
    """A few samples that share prefixes, a number of ranks and a budget: small enough to try everything.

    Returns:
        (samples as lists of ids, ranks, max_tokens).
    """
    groups = int(random.integers(1, 4))
    bases = [(random.integers(0, 5, int(random.integers(1, 60))) + 100 * group).tolist() for group in range(groups)]
    samples = []
    for number in range(int(random.integers(4, 10))):
        base = bases[int(random.integers(groups))]
        cut = int(random.integers(len(base) // 2, len(base) + 1))
        samples.append([*base[:cut], 1000 + number, *random.integers(0, 9, int(random.integers(1, 50))).tolist()])
    return samples, int(random.integers(2, min(5, len(samples) + 1))), int(random.choice([1000, 1000, 250]))


def slowest(packed, ranks):
    """The sum, over micro-batches, of the slowest tree's work, counted from the arrays."""
    works = []
    for tree in packed:
        real = int(tree.cu_segments[-1])
        works.append(int((tree.position_ids[:real] + 1).sum()) + 8192 * real)
    return sum(max(works[first : first + ranks]) for first in range(0, len(works), ranks))
