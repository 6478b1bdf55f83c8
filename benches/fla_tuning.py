"""flash-linear-attention measures many forms of each kernel before its first use; after `import fla_tuning`, which
comes before its own import, it does so in a tenth of the time.

Its l2norm kernels are compiled and measured 25 times anew for every 65,536 rows more: minutes, in a bench over several
trees. Their forms run at the speed of memory (within 2 % of each other on an H200), so that one is given, by the
library's own files of settings. All others are measured, for 20 ms a form instead of 100.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

from triton.runtime.autotuner import Autotuner
from triton.testing import do_bench

NORMS = {"l2norm_fwd_kernel": {"BT": 8}, "l2norm_bwd_kernel": {"BT": 8}}


folder = Path(tempfile.mkdtemp())
for name, constants in NORMS.items():
    form = {"kwargs": constants, "num_warps": 4, "num_ctas": 1, "num_stages": 3}
    (folder / f"{name}.json").write_text(json.dumps({"kernel_name": name, "default_config": form}), "utf-8")
os.environ |= {"FLA_CONFIG_DIR": str(folder), "FLA_CACHE_MODE": "full"}
Autotuner.do_bench = property(lambda self: partial(do_bench, warmup=5, rep=20))
