"""Hypothesis profiles, the folder of real rollouts, a browser.

`HYPOTHESIS_PROFILE=long` searches far longer, with a new seed each run; the default is quick and the same every time.
"""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fast", max_examples=120, deadline=None, derandomize=True, suppress_health_check=_slow_is_fine
)
settings.register_profile(
    "long", max_examples=5000, deadline=None, print_blob=True, suppress_health_check=_slow_is_fine
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def treepack_data() -> Path:
    """The folder that holds `data/` and `golden/`; tests that need it skip where it is not there."""
    named = os.environ.get("TREEPACK_DATA")
    if not named:
        pytest.skip("TREEPACK_DATA is not set: it names the folder that holds data/ and golden/")
    folder = Path(named)
    if not (folder / "data").is_dir() or not (folder / "golden").is_dir():
        pytest.skip(f"TREEPACK_DATA={named} holds no data/ and golden/")
    return folder


# A Chromium of the system, without a screen: TREEPACK_CHROMIUM=/path/to/chromium names one.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium():
    named = os.environ.get("TREEPACK_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    if not path:
        pytest.skip(f"no Chromium found: none of {', '.join(NAMES)} is on the PATH, TREEPACK_CHROMIUM is not set")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()
