"""The command line: `treepack inspect`, `treepack pack`, `treepack doctor`. Needs the extra `treepack[cli]`.

    commands          the commands; what went wrong as one line on stderr and an exit code
    inspect_command   readers -> survey (the numbers) -> tables, JSON, a report
    doctor_command    doctor (versions, devices, kernels, self-test) -> tables, JSON

    pack_command      readers -> offline.write, with a bar
    terminal          how all of them print

Exit codes: 0 all well; 1 the self-test of `doctor` fails; 2 something to put right, said in one line; 130 interrupted;
141 whoever reads the output has closed it.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the script `treepack`."""
    try:
        from .commands import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        print(f"treepack: the command line needs {error.name}: pip install 'treepack[cli]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # what the commands need takes a moment to load
        print("treepack: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


def __getattr__(name: str) -> Any:
    if name == "app":
        from .commands import app

        return app
    raise AttributeError(f"module 'treepack.cli' has no attribute {name!r}")
