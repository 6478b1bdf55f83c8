"""Seeded rollouts of many shapes, for placement: which samples share what, at which sizes, against which budget.

    groups   prompt -+- answer      comb   prompt - think 1 - answer 1     flat      nothing is shared
                     +- fork -+- answer             - answer 1 - think 2   common    one long prefix under all
                     |        +- answer             - ...                  mixture   any of these, side by side

`draw(seed)` gives 32 instances whose parameters (depth, prompts, answers, sizes, arrival order) are drawn from the
seed. A sample is a path over *segments*; a segment is a run of tokens that starts with an id of its own, so that
samples part exactly where their segments do. Sizes scale with `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["KINDS", "Instance", "draw", "make"]

Random = np.random.Generator
MOST_TOKENS = 6_000_000  # raw tokens of an instance, about: what keeps a run of all of them in minutes


@dataclass
class Shape:
    """Segments and the samples over them."""

    lengths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Length of the path down to each segment, its own included."""
    samples: list[int] = field(default_factory=list)
    """The last segment of each sample."""

    def segment(self, parent: int, length: float) -> int:
        """A new segment below `parent` (-1: at the root)."""
        self.lengths.append(max(1, int(length)))
        self.parents.append(parent)
        self.ends.append(self.lengths[-1] + (self.ends[parent] if parent >= 0 else 0))
        return len(self.lengths) - 1

    def sample(self, parent: int, length: float, most: int) -> int:
        """A sample that ends with a new segment below `parent`, cut so that it has at most `most` tokens."""
        above = self.ends[parent] if parent >= 0 else 0
        self.samples.append(self.segment(parent, min(length, most - above)))
        return self.samples[-1]

    def raw_tokens(self) -> int:
        return sum(self.ends[last] for last in self.samples)


@dataclass(frozen=True)
class Instance:
    name: str
    max_tokens: int
    shape: Shape

    def batch(self) -> dict[str, np.ndarray]:
        """The flat batch that `treepack.pack` takes: `input_ids` (T,) int64 and `cu_seqlens` (n + 1,) int64."""
        shape = self.shape
        lengths = np.array([shape.ends[last] for last in shape.samples])
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
        # Ids from 2^20 on name segments; those inside of a segment are its number and place, mixed.
        ids = np.empty(cu_seqlens[-1], np.int64)
        for last, end in zip(shape.samples, cu_seqlens[1:].tolist(), strict=True):
            segment = last
            while segment >= 0:
                length = shape.lengths[segment]
                run = ids[end - length : end]
                run[:] = (np.arange(length) * 7_919 + segment) % 151_000
                run[0] = (1 << 20) + segment
                end -= length
                segment = shape.parents[segment]
        return {"input_ids": ids, "cu_seqlens": cu_seqlens}


def groups(shape: Shape, random: Random, most: int, budget: float, answers: int | None = None) -> None:
    """Groups of distinct size 0.35 to 0.95 of `most`, depth one to four, until `budget` raw tokens."""
    depth = int(random.integers(1, 5))
    prompt = most * (random.uniform(0.01, 0.05) if random.random() < 0.5 else random.uniform(0.1, 0.3))
    answer = most * random.uniform(0.01, 0.06)
    skewed, equal = random.random() < 0.5, random.random() < 0.5
    low, high = (0.72, 0.72) if equal else (0.35, 0.95)
    start = shape.raw_tokens()
    tokens = 0
    while tokens < budget:
        first, number = len(shape.lengths), len(shape.samples)
        forks = [shape.segment(-1, prompt * random.uniform(0.8, 1.2))]
        size = most * random.uniform(low, high)
        while (sum(shape.lengths[first:]) < size) if answers is None else (len(shape.samples) < number + answers):
            length = answer * (random.lognormal(0, 0.8) if skewed else random.uniform(0.9, 1.1))
            parent = forks[int(random.integers(len(forks)))]
            level = forks.index(parent) % 4
            if level + 1 < depth and random.random() < 0.3 and shape.ends[parent] < most / 2:
                forks.append(shape.segment(parent, length / 2))
            else:
                shape.sample(parent, length, most)
        tokens = shape.raw_tokens() - start


def hundred_answers(shape: Shape, random: Random, most: int, budget: float) -> None:
    groups(shape, random, most, budget, answers=100)


def comb(shape: Shape, random: Random, most: int, budget: float) -> None:
    """Agents whose earlier thoughts are dropped: a sample a turn."""
    turns, prompt = int(random.integers(4, 16)), most * random.uniform(0.02, 0.2)
    think, answer = most * random.uniform(0.01, 0.06), most * random.uniform(0.005, 0.03)
    start = shape.raw_tokens()
    while shape.raw_tokens() - start < budget:
        at = shape.segment(-1, prompt * random.uniform(0.5, 1.5))
        for _ in range(max(2, int(turns * random.uniform(0.5, 1.5)))):
            if shape.ends[at] + 3 * (think + answer) > most:
                break
            shape.sample(at, (think + answer) * random.lognormal(0, 0.5), most)
            at = shape.segment(at, answer * random.uniform(0.3, 2))


def search(shape: Shape, random: Random, most: int, budget: float) -> None:
    """Search trees: every step forks into some, most of which are dropped."""
    step, wide = most * random.uniform(0.004, 0.03), int(random.integers(2, 7))
    depth, prompt = int(random.integers(3, 9)), most * random.uniform(0.01, 0.15)
    start = shape.raw_tokens()
    while shape.raw_tokens() - start < budget:
        alive = [shape.segment(-1, prompt * random.uniform(0.5, 1.5))]
        for level in range(depth):
            ahead = []
            for parent in alive:
                for _ in range(int(random.integers(1, wide + 1))):
                    length = step * random.lognormal(0, 0.4)
                    if level + 1 == depth or random.random() < 0.4 or shape.ends[parent] > most / 2:
                        shape.sample(parent, length, most)
                    else:
                        ahead.append(shape.segment(parent, length))
            for parent in ahead[12:]:
                shape.samples.append(parent)
            alive = ahead[:12]


def flat(shape: Shape, random: Random, most: int, budget: float) -> None:
    """Nothing shared."""
    mean, deviation = most * random.uniform(0.05, 0.4), random.uniform(0.2, 1)
    start = shape.raw_tokens()
    while shape.raw_tokens() - start < budget:
        shape.sample(-1, mean * random.lognormal(0, deviation), most)


def common(shape: Shape, random: Random, most: int, budget: float) -> None:
    """One long prefix common to all; below it samples, or short conversations of which several were drawn."""
    prefix = shape.segment(-1, most * random.uniform(0.15, 0.4))
    rest = most - shape.ends[prefix]
    mean, deviation, trials = rest * random.uniform(0.1, 0.5), random.uniform(0.2, 0.8), int(random.integers(1, 5))
    start = shape.raw_tokens()
    while shape.raw_tokens() - start < budget:
        at = prefix if trials == 1 else shape.segment(prefix, mean * random.uniform(0.05, 0.5))
        for _ in range(trials):
            shape.sample(at, mean * random.lognormal(0, deviation), most)


def mixture(shape: Shape, random: Random, most: int, budget: float) -> None:
    kinds = [groups, hundred_answers, comb, search, flat, common]
    for kind in random.permutation(len(kinds))[: int(random.integers(2, 5))]:
        kinds[int(kind)](shape, random, most, budget / 4)


KINDS: dict[str, Callable[[Shape, Random, int, float], None]] = {
    "groups": groups,
    "answers": hundred_answers,
    "comb": comb,
    "search": search,
    "flat": flat,
    "common": common,
    "mixture": mixture,
}
# Of 32 instances: the kinds that the issue of placement is about come most often.
PLAN = (
    8 * ["groups"] + 3 * ["answers"] + 5 * ["comb"] + 5 * ["search"] + 2 * ["flat"] + 4 * ["common"] + 5 * ["mixture"]
)


def make(
    kind: str, seed: int, *, max_tokens: int | None = None, samples: int | None = None, least: int = 40
) -> Instance:
    """One instance of a kind.

    Args:
        max_tokens: the budget; drawn from 4,096 to 32,768 where none is given.
        samples: about how many; drawn from 40 to 20,000 (evenly by their logarithm) where none is given, as far as
            MOST_TOKENS allow.
    """
    random = np.random.default_rng([seed, list(KINDS).index(kind)])
    drawn = int(2 ** random.integers(12, 16))
    most = drawn if max_tokens is None else max_tokens
    wanted = int(np.exp(random.uniform(np.log(least), np.log(20_000)))) if samples is None else samples
    whole = Shape()
    budget, state = float(most * 4), random.bit_generator.state
    while True:  # raw tokens of a sample depend on the kind: the budget grows until there are enough samples
        whole = Shape()
        random.bit_generator.state = state
        KINDS[kind](whole, random, most, budget)
        if len(whole.samples) >= wanted or budget >= MOST_TOKENS:
            break
        budget = min(MOST_TOKENS, budget * max(1.3, 1.1 * wanted / len(whole.samples)))
    if random.random() < 0.5:
        whole.samples = [whole.samples[i] for i in random.permutation(len(whole.samples))]
    return Instance(f"{kind}-{seed}, {most}", most, whole)


def draw(seed: int) -> list[Instance]:
    """32 instances of all kinds; another seed draws others."""
    return [make(kind, 1_000 * seed + number) for number, kind in enumerate(PLAN)]
