"""For `test_gluon.py`: what the launcher of this process's Triton makes of a bare descriptor and of Triton's own,
without a GPU. Prints one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import triton
from triton.backends.nvidia import driver

from treepack.attention.hopper import launch as gluon_launch


@dataclass
class More(gluon_launch.TensorDescriptor):
    """That of a version which wants one thing more."""

    tomorrow: int = field(kw_only=True)


def main() -> None:
    x = torch.zeros(128, 256, dtype=torch.bfloat16)
    layout = gluon_launch.table.matrix(64, x.dtype)
    bare = gluon_launch._Descriptor(x, [128, 256], [256, 1], [64, 64], layout)
    calls = []

    class Utilities:
        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, arguments)) or "map"

    driver.triton = SimpleNamespace(
        runtime=SimpleNamespace(driver=SimpleNamespace(active=SimpleNamespace(utils=Utilities())))
    )
    metadata = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [64, 64], "fp4_padded": False}
    more = () if driver.make_tensordesc_arg.__code__.co_argcount == 2 else (None,)
    made = [driver.make_tensordesc_arg(x, metadata, *more) for x in (bare, bare.checked())]
    report = {
        "triton": triton.__version__,
        "known": gluon_launch.KNOWN,
        "same": made[0] == made[1] and calls[0] == calls[1],
        "filled": len(calls) // 2,
        "more": gluon_launch.launch_is_known(More),
        "other": gluon_launch.launch_is_known(compiled=object),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
