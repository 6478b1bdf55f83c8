"""What the tests of offline packing share: rows in memory instead of a file, rollouts with shared prompts, equality."""

import numpy as np

import treepack


class ListRows:
    """Rows in memory with the interface of `treepack.readers.Rollouts`; batches of `size` rows."""

    def __init__(self, rows, size=7, fingerprint="rows"):
        self._rows, self._size, self.fingerprint = rows, size, fingerprint

    def batches(self, samples=1024, *, start=0):
        size = min(self._size, samples)
        for at in range(start, len(self._rows), size):
            yield [row if isinstance(row, tuple) else dict(row) for row in self._rows[at : at + size]]


def rollouts(groups=12, answers=4, prompt=30, answer=10, seed=0, kept=False):
    """Groups of answers to a prompt, with a column of each kind."""
    random = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        shared = random.integers(0, 1000, prompt + int(random.integers(0, 9)))
        for _ in range(answers):
            own = random.integers(0, 1000, 1 + int(random.integers(0, answer)))
            ids = np.concatenate([shared, own]).astype(np.int64)
            mask = (np.arange(len(ids)) >= len(shared)).astype(np.uint8)
            sample = {
                "input_ids": ids,
                "completion_mask": mask,
                "old_log_probs": -random.random(len(ids), np.float32),
                "advantage": float(random.standard_normal()),
                "group_id": group,
                "depth": np.arange(len(ids), dtype=np.int16),
                "table": random.integers(0, 9, (len(ids), 2)).astype(np.int8),
            }
            if kept:
                sets = [[int(token), 1000] for token, trained in zip(ids, mask, strict=True) if trained]
                sample["sampling_mask"] = np.array(sets, np.int32).reshape(-1)
                sample["sampling_mask_counts"] = 2 * mask.astype(np.int32)
            out.append(sample)
    return out


def assert_equal(tree, expected):
    """Every array with its dtype and shape, every column, tiles, disagreements, and the buffer byte by byte."""
    assert tree._fields == expected._fields
    assert list(tree.arrays) == list(expected.arrays)
    for name, b in expected.arrays.items():
        a = tree.arrays[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name
    assert tree.buffer.tobytes() == expected.buffer.tobytes()
    assert dict(tree.column_formats) == dict(expected.column_formats)
    assert dict(tree.disagreements) == dict(expected.disagreements)
    for kind in ("terms", "samples", "positions"):
        assert sorted(getattr(tree, kind)) == sorted(getattr(expected, kind)), kind
    assert tree.sampling_mask.tolist() == expected.sampling_mask.tolist()
    assert tree.sampling_mask_counts.tolist() == expected.sampling_mask_counts.tolist()
    for size, lists in expected.tiles.items():
        for a, b in zip(tree.tiles[size], lists, strict=True):
            np.testing.assert_array_equal(a, b)


def windows_of(samples, tokens):
    """The windows of a packing, by the rule as it is documented."""
    out = [[]]
    for sample in samples:
        filled = sum(len(other["input_ids"]) for other in out[-1])
        if out[-1] and filled + len(sample["input_ids"]) > tokens:
            out.append([])
        out[-1].append(sample)
    return out


def packed_windows(samples, tokens, **options):
    """The trees of a packing by windows, from `treepack.pack` itself."""
    return [tree for window in windows_of(samples, tokens) for tree in treepack.pack(window, **options)]


def contents(folder):
    """Every file of a folder by name; none where a run that wrote nothing took its folder away again."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.exists() else {}
