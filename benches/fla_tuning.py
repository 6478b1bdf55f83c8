"""flash-linear-attention measures many forms of each kernel before its first use; after `import fla_tuning`, which
comes before its own import, it does so in a tenth of the time.

Its l2norm kernels are compiled and measured 25 times anew for every 65,536 rows more: minutes, in a bench over several
trees. Their forms run at the speed of memory (within 2 % of each other on an H200), so that one is given, by the
library's own files of settings. All others are measured, for 20 ms a form instead of 100, and the forms of a kernel are
compiled side by side before, where this Triton can.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.testing import do_bench

NORMS = {"l2norm_fwd_kernel": {"BT": 8}, "l2norm_bwd_kernel": {"BT": 8}}


folder = Path(tempfile.mkdtemp())
for name, constants in NORMS.items():
    form = {"kwargs": constants, "num_warps": 4, "num_ctas": 1, "num_stages": 3}
    (folder / f"{name}.json").write_text(json.dumps({"kernel_name": name, "default_config": form}), "utf-8")
os.environ |= {"FLA_CONFIG_DIR": str(folder), "FLA_CACHE_MODE": "full"}
Autotuner.do_bench = property(lambda self: partial(do_bench, warmup=5, rep=20))

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:
    pass
else:
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Autotuner, kwargs: dict[str, Any]) -> list[Any]:
        """The forms to measure, compiled. One that does not compile is met again, and left out, when it is measured."""
        forms: list[Any] = prune(self, kwargs)
        given = {name: value for name, value in kwargs.items() if name != "warmup"}
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for form in forms:
                    self.fn.warmup(*self.nargs.values(), **given, **form.all_kwargs())
        except Exception as error:  # it only saves time
            warnings.warn(f"forms are compiled one after the other: {type(error).__name__}: {error}", stacklevel=2)
        return forms

    Autotuner.prune_configs = prune_and_compile
