"""Kept sets on their way to the device: ragged and padded there, against a dense table built on the host.

    python benches/gpu_scatter.py [--rows 16384 65536]

Counts as a top-p 0.95 / top-k 512 sampler leaves them (45 % of one id, a tail up to 512). Every way must give the same
table, or nothing is timed. Wall time from host arrays to a table on the device, medians of 15.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
import numpy as np
import source_tree  # noqa: F401
import torch

from treepack.tree.kept_sets import kept_set_table


def kept_sets(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    counts = np.minimum(1 + rng.geometric(0.45, rows) - 1 + (rng.random(rows) < 0.002) * 511, 512).astype(np.int32)
    return rng.integers(0, 150_000, int(counts.sum()), dtype=np.int32), counts


def dense_on_host(ids: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    table = np.full((len(counts), counts.max()), -1, np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = ids
    return torch.from_numpy(table).to("cuda")


def ragged(ids: np.ndarray, counts: np.ndarray, impl: str) -> torch.Tensor:
    return kept_set_table(torch.from_numpy(ids).to("cuda"), torch.from_numpy(counts).to("cuda"), impl=impl)


def milliseconds(function) -> float:
    times = []
    for _ in range(18):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[16_384, 65_536])
    print(f"{torch.cuda.get_device_name()} | torch {torch.__version__}")
    for rows in parser.parse_args().rows:
        ids, counts = kept_sets(rows)
        ways = {
            "dense table on the host": lambda ids=ids, counts=counts: dense_on_host(ids, counts),
            "ragged, torch on the device": lambda ids=ids, counts=counts: ragged(ids, counts, "torch"),
            "ragged, Triton on the device": lambda ids=ids, counts=counts: ragged(ids, counts, "triton"),
        }
        tables = [way() for way in ways.values()]
        if not all(torch.equal(tables[0], table) for table in tables):
            sys.exit("the tables differ: nothing is timed")
        print(f"R {rows}, T {len(ids)}, widest {counts.max()}")
        for name, way in ways.items():
            print(f"  {name:30} {milliseconds(way):8.3f} ms")


if __name__ == "__main__":
    main()
