"""Where memory is short, packing raises MemoryError, and the process goes on."""

import subprocess
import sys
import textwrap

import pytest

resource = pytest.importorskip("resource", reason="limits of a process are those of Unix")

PROGRAM = """
    import resource
    import numpy as np
    import treepack

    def limited(call):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + {room} * 2**20, -1))
        try:
            call()
        except MemoryError as error:
            print("MemoryError", error)
        else:
            print("packed")
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    {case}
    small = [{{"input_ids": [1, 2, 3]}}, {{"input_ids": [1, 2, 4]}}]
    print(treepack.pack(small, max_tokens=8)[0].input_ids.tolist())
"""

#: What is packed, and how many MiB beside the input are left for it.
CASES = {
    "many samples": (
        200,
        """
    n = 2_000_000
    batch = {"input_ids": np.arange(n), "cu_seqlens": np.arange(n + 1)}
    limited(lambda: treepack.pack(batch, max_tokens=n))""",
    ),
    "a mask that changes at each token": (
        60,
        """
    n = 20_000_000
    batch = {"input_ids": np.zeros(n, np.int64), "completion_mask": np.tile([0, 1], n // 2).astype(np.uint8)}
    limited(lambda: treepack.pack({**batch, "cu_seqlens": [0, n]}, max_tokens=n))""",
    ),
    "a large tree": (
        300,
        """
    n = 30_000_000
    batch = {"input_ids": np.zeros(n, np.int64), "cu_seqlens": np.array([0, n])}
    limited(lambda: treepack.pack(batch, max_tokens=n))""",
    ),
    "a stream": (
        200,
        """
    packer = treepack.Packer(max_tokens=2**30)
    sample = {"input_ids": np.arange(1_000_000), "old_log_probs": np.zeros(1_000_000)}
    packer.add(sample)
    def feed():
        for _ in range(100):
            packer.add(sample)
    limited(feed)
    packer.add({**sample, "input_ids": np.arange(1_000_000) + 7})
    assert packer.flush()[0][0].num_samples >= 2""",
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("name", list(CASES))
def test_a_packing_that_does_not_fit_raises(name):
    room, case = CASES[name]
    code = textwrap.dedent(PROGRAM).format(room=room, case="@@").replace("@@", textwrap.dedent(case).strip())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("MemoryError no memory for "), done.stdout
    assert rest[-1] == "[1, 2, 3, 4]"
