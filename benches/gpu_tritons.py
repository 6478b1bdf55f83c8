"""The kernels under several versions of Triton on one GPU, in turn: are they as fast under each?

    python benches/gpu_tritons.py --triton FOLDER ... [--rounds 5] [--impl triton] [--tree agent9k ...]

FOLDER holds a `triton` package, unpacked; the one that is installed comes first. Each round is a new process for each
version, one after the other, so that what the GPU does to its clocks meets all of them. A time is the median over the
rounds of `gpu_attention.py`'s medians (which prints none for a wrong result), with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMES = re.compile(r"^  (\w+) +([\d.]+) \([\d. ]+\) +\d+ +([\d.]+) \([\d. ]+\)")


def one_round(folder: str | None, arguments: list[str]) -> tuple[str, dict[tuple[str, str], tuple[float, float]]]:
    """`(machine and versions, {(tree, implementation): (forward ms, backward ms)})` of one process."""
    path = [folder] if folder else []
    path += filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, str(HERE / "gpu_attention.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    machine, *lines = done.stdout.splitlines()
    found, tree = {}, ""
    for line in lines:
        if line and not line.startswith(" "):
            tree = line.split()[0]
        elif match := TIMES.match(line):
            found[tree, match[1]] = float(match[2]), float(match[3])
        elif "no time" in line or "FAILED" in line:
            sys.exit(f"{machine}\n{tree}: {line}")
    return machine, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="*", default=[], help="folders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--impl", nargs="*", default=["triton"])
    parser.add_argument("--tree", nargs="*", default=["chain16k", "agent9k", "agent2x16k", "docs16k", "multiturn"])
    options = parser.parse_args()
    arguments = ["--impl", *options.impl, "--warmup", "25", "--rep", "80", "--tree", *options.tree]
    versions: dict[str, list] = {}
    for _ in range(options.rounds):
        for folder in (None, *options.triton):
            machine, found = one_round(folder, arguments)
            versions.setdefault(machine, []).append(found)
    print("\n".join(versions))
    print(f"median of {options.rounds} rounds (lowest highest), ms; x: times the first version's\n")
    first = next(iter(versions.values()))
    columns = f"{'forward':>21} {'x':>6} {'backward':>24} {'x':>6} {'both':>7} {'x':>6}"
    print(f"{'tree':11} {'kernels':13} {'triton':7} {columns}")
    for key in first[0]:
        base = None
        for machine, rounds in versions.items():
            forward, backward = zip(*(found[key] for found in rounds), strict=True)
            times = [statistics.median(x) for x in (forward, backward)]
            times.append(statistics.median(a + b for a, b in zip(forward, backward, strict=True)))
            base = base or times
            ratio = [a / b for a, b in zip(times, base, strict=True)]
            spread = [f"({min(x):.3f} {max(x):.3f})" for x in (forward, backward)]
            version = re.search(r"triton ([\w.+]+)", machine)[1]
            cells = f"{times[0]:6.3f} {spread[0]:>14} {ratio[0]:6.3f} {times[1]:8.3f} {spread[1]:>15} {ratio[1]:6.3f}"
            print(f"{key[0]:11} {key[1]:13} {version:7} {cells} {times[2]:7.3f} {ratio[2]:6.3f}")


if __name__ == "__main__":
    main()
