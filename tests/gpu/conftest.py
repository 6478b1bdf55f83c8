"""Tests that need a GPU: `make test-gpu`, or `python -m pytest tests/gpu [-k NAME]`. They run from a bare checkout,
without the native extension.

`TREEPACK_UNPROVEN=1`: what `triton` runs includes the Hopper kernels of forms that `attention/rule.py` does not call
proven yet, in every test: a form is proven by passing so.
"""

from __future__ import annotations

import itertools
import os
import platform

import pytest
import source_tree  # noqa: F401

torch = pytest.importorskip("torch")
import torch._dynamo as dynamo  # noqa: E402


def pytest_configure(config) -> None:
    dynamo.config.recompile_limit = 64  # FlexAttention compiles again for each mask and option of its tests


def pytest_report_header(config) -> str:
    if not torch.cuda.is_available():
        return "no GPU: every test here is skipped"
    import triton

    properties = torch.cuda.get_device_properties(0)
    cores = properties.multi_processor_count
    return (
        f"{properties.name}, sm_{properties.major}{properties.minor}, {cores} multiprocessors, "
        f"{properties.total_memory >> 30} GiB | torch {torch.__version__}, triton {triton.__version__}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}"
    )


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "tests/gpu" in str(item.path).replace("\\", "/"):  # `items` are those of the whole run
            # Versions of torch on GPU machines differ: their warnings are shown, not errors.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="session")
def few_forms():
    """Triton's autotuner, which flash-linear-attention uses, compiles and measures three forms of a kernel, not 30."""
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs

    def some(self, arguments):
        forms = every(self, arguments)
        return [forms[i] for i in sorted({0, len(forms) // 2, len(forms) - 1})]

    Autotuner.prune_configs = some
    yield
    Autotuner.prune_configs = every


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """portable: what is asked of `triton` runs on `triton_plain`; hopper: what `triton` runs here by its own rule."""
    from treepack.attention import rule as triton_rule

    form = getattr(request, "param", "hopper")
    if os.environ.get("TREEPACK_UNPROVEN"):
        pairs = tuple(itertools.product(triton_rule.GLUON_SIZES, repeat=2))
        monkeypatch.setattr(triton_rule, "PROVEN_SIZES", pairs)
        monkeypatch.setattr(triton_rule, "PROVEN_OPTIONS", ("window", "softcap"))
    if form == "portable":
        rule = triton_rule.choose
        monkeypatch.setattr(triton_rule, "choose", lambda impl, *call: rule("triton_plain", *call))
    return form


@pytest.fixture(autouse=True)
def _defaults(monkeypatch):
    """Every test starts from the table of tiles and the rule for dK/dV, and ends with the device idle and its memory
    returned. The check of the first use would come between what is counted; it has tests of its own."""
    from treepack.attention import operator as triton_op
    from treepack.attention.triton import launch as triton_launch

    monkeypatch.setenv("TREEPACK_SELF_CHECK", "0")
    yield
    triton_launch.tiles_override = triton_op.split_heads_override = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
