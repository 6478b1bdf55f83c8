"""Placement of many shapes of rollouts (tests/families.py): right by the oracle, no worse than textbook rules, and for
ranks near the optimum that trying everything finds.
"""

import itertools

import families
import naive
import numpy as np
import pytest
import rank_optimum

import treepack

MAX_TOKENS = 128
CALLS = [(kind, seed) for kind in families.KINDS for seed in range(3)]


def small(kind, seed):
    """The samples of an instance as lists of ids, and the prefixes of each."""
    batch = families.make(kind, seed, max_tokens=MAX_TOKENS, samples=40).batch()
    ids, ends = batch["input_ids"], batch["cu_seqlens"]
    samples = [ids[a:b].tolist() for a, b in itertools.pairwise(ends.tolist())]
    return samples, [set(naive.prefixes({"input_ids": sample}, "token")) for sample in samples]


def next_fit(paths, order):
    trees = [set()]
    for sample in order:
        if len(trees[-1] | paths[sample]) > MAX_TOKENS:
            trees.append(set())
        trees[-1] |= paths[sample]
    return trees


def first_fit(paths, order):
    trees = []
    for sample in order:
        tree = next((tree for tree in trees if len(tree | paths[sample]) <= MAX_TOKENS), None)
        if tree is None:
            trees.append(tree := set())
        tree |= paths[sample]
    return trees


@pytest.mark.parametrize(("kind", "seed"), CALLS)
def test_right_and_no_worse_than_textbook_rules(kind, seed):
    samples, paths = small(kind, seed)
    packed = treepack.pack([{"input_ids": sample} for sample in samples], max_tokens=MAX_TOKENS)
    members = [tree.sample_index.tolist() for tree in packed]
    assert sorted(itertools.chain(*members)) == list(range(len(samples)))
    sizes = [len(set().union(*(paths[sample] for sample in tree))) for tree in members]
    assert sizes == [tree.num_tokens for tree in packed]
    assert max(sizes) <= MAX_TOKENS

    arrival = range(len(samples))
    rules = [
        first_fit(paths, arrival),
        first_fit(paths, sorted(arrival, key=lambda sample: -len(samples[sample]))),
        next_fit(paths, arrival),
        next_fit(paths, sorted(arrival, key=lambda sample: samples[sample])),
    ]
    assert sum(sizes) <= min(sum(map(len, rule)) for rule in rules)
    assert len(sizes) <= min(map(len, rules))


def test_a_group_that_does_not_fit_beside_another_is_split():
    """Groups of about 5,900 distinct tokens with a prompt of 124, at 8,192: a tree has room for one and a part."""
    random = np.random.default_rng(0)
    shape = families.Shape()
    for _ in range(101):
        prompt = shape.segment(-1, 124)
        while sum(shape.lengths[prompt:]) < 5_700:
            shape.sample(prompt, 350 * random.uniform(0.8, 1.2), 8_192)
    shape.samples = random.permutation(shape.samples).tolist()
    stats = treepack.pack(families.Instance("groups", 8_192, shape).batch(), max_tokens=8_192).stats
    once = sum(shape.lengths)
    trees = -(-once // 8_192)
    assert stats.trees <= trees + 3
    assert stats.packed_tokens <= once + 124 * stats.trees  # less than a split for each tree


def test_nothing_shared_is_bin_packing():
    """Thirds and halves, in an order that first fit packs badly: as few trees as the sum needs."""
    lengths = [34] * 30 + [47] * 30 + [47] * 30
    starts = np.cumsum([0, *lengths])
    samples = [{"input_ids": np.arange(a, b)} for a, b in itertools.pairwise(starts.tolist())]
    assert treepack.pack(samples, max_tokens=128).stats.trees == 30
    assert treepack.pack(samples, max_tokens=128, placement="first_fit").stats.trees > 30


def test_ranks_come_near_the_optimum():
    random = np.random.default_rng(5)
    for _ in range(40):
        samples, ranks, most = rank_optimum.small_instance(random)
        packed = treepack.pack([{"input_ids": ids} for ids in samples], max_tokens=most, ranks=ranks)
        least = rank_optimum.least_slowest(samples, ranks, len(packed), most)
        assert least <= rank_optimum.slowest(packed, ranks) <= 1.05 * least, samples


def test_the_optimum_by_hand():
    """[1 2 3] and [1 2 4] in a tree of four positions beside [5], or [5] as the fourth beside one of them."""
    samples = [[1, 2, 3], [1, 2, 4], [5]]
    together = rank_optimum.work_of([(1,), (1, 2), (1, 2, 3), (1, 2, 4)])
    apart = rank_optimum.work_of([(1,), (1, 2), (1, 2, 3), (5,)])
    assert rank_optimum.least_slowest(samples, 2, 2, 10) == min(together, apart)
    assert rank_optimum.least_slowest(samples, 1, 1, 4) is None
