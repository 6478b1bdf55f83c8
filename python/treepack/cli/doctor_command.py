"""`treepack doctor`: is everything here, and does it compute the right thing?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .._core import PackError
from . import doctor as facts
from .terminal import print_table, stdout


def doctor(
    impl: Annotated[str | None, typer.Option(help="Exit with code 2 unless this one can run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show versions, GPUs and which kernels can run here, and test packing, attention and states."""
    found = facts.report()
    if impl is not None:
        _check_runs(impl, found)
    if as_json:
        print(json.dumps(found))
    else:
        _print(stdout(), found)
    if not found["ok"]:
        raise typer.Exit(1)


def _check_runs(impl: str, found: dict[str, Any]) -> None:
    """PackError where an implementation cannot run here."""
    kernels = {kernel["impl"]: kernel for kernel in found["kernels"]}
    if not kernels:
        raise PackError(f"--impl {impl} cannot run here: {found['no_torch']}")
    if impl not in kernels:
        raise PackError(f"--impl {impl} is unknown; allowed is {', '.join(kernels)}")
    if not kernels[impl]["runs"]:
        raise PackError(f"--impl {impl} cannot run here: {kernels[impl]['reason']}")


def _print(console: Console, found: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE, title="installed", title_justify="left", title_style="bold", show_header=False)
    for name, version in found["versions"].items():
        table.add_row(name, version or "not installed")
    for device in found["devices"]:
        about = f"compute capability {device['capability']}, {device['gib']} GiB"
        table.add_row(
            "GPU", f"{device['name']}, {about}, driver {device['driver'] or 'unknown'}, CUDA {device['cuda']}"
        )
    if not found["devices"]:
        table.add_row("GPU", f"none: {found['no_device']}")
    print_table(console, table)

    for title, implementations in (
        ("kernels of tree_attention", found["kernels"]),
        ("scans of layers that carry a state", found["scans"]),
    ):
        table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold")
        for heading in ("impl", "runs here", "because"):
            table.add_column(heading)
        for kernel in implementations:
            table.add_row(kernel["impl"], "yes" if kernel["runs"] else "no", kernel["reason"])
        if not implementations:
            table.add_row("all", "no", found["no_torch"])
        print_table(console, table)

    table = Table(box=box.SIMPLE, title="self-test", title_justify="left", title_style="bold")
    for heading in ("check", "", "found"):
        table.add_column(heading)
    for check in found["self_test"]:
        verdict = "passed" if check["passed"] else "FAILED"
        table.add_row(check["name"], verdict, f"{check['detail']} ({check['milliseconds']:.0f} ms)")
    print_table(console, table)
