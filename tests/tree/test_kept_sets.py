"""The kept-set table: by hand, both implementations against each other bit for bit, and its refusals. CASES 49, 52,
53, 54."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from treepack.tree.kept_sets import kept_set_table  # noqa: E402


def ragged(counts, seed=0, dtype=torch.int32):
    g = torch.Generator().manual_seed(seed)
    counts = torch.tensor(counts, dtype=torch.int32)
    return torch.randint(0, 1000, (int(counts.sum()),), generator=g).to(dtype), counts


def test_by_hand():
    """Id 0 is a token, -1 is padding, a row without a set is all padding."""
    ids, counts = torch.tensor([5, 0, 7, 0]), torch.tensor([2, 0, 1, 1])
    assert kept_set_table(ids, counts).tolist() == [[5, 0], [-1, -1], [7, -1], [0, -1]]
    wide = kept_set_table(ids, counts, 3, dtype=torch.int32)
    assert wide.tolist() == [[5, 0, -1], [-1, -1, -1], [7, -1, -1], [0, -1, -1]]
    assert wide.dtype == torch.int32


def test_empty():
    none = torch.zeros(0, dtype=torch.int32)
    assert kept_set_table(none, none).shape == (0, 0)
    assert kept_set_table(none, torch.zeros(3, dtype=torch.int32)).shape == (3, 0)
    assert kept_set_table(none, torch.zeros(3, dtype=torch.int32), 2).tolist() == [[-1, -1]] * 3


def test_loop():
    ids, counts = ragged([3, 1, 0, 9, 130, 2])
    table = kept_set_table(ids, counts)
    start = 0
    for row, count in zip(table, counts.tolist(), strict=True):
        assert row[:count].tolist() == ids[start : start + count].tolist()
        assert (row[count:] == -1).all()
        start += count


def test_refusals():
    ids, counts = ragged([3, 1])
    with pytest.raises(ValueError, match="width=2 is below the widest set, which has 3"):
        kept_set_table(ids, counts, 2)
    with pytest.raises(ValueError, match=r"sum to 4 .* holds 3"):
        kept_set_table(ids[:3], counts)
    with pytest.raises(ValueError, match="smallest -1"):
        kept_set_table(ids, torch.tensor([5, -1]))
    with pytest.raises(TypeError, match="float32"):
        kept_set_table(ids.float(), counts)
    with pytest.raises(TypeError, match="int16"):
        kept_set_table(ids, counts, dtype=torch.int16)
    huge = torch.zeros(1, dtype=torch.int32).expand(2**31)  # no memory behind it
    with pytest.raises(ValueError, match="2147483648 ids; at most 2147483647"):
        kept_set_table(huge, counts)


INTERPRETED = """
import torch
from treepack.tree.kept_sets import kept_set_table
g = torch.Generator().manual_seed(1)
for rows in (1, 7, 40):
    counts = torch.randint(0, 200, (rows,), generator=g).to(torch.int32)
    ids = torch.randint(0, 9, (int(counts.sum()),), generator=g).to(torch.int32)
    for width in (None, 200, 256):
        for dtype in (torch.int64, torch.int32):
            ours, want = (kept_set_table(ids, counts, width, dtype=dtype, impl=impl) for impl in ("triton", "torch"))
            assert ours.dtype == want.dtype and torch.equal(ours, want)
print("equal")
"""


def test_triton_is_bit_equal():
    """In Triton's interpreter, which has to be chosen before triton is imported: hence a process of its own."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
