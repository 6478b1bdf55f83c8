"""The oracle of the report: what its pages hold, in loops over samples, segments and pairs."""

import numpy as np

TILE, MIN_RUN = 128, 2


def trained(tree, samples):
    """For each position whether any sample of the tree trains its token; a sample's first token never is."""
    out = [False] * int(tree.cu_segments[-1])
    for place, path in zip(tree.sample_index, tree.path_index(), strict=True):
        sample = samples[place]
        mask = sample.get("completion_mask", [1] * len(sample["input_ids"]))
        for i, position in enumerate(path):
            if i > 0 and mask[i]:
                out[position] = True
    return out


def bars(tree, samples, limit):
    """The rows (parent, segments, tokens, samples, trained, reach, colours), depth-first, by recursion. `colours` holds
    a flag for each position of a segment, or the number of trained ones of merged segments."""
    cu, parents = tree.cu_segments.tolist(), tree.segment_parent.tolist()
    count = len(parents)
    children = {s: [c for c in range(count) if parents[c] == s] for s in range(-1, count)}
    through = [[0] * count for _ in tree.sample_index]
    for flags, segment in zip(through, tree.sample_last_segment.tolist(), strict=True):
        while segment >= 0:
            flags[segment] = 1
            segment = parents[segment]
    passing = [sum(flags[s] for flags in through) for s in range(count)]
    colour = trained(tree, samples)
    depth = tree.position_ids.tolist()

    def below(s):
        return [s, *(d for c in children[s] for d in below(c))]

    def weight(s):
        return sum((cu[d + 1] - cu[d]) * passing[d] for d in below(s))

    kept = set(sorted(range(count), key=lambda s: (-weight(s), s))[:limit])
    out = []

    def emit(siblings, parent):
        run = []
        for s in [*siblings, None]:
            if s is not None and s not in kept:
                run.append(s)
                continue
            if run:
                merged = [d for r in run for d in below(r)]
                out.append(row(parent, merged, sum(passing[r] for r in run)))
                run = []
            if s is not None:
                out.append(row(parent, [s], passing[s]))
                emit(children[s], len(out) - 1)

    def row(parent, merged, sharing):
        flags = [colour[i] for d in merged for i in range(cu[d], cu[d + 1])]
        reach = max(depth[cu[d]] + cu[d + 1] - cu[d] for d in merged)
        return (
            parent,
            len(merged),
            len(flags),
            sharing,
            sum(flags),
            reach,
            flags if len(merged) == 1 else sum(flags),
        )

    emit(children[-1], -1)
    return out


def mask_pairs(tree, step):
    """Visible pairs in each cell of `step` x `step`, from the dense mask."""
    dense = tree.attention_mask()
    cuts = range(0, len(dense), step)
    return [[int(dense[q : q + step, k : k + step].sum()) for k in cuts] for q in cuts]


def tiles(tree):
    """(tiles, tiles) of "full", "partial" and "empty", from the dense mask; a full tile alone counts as partial."""
    dense = tree.attention_mask()
    cuts = range(0, len(dense), TILE)
    out = []
    for q in cuts:
        row = []
        for k in cuts:
            tile = dense[q : q + TILE, k : k + TILE]
            row.append("full" if tile.all() else "partial" if tile.any() else "empty")
        for k, kind in enumerate(row):
            alone = "full" not in (row[k - 1] if k else "", row[k + 1] if k + 1 < len(row) else "")
            if kind == "full" and alone:
                row[k] = "partial alone"
        out.append([kind.split()[0] for kind in row])
    return out


def sharing(trees, width):
    """Mean samples on a packed position for each `width` of depth."""
    alone, packed = {}, {}
    for tree in trees:
        for path in tree.path_index():
            for d in range(len(path)):
                alone[d // width] = alone.get(d // width, 0) + 1
        for d in tree.position_ids[: tree.cu_segments[-1]].tolist():
            packed[d // width] = packed.get(d // width, 0) + 1
    return [alone[b] / packed[b] for b in range(len(packed))]


def large_batch(samples=100_000, seed=0):
    """A flat batch that packs into one tree of more than 10^5 segments: a prompt, then nine throws of a die."""
    rng = np.random.default_rng(seed)
    throws = np.repeat(rng.integers(0, 6, (samples, 9)), 2, axis=1)
    ids = np.concatenate([np.broadcast_to(np.arange(10, 50), (samples, 40)), throws], axis=1)
    mask = np.zeros(ids.shape, np.uint8)
    mask[:, 40:] = 1
    cu = np.arange(samples + 1, dtype=np.int64) * ids.shape[1]
    return {"input_ids": ids.reshape(-1), "completion_mask": mask.reshape(-1), "cu_seqlens": cu}
