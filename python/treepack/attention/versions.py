"""Which Triton the kernels were tested with, and what every kernel is compiled with under all of them.

The portable kernels run with any Triton that has what they use. The Hopper kernels are written in Gluon, which is
experimental and changes from one version to the next: with another version than these the portable ones run in their
place, and one warning says so.
"""

from __future__ import annotations

# Triton, without the patch number -> the versions of torch that bring it.
TESTED = {"3.6": "2.11", "3.7": "2.12 and 2.13", "3.8": "2.14", "3.9": "2.15"}

# Said, and not left to a default: that of Triton 3.10 will be off, which changes the bits of every result.
COMPILE = {"enable_fp_fusion": True}


def objection(version: str) -> str | None:
    """Why the Hopper kernels do not run with this version of Triton, and what to pin; None where they do."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return None
    tested = ", ".join(TESTED)
    newest = list(TESTED)[-1]
    return (
        f"the Hopper kernels were tested with Triton {tested}, this is {version}: "
        f"pin torch {TESTED[newest]}, which brings Triton {newest}, or another of the tested ones"
    )
