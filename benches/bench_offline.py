"""Offline packing: tokens per second written and read, size on disk, memory on 10^8 tokens: `make bench-offline`.

Every tree that is read back is first compared with `treepack.pack` on the same samples, byte by byte; if one differs,
nothing is printed and the exit status is 1. Times are medians of runs in turn after one of warm-up, files in the page
cache. Memory is that of a process of its own, which packs a file that was generated on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import console, environment, in_turn, load, spread
from rich.table import Table

import treepack
from treepack import offline

SETS = (("swe_gemini_comb", 32_768), ("game24_cot_n100", 8_192))
WINDOWED = (
    ("qwen_math_n8", 8_192), ("gsm8k_4models", 8_192), ("swe_gemini_comb", 32_768), ("game24_cot_n100", 8_192),
    ("tau_airline_turns", 32_768),
)  # fmt: skip
WINDOWS = (16, 18, 20, 22)  # powers of two, in raw tokens; the last is the default
TYPES = {
    "input_ids": pa.list_(pa.int64()),
    "completion_mask": pa.list_(pa.uint8()),
    "old_log_probs": pa.list_(pa.float32()),
    "advantage": pa.float32(),
    "group_id": pa.int64(),
}


def write_samples(samples: list[dict[str, Any]], path: Path) -> None:
    """The samples as a Parquet file that anybody would write: zstd, everything else by default."""
    columns = {name: pa.array([sample[name] for sample in samples], kind) for name, kind in TYPES.items()}
    pq.write_table(pa.table(columns), path, compression="zstd")


def measure(name: str, max_tokens: int, folder: Path, repeats: int) -> tuple[str, list[str]]:
    """An error or '', and the row of the table. The set is one window, so that its trees are those of one call."""
    samples, source, out = load(name), folder / f"{name}.parquet", folder / name
    write_samples(samples, source)
    whole = sum(len(sample["input_ids"]) for sample in samples)

    def pack() -> offline.Manifest:
        return offline.pack_file(source, out, overwrite=True, max_tokens=max_tokens, window=whole)

    def read() -> int:
        return sum(tree.num_tokens for tree in offline.load(out))

    def shuffled() -> int:
        return sum(tree.num_tokens for tree in offline.load(out, shuffle_seed=0))

    manifest = pack()
    same_types = [{**sample, "advantage": np.float32(sample["advantage"])} for sample in samples]
    expected, trees = treepack.pack(same_types, max_tokens=max_tokens), offline.load(out)
    buffers = [[tree.buffer.tobytes() for tree in some] for some in (expected, trees)]
    if buffers[0] != buffers[1]:
        return f"{name}: the trees that were read differ from those that were packed", []
    times = in_turn({"pack": pack, "read": read, "shuffled": shuffled}, repeats)
    packed = sum(shard.packed_tokens for shard in manifest.shards)
    size, before = sum(shard.bytes for shard in manifest.shards), source.stat().st_size
    in_memory = sum(len(buffer) for buffer in buffers[0])
    row = [f"{name}, {max_tokens}", f"{whole:,}", f"{packed:,} ({sum(shard.trees for shard in manifest.shards)})"]
    for label, tokens in (("pack", whole), ("read", packed), ("shuffled", packed)):
        seconds = statistics.median(times[label]) / 1e3
        row += [f"{tokens / seconds / 1e6:.1f}", spread(times[label])]
    row += [
        f"{before / 1e6:.2f}",
        f"{size / 1e6:.2f}",
        f"{before / size:.1f}",
        f"{size / packed:.1f}",
        f"{in_memory / 1e6:.1f}",
    ]
    return "", row


def table(rows: list[list[str]]) -> Table:
    out = Table(title="Million tokens a second (raw ones packed and written, packed ones read), and MB on disk")
    headings = (
        "set, max_tokens|raw tokens|packed (trees)|pack + write||read||read shuffled||samples\nMB|shards\nMB"
        "|times\nsmaller|bytes per\npacked token|in memory\nMB"
    )
    for heading in headings.split("|"):
        out.add_column(heading, justify="left" if heading.startswith("set") else "right", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    return out


# -------------------------------------------------------------------------------------------------------------- memory


def windows_row(name: str, max_tokens: int, folder: Path) -> list[str]:
    """How many times fewer tokens than raw ones, for each size of the window, all at once and by the stream."""
    samples, source, out = load(name), folder / f"{name}.parquet", folder / f"{name}-windows"
    write_samples(samples, source)
    raw = sum(len(sample["input_ids"]) for sample in samples)

    def ratio(**options: Any) -> str:
        manifest = offline.pack_file(source, out, overwrite=True, max_tokens=max_tokens, **options)
        return f"{raw / sum(shard.packed_tokens for shard in manifest.shards):.3f}"

    sizes = [*(1 << power for power in WINDOWS), raw]
    return [f"{name}, {max_tokens}", f"{raw:,}", *(ratio(window=size) for size in sizes), ratio(placement="stream")]


def windows_table(rows: list[list[str]]) -> Table:
    out = Table(title="Raw tokens for each packed one, by the size of the window")
    heads = [f"2^{power}" for power in WINDOWS]
    for head in ("set, max_tokens", "raw tokens", *heads, "all at once", "stream"):
        out.add_column(head, justify="left" if head.startswith("set") else "right", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    return out


def generate(path: Path, tokens: int) -> int:
    """Groups of 8 answers of 500 tokens to a prompt of 1,000, written group by group. The number of tokens."""
    random, written = np.random.default_rng(0), 0
    with pq.ParquetWriter(path, pa.schema(list(TYPES.items())), compression="zstd") as file:
        while written < tokens:
            samples = []
            for group in range(64):
                prompt = random.integers(0, 150_000, 1_000)
                for _ in range(8):
                    ids = np.concatenate([prompt, random.integers(0, 150_000, 500)])
                    mask = (np.arange(1_500) >= 1_000).astype(np.uint8)
                    log_probs = -random.random(1_500, np.float32)
                    values = (ids, mask, log_probs, random.random(), group)
                    samples.append(dict(zip(TYPES, values, strict=True)))
            columns = {name: pa.array([sample[name] for sample in samples], kind) for name, kind in TYPES.items()}
            file.write_table(pa.table(columns))
            written += 64 * 8 * 1_500
    return written


def memory_kib(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise KeyError(name)


def child(source: str, out: str) -> None:
    """Pack a file and print what it took. `anonymous`: without the pages of the mapped file, which the system takes
    back as it likes."""
    base, anonymous = memory_kib("RssAnon"), 0

    def progress(now: offline.Progress) -> None:
        nonlocal anonymous
        anonymous = max(anonymous, memory_kib("RssAnon"))

    start = time.perf_counter()
    manifest = offline.pack_file(source, out, max_tokens=16_384, progress=progress)
    seconds = time.perf_counter() - start
    packed = sum(shard.packed_tokens for shard in manifest.shards)
    numbers = {"base": base, "anonymous": anonymous, "peak": memory_kib("VmHWM"), "seconds": seconds, "packed": packed}
    numbers["bytes"] = sum(shard.bytes for shard in manifest.shards)
    print(json.dumps(numbers))


def memory_line(folder: Path, tokens: int) -> str:
    source, out = folder / f"{tokens}.parquet", folder / str(tokens)
    written = generate(source, tokens)
    command = [sys.executable, __file__, "--child", str(source), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    numbers = json.loads(done.stdout)
    size = source.stat().st_size
    source.unlink()
    return (
        f"{written:,} tokens generated ({size / 1e6:,.0f} MB of Parquet) -> {numbers['packed']:,} packed "
        f"({numbers['bytes'] / 1e6:,.0f} MB) in {numbers['seconds']:.1f} s; process: {numbers['base'] / 1024:,.0f} MiB "
        f"before, {numbers['anonymous'] / 1024:,.0f} MiB at most while packing (looked at after each window), "
        f"{numbers['peak'] / 1024:,.0f} MiB with the pages of the mapped file"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each at least (%(default)s)")
    parser.add_argument("--tokens", type=float, nargs="*", default=[1e7, 1e8], help="of the generated files")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return 0
    console.print(environment(pyarrow=pa.__version__))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "TREEPACK_DATA" not in os.environ:
            console.print("TREEPACK_DATA is not set: the real rollouts are left out")
        else:
            rows = []
            for data, max_tokens in SETS:
                error, row = measure(data, max_tokens, folder, arguments.repeats)
                if error:
                    console.print("WRONG, so nothing is compared:", error, sep="\n")
                    return 1
                rows.append(row)
            console.print("checked: every tree that is read is the one that was packed, byte by byte")
            console.print(table(rows))
            console.print(windows_table([windows_row(*case, folder) for case in WINDOWED]))
        for tokens in arguments.tokens:
            console.print(memory_line(folder, int(tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
