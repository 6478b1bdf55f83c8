"""A script of a user under `mypy --strict`, against the installed package, and run."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "user_script.py"

pytest.importorskip("torch", reason="the script takes trees to a device")


def test_a_type_checker_knows_what_the_arrays_are(tmp_path, pytestconfig):
    pytest.importorskip("mypy", reason="mypy is not installed (make lint)")
    cache = pytestconfig.cache.mkdir("mypy")  # torch takes most of a minute the first time
    options = ["--strict", "--warn-unreachable", "--config-file=", f"--cache-dir={cache}"]
    options += ["--python-executable", sys.executable]
    command = [sys.executable, "-m", "mypy", *options, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr


def test_the_script_runs():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert done.stdout == "24\n"
