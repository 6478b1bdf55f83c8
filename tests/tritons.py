"""The Triton versions that the kernels are tested with, each alone in a folder (`make test` puts them into .venv)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The newest release of each version in `treepack.attention.versions.TESTED`.
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
# The oldest and the newest by default, all of them in the long runs.
VERSIONS = RELEASES if os.environ.get("HYPOTHESIS_PROFILE") == "long" else (RELEASES[0], RELEASES[-1])


def environment(version: str) -> dict[str, str]:
    """The variables of a process that imports this Triton; skips the test where it is not there."""
    folder = Path(os.environ.get("TREEPACK_TRITON", sys.prefix)) / f"triton-{version}"
    if not (folder / "triton").is_dir():
        pytest.skip(f"Triton {version} is not in {folder}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
