"""The oracle: what `treepack.pack` must return, in dicts and lists, slow and obviously right.

A position is a *prefix*: the tuple of the keys of its token and of all tokens before it. Two tokens of two samples are
one position exactly when their prefixes are equal, so a tree is a set of prefixes and nothing here ever splits a node.

Time and memory are quadratic in the length of a sample and in their number. Samples are dicts of plain Python lists.
"""

import itertools
from dataclasses import dataclass, field

STRUCTURE = ("input_ids", "completion_mask", "identity", "sampling_mask", "sampling_mask_counts", "group_id")


class TooLong(Exception):
    """A sample that fits no tree: `sample` is its index, `budget` the name of the budget that it breaks."""

    def __init__(self, sample, budget):
        super().__init__(f"sample {sample} breaks {budget}")
        self.sample, self.budget = sample, budget


@dataclass
class Forest:
    """What `pack` gives: one dict of lists per tree, the samples left out, and the counts."""

    trees: list
    skipped: list
    stats: dict
    members: list = field(default_factory=list)


def pack(
    samples,
    *,
    max_tokens,
    max_terms=None,
    max_kept=None,
    branching="token",
    order="largest_first",
    overlong="raise",
    pad_to_multiple_of=None,
):
    """First fit in order of arrival: a sample goes to the first tree that stays within all budgets with it."""
    multiple = pad_to_multiple_of or 1
    max_positions = max_tokens // multiple * multiple
    limits = [("max_tokens", max_positions), ("max_terms", max_terms), ("max_kept", max_kept)]

    def broken(members):
        """The name of the first budget that a tree of these samples breaks, or None."""
        for (name, limit), amount in zip(limits, size(samples, members, branching), strict=True):
            if limit is not None and amount > limit:
                return name
        return None

    members, skipped = [], []
    for s in range(len(samples)):
        if broken([s]):
            if overlong == "raise":
                raise TooLong(s, broken([s]))
            skipped.append(s)
            continue
        for tree in members:
            if not broken([*tree, s]):
                tree.append(s)
                break
        else:
            members.append([s])

    trees = [layout(samples, tree, branching, order, multiple) for tree in members]
    return Forest(trees, skipped, statistics(samples, members, trees, skipped), members)


# ------------------------------------------------------------------------------------------------ the three levels


def prefixes(sample, branching):
    """The position of each token of one sample, as a prefix."""
    ids = sample["input_ids"]
    identity = sample.get("identity")
    keys = []
    for i, token in enumerate(ids):
        key = [token]
        if identity is not None:
            key.append(tuple(identity[i]) if isinstance(identity[i], (list, tuple)) else identity[i])
        if branching == "label":
            key.append(("next", ids[i + 1]) if i + 1 < len(ids) else ("end",))
        keys.append(tuple(key))
    return [tuple(keys[: i + 1]) for i in range(len(keys))]


def kept_sets(sample):
    """The kept ids of each token of one sample as a list in the order given, or None where it has none."""
    counts = sample.get("sampling_mask_counts")
    if counts is None:
        return [None] * len(sample["input_ids"])
    out, at = [], 0
    for count in counts:
        out.append(list(sample["sampling_mask"][at : at + count]) if count else None)
        at += count
    return out


def targets(sample):
    """The indexes of the tokens that are loss terms: trained, and with a token before them."""
    mask = sample.get("completion_mask", [1] * len(sample["input_ids"]))
    return [i for i, trained in enumerate(mask) if trained and i > 0]


def row_key(prefix, kept):
    """Two predictions are one row when they are made at one position from one set, whatever its order."""
    return prefix, None if kept is None else frozenset(kept)


def size(samples, members, branching):
    """(N, M, T) of a tree of these samples."""
    positions, rows, terms = set(), set(), 0
    for s in members:
        path, kept = prefixes(samples[s], branching), kept_sets(samples[s])
        positions.update(path)
        for i in targets(samples[s]):
            rows.add(row_key(path[i - 1], kept[i]))
            terms += 1
    return len(positions), terms, sum(len(ids) for _, ids in rows if ids is not None)


# ------------------------------------------------------------------------------------------------------ one tree


def depth_first(samples, members, branching, order):
    """All prefixes of these samples in pre-order."""
    seen = {}  # a dict keeps the order in which keys arrive
    for s in members:
        for prefix in prefixes(samples[s], branching):
            seen[prefix] = True
    children, below = {(): []}, {}
    for prefix in seen:
        children[prefix], below[prefix] = [], 0
    for prefix in seen:
        children[prefix[:-1]].append(prefix)
        for depth in range(1, len(prefix) + 1):
            below[prefix[:depth]] += 1
    if order == "largest_first":
        for siblings in children.values():
            siblings.sort(key=lambda prefix: -below[prefix])  # stable: ties stay in order of arrival

    out, stack = [], [()]
    while stack:
        prefix = stack.pop()
        out.append(prefix)
        stack.extend(reversed(children[prefix]))
    return out[1:], children, below


def layout(samples, members, branching, order, multiple):
    """Every array of one packed tree, as lists, by name; `terms`, `samples`, `positions`: the columns."""
    preorder, children, below = depth_first(samples, members, branching, order)
    index = {prefix: k for k, prefix in enumerate(preorder)}
    paths = [prefixes(samples[s], branching) for s in members]
    start = [sum(len(x["input_ids"]) for x in samples[:s]) for s in range(len(samples))]  # offset in the flat input

    source, passes = {}, {}
    for s, path in zip(members, paths, strict=True):
        for i, prefix in enumerate(path):
            source.setdefault(prefix, (s, i))
            passes[prefix] = passes.get(prefix, 0) + 1

    tree = {
        "input_ids": [prefix[-1][0] for prefix in preorder],
        "position_ids": [len(prefix) - 1 for prefix in preorder],
        "parent": [index[prefix[:-1]] if len(prefix) > 1 else -1 for prefix in preorder],
        "subtree_end": [k + below[prefix] for k, prefix in enumerate(preorder)],
        "position_source": [start[source[prefix][0]] + source[prefix][1] for prefix in preorder],
        "position_samples": [passes[prefix] for prefix in preorder],
        "sample_index": list(members),
    }
    tree.update(segments(tree, preorder, children, paths, index))
    tree.update(rows_and_terms(samples, members, paths, index, start))
    if branching == "label":
        labels = [-100] * len(preorder)
        for s, path in zip(members, paths, strict=True):
            for i in targets(samples[s]):
                labels[index[path[i - 1]]] = samples[s]["input_ids"][i]
        tree["shift_labels"] = labels
    tree.update(columns(samples, tree, preorder, source, members, paths))

    tree["real"] = len(preorder)
    for k in range(len(preorder), -(-len(preorder) // multiple) * multiple):
        for name, value in [("input_ids", 0), ("position_ids", 0), ("parent", -1), ("subtree_end", k)]:
            tree[name].append(value)
        tree["position_source"].append(-1)
        tree["position_samples"].append(0)
        if branching == "label":
            tree["shift_labels"].append(-100)
    return tree


def segments(tree, preorder, children, paths, index):
    """A position opens a segment at a root, after a fork, and after the end of a sample."""
    ends = {path[-1] for path in paths}
    opens = []
    for k, prefix in enumerate(preorder):
        before = prefix[:-1]
        if before == () or len(children[before]) > 1 or before in ends:
            opens.append(k)
    segment_of = [sum(1 for start in opens if start <= k) - 1 for k in range(len(preorder))]
    parents = [tree["parent"][k] for k in opens]
    return {
        "cu_segments": [*opens, len(preorder)],
        "segment_parent": [-1 if k < 0 else segment_of[k] for k in parents],
        "sample_last_segment": [segment_of[index[path[-1]]] for path in paths],
    }


def rows_and_terms(samples, members, paths, index, start):
    """Terms sample by sample in token order; rows by position, then by their first term."""
    terms = []
    for place, s in enumerate(members):
        kept = kept_sets(samples[s])
        for i in targets(samples[s]):
            prefix = paths[place][i - 1]
            terms.append((place, s, i, row_key(prefix, kept[i]), index[prefix], kept[i]))

    first = {}  # row -> (position, ids in the order first seen), in the order of the first term
    for _, _, _, row, position, kept in terms:
        first.setdefault(row, (position, kept or []))
    rows = sorted(first, key=lambda row: first[row][0])  # stable
    number = {row: r for r, row in enumerate(rows)}
    per_sample = [len(targets(samples[s])) for s in members]
    return {
        "row_position": [first[row][0] for row in rows],
        "term_row": [number[row] for _, _, _, row, _, _ in terms],
        "term_target": [samples[s]["input_ids"][i] for _, s, i, _, _, _ in terms],
        "term_sample": [place for place, _, _, _, _, _ in terms],
        "term_source": [start[s] + i for _, s, i, _, _, _ in terms],
        "cu_terms": [sum(per_sample[:j]) for j in range(len(members) + 1)],
        "sampling_mask": [x for row in rows for x in first[row][1]],
        "sampling_mask_counts": [len(first[row][1]) for row in rows],
    }


def columns(samples, tree, preorder, source, members, paths):
    """Whatever else a sample brings: a list is per token, a scalar per sample. None in `positions`: they disagree."""
    names = [name for name in samples[members[0]] if name not in STRUCTURE]
    terms, per_sample, positions = {}, {}, {}
    for name in names:
        if not isinstance(samples[members[0]][name], list):
            per_sample[name] = [samples[s][name] for s in members]
            terms[name] = [per_sample[name][place] for place in tree["term_sample"]]
            continue
        terms[name] = [samples[s][name][i] for s in members for i in targets(samples[s])]
        values = {}
        for s, path in zip(members, paths, strict=True):
            for i, prefix in enumerate(path):
                values.setdefault(prefix, []).append(samples[s][name][i])
        agree = all(value == seen[0] for seen in values.values() for value in seen)
        positions[name] = [values[prefix][0] for prefix in preorder] if agree else None
    return {"terms": terms, "samples": per_sample, "positions": positions}


def statistics(samples, members, trees, skipped):
    """The counts of `packed.stats`; samples that were left out count in `skipped` alone."""
    lengths = [len(samples[s]["input_ids"]) for tree in members for s in tree]
    real = [tree["position_ids"][: tree["real"]] for tree in trees]
    return {
        "samples": len(lengths),
        "raw_tokens": sum(lengths),
        "packed_tokens": sum(len(x) for x in real),
        "trees": len(trees),
        "terms": sum(len(tree["term_row"]) for tree in trees),
        "kept_ids": sum(len(tree["sampling_mask"]) for tree in trees),
        "skipped": len(skipped),
        "padding": sum(len(tree["input_ids"]) - tree["real"] for tree in trees),
        "attention_pairs": sum(depth + 1 for x in real for depth in x),
        "attention_pairs_alone": sum(length * (length + 1) // 2 for length in lengths),
    }


# ------------------------------------------------------------------------- things that follow from the arrays


def visible(samples, members, tree, branching, order):
    """The dense mask by definition: q sees k when the prefix k begins the prefix q. Padding sees nothing."""
    preorder, _, _ = depth_first(samples, members, branching, order)
    n = len(tree["input_ids"])
    mask = [[False] * n for _ in range(n)]
    for q, prefix in enumerate(preorder):
        for k, other in enumerate(preorder):
            mask[q][k] = prefix[: len(other)] == other
    return mask


def path_index(samples, members, branching, order):
    """For each sample the packed index of each of its tokens."""
    preorder, _, _ = depth_first(samples, members, branching, order)
    index = {prefix: k for k, prefix in enumerate(preorder)}
    return [[index[prefix] for prefix in prefixes(samples[s], branching)] for s in members]


def varlen(tree):
    """Every segment as queries, all positions from the root to its end as keys."""
    cu = tree["cu_segments"]
    kv, cu_k = [], [0]
    for end in cu[1:]:
        keys, k = [], end - 1
        while k >= 0:
            keys.append(k)
            k = tree["parent"][k]
        kv += reversed(keys)
        cu_k.append(len(kv))
    return {
        "kv_index": kv,
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max(b - a for a, b in itertools.pairwise(cu)),
        "max_seqlen_k": max(b - a for a, b in itertools.pairwise(cu_k)),
    }


def cheapest_cut(tree, max_rows, max_ancestors):
    """(cuts inside segments, cost) of the best way to cut a tree into ranges, by trying them all, or None.

    Ranges are shorter than `max_rows` by a quarter of their ancestors, or where they wait of those of the next range,
    unless that costs a sixteenth of all rows more.
    """
    full = _best_cut(tree, max_rows, max_ancestors, lambda depth: max_rows)
    shorter = _best_cut(tree, max_rows, max_ancestors, lambda depth: max(max_rows - depth // 4, -(-max_rows // 2)))
    if shorter and shorter[0] == full[0] and shorter[1] - full[1] <= 8 * tree["real"] // 16:
        return shorter
    return full


def _best_cut(tree, max_rows, max_ancestors, most):
    """A cut may lie before a segment, before any row of a segment that is longer than a range from its start, and
    before the row with exactly `max_ancestors` ancestors; never before one that has more."""
    depth, rows, starts = tree["position_ids"], tree["real"], tree["cu_segments"]
    allowed = [
        row
        for start, stop in itertools.pairwise(starts)
        for row in range(start, stop)
        if depth[row] <= max_ancestors
        and (row == start or stop - start > most(depth[start]) or depth[row] == max_ancestors)
    ]
    best = {0: (0, 0)}
    for stop in [*allowed[1:], rows]:
        ways = []
        for start in allowed:
            longest = most(depth[start])
            if stop < rows and tree["parent"][stop] >= start:
                longest = min(longest, most(depth[stop]))
            if start < stop <= start + longest and start in best:
                inside, cost = cost_of_range(tree, start, stop, max_rows)
                ways.append((best[start][0] + inside, best[start][1] + cost))
        if ways:
            best[stop] = min(ways)
    return best.get(rows)


def cost_of_range(tree, start, stop, max_rows):
    """(1 if it begins inside a segment, what it costs beside its rows, in eighths of a row: the pass, what it lacks to
    half a full range, its ancestors, itself where it waits)."""
    waits = stop < tree["real"] and tree["parent"][stop] >= start
    cost = 8 * -(-max_rows // 16) + 8 * max(0, max_rows // 2 - (stop - start)) + int(tree["position_ids"][start])
    return int(start not in tree["cu_segments"]), cost + (stop - start if waits else 0)
