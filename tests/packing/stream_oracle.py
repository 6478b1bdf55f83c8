"""The oracle of `treepack.Packer`: the stream rule on sets of prefixes, slow and obviously right.

A tree is the set of prefixes of its samples, as in `naive`; what a sample shares with it is an intersection of sets.
Samples are dicts of plain Python lists.
"""

import naive


class Stream:
    """An open micro-batch: `trees[rank]` holds places in `samples`, which are those of this micro-batch."""

    def __init__(self, *, max_tokens, max_terms=None, max_kept=None, branching="token", pad_to_multiple_of=1, ranks=1):
        self.limits = (max_tokens // pad_to_multiple_of * pad_to_multiple_of, max_terms, max_kept)
        self.branching, self.ranks = branching, ranks
        self.clear()

    def clear(self):
        self.samples, self.trees = [], [[] for _ in range(self.ranks)]

    def broken(self, sample):
        """The name of the first budget that this sample alone breaks, or None."""
        names = ("max_tokens", "max_terms", "max_kept")
        amounts = self.amounts([sample], [0])
        return next((n for n, a, x in zip(names, amounts, self.limits, strict=True) if x is not None and a > x), None)

    def amounts(self, samples, members):
        """Positions, loss terms, and kept ids; the ids by their sum over samples, which is never too little."""
        positions, terms, _ = naive.size(samples, members, self.branching)
        return positions, terms, sum(naive.size(samples, [s], self.branching)[2] for s in members)

    def add(self, sample):
        """Takes a sample that fits a tree of its own. Returns what it closed: (samples, trees), or None."""
        samples, path = [*self.samples, sample], set(naive.prefixes(sample, self.branching))
        choices = []
        for rank, members in enumerate(self.trees):
            amounts = self.amounts(samples, [*members, len(self.samples)])
            if all(x is None or a <= x for a, x in zip(amounts, self.limits, strict=True)):
                shared = len(path & self.positions(samples, members))
                choices.append((-shared, self.work(samples, members), rank))
        if choices:
            self.samples = samples
            self.trees[min(choices)[2]].append(len(samples) - 1)
            return None
        closed = self.samples, self.trees
        assert all(self.trees)  # an empty tree takes every sample, so no rank is ever empty here
        self.clear()
        self.add(sample)
        return closed

    def flush(self):
        """What is open: (samples, trees), or None. Ranks may be empty; filling them is left to the packer."""
        closed = (self.samples, self.trees) if self.samples else None
        self.clear()
        return closed

    def positions(self, samples, members):
        return {prefix for s in members for prefix in naive.prefixes(samples[s], self.branching)}

    def work(self, samples, members):
        """The sum of depth + 1, and 8192 for each position."""
        return sum(len(prefix) + 8192 for prefix in self.positions(samples, members))
