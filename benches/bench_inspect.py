"""Does `treepack inspect` hold its memory? Files from 10^6 to 10^8 tokens: `python benches/bench_inspect.py`.

Rollouts of 1,000 tokens, each eight of them with a prompt of 500, are written a piece at a time. `treepack inspect FILE
--json` then runs as a process of its own, which is watched in /proc (Linux): peak RSS is the kernel's own high-water
mark, pages of a mapped file included; anonymous memory the most that was seen, 50 times a second. Exit status 1 where
that grows by more than `MUST_GROW` from 10^7 tokens on.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import console, environment
from rich.table import Table

VOCABULARY = 151_000
LENGTH, PROMPT, ANSWERS = 1_000, 500, 8
PIECE = 1_000_000
MUST_GROW = 1.2


def pieces(tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids (samples, LENGTH) and completion masks, PIECE tokens at a time."""
    random = np.random.default_rng(0)
    mask = np.zeros((PIECE // LENGTH, LENGTH), np.uint8)
    mask[:, PROMPT:] = 1
    for _ in range(tokens // PIECE):
        ids = random.integers(0, VOCABULARY, (PIECE // LENGTH // ANSWERS, ANSWERS, LENGTH), np.int32)
        ids[:, 1:, :PROMPT] = ids[:, :1, :PROMPT]
        yield ids.reshape(-1, LENGTH), mask


def write_parquet(path: Path, tokens: int) -> None:
    """Ids int32; a row group for each piece."""
    columns = {"input_ids": pa.list_(pa.int32()), "completion_mask": pa.list_(pa.uint8())}
    schema = pa.schema(list(columns.items()))
    with pq.ParquetWriter(path, schema) as writer:
        for ids, mask in pieces(tokens):
            offsets = np.arange(0, ids.size + 1, LENGTH, dtype=np.int32)
            arrays = [pa.ListArray.from_arrays(offsets, values.ravel()) for values in (ids, mask)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def write_jsonl(path: Path, tokens: int) -> None:
    with path.open("w") as file:
        for ids, mask in pieces(tokens):
            for sample, trained in zip(ids.tolist(), mask.tolist(), strict=True):
                file.write(json.dumps({"input_ids": sample, "completion_mask": trained}) + "\n")


def write_npz(path: Path, tokens: int) -> None:
    """Built whole in memory: NumPy writes a member at once."""
    ids, masks = zip(*pieces(tokens), strict=True)
    flat = np.concatenate(ids).ravel()
    np.savez(
        path,
        tokens=flat,
        completion_mask=np.concatenate(masks).ravel(),
        offsets=np.arange(0, flat.size + 1, LENGTH, dtype=np.int64),
    )


WRITERS: dict[str, Callable[[Path, int], None]] = {"parquet": write_parquet, "jsonl": write_jsonl, "npz": write_npz}


def watch(path: Path, max_tokens: int) -> dict[str, Any]:
    """Run inspect on a file; its numbers, seconds, peak RSS and anonymous memory in bytes."""
    command = [sys.executable, "-m", "treepack.cli", "inspect", str(path), "--max-tokens", str(max_tokens), "--json"]
    start = time.perf_counter()
    peak = anonymous = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            # Not getrusage: that counts the memory that this process had when the other one was started.
            status = Path(f"/proc/{process.pid}/status").read_text()
            memory = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
            peak = max(peak, memory.get("VmHWM", 0))
            anonymous = max(anonymous, memory.get("RssAnon", 0))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        assert process.stdout is not None
        out = process.stdout.read()
    if process.returncode:
        sys.exit(f"treepack inspect {path} ended with exit code {process.returncode}")
    return {"numbers": json.loads(out), "seconds": seconds, "peak": peak, "anonymous": anonymous}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=WRITERS, default=["parquet", "jsonl"])
    parser.add_argument("--tokens", nargs="+", type=lambda x: int(float(x)), default=[10**6, 10**7, 10**8])
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--folder", help="where the files are written for a while (default: the temporary folder)")
    arguments = parser.parse_args()
    console.print(environment(pyarrow=pa.__version__), markup=False)

    table = Table(title=f"treepack inspect FILE --max-tokens {arguments.max_tokens} --json")
    for heading in (
        "format",
        "raw tokens",
        "file MB",
        "windows",
        "ratio",
        "seconds",
        "tokens/s",
        "peak RSS MB",
        "anonymous MB",
    ):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    grown = []
    for format in arguments.formats:
        peaks = {}
        for tokens in arguments.tokens:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                path = Path(folder) / f"rollouts.{format}"
                WRITERS[format](path, tokens)
                size = path.stat().st_size
                found = watch(path, arguments.max_tokens)
            numbers, seconds = found["numbers"], found["seconds"]
            if numbers["raw_tokens"] != tokens:
                sys.exit(f"{format}: inspect read {numbers['raw_tokens']} tokens of {tokens}")
            peaks[tokens] = found["anonymous"]
            shared = numbers["placements"]["shared"]
            figures = (f"{tokens:,}", f"{size / 1e6:,.0f}", f"{numbers['windows']}", f"{shared['packing_ratio']:.3f}")
            times = (
                f"{seconds:.1f}",
                f"{tokens / seconds:,.0f}",
                f"{found['peak'] / 1e6:,.0f}",
                f"{peaks[tokens] / 1e6:,.0f}",
            )
            table.add_row(format, *figures, *times)
        large = {tokens: peak for tokens, peak in peaks.items() if tokens >= 10**7}
        if len(large) > 1:
            grown.append((format, large[max(large)] / large[min(large)]))
    console.print(table)
    for format, factor in grown:
        verdict = "must met" if factor <= MUST_GROW else "MUST MISSED"
        console.print(
            f"{format}: anonymous memory from 10^7 tokens on x{factor:.2f} (must: at most x{MUST_GROW}: {verdict})"
        )
    return int(any(factor > MUST_GROW for _, factor in grown))


if __name__ == "__main__":
    sys.exit(main())
