"""Makes the pictures in the pages: `make screenshots`. Needs playwright, a Chromium (`TREEPACK_CHROMIUM` or on the
path) and the real rollouts (`TREEPACK_DATA`).

report.png: the turns of tool agents in their trees, as `treepack inspect --html` draws them, with a bar that is chosen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    data = Path(os.environ.get("TREEPACK_DATA", ROOT.parent / "shared")) / "data" / "tau_airline_turns.npz"
    chromium = os.environ.get("TREEPACK_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder, "report.html")
        inspect = ["-m", "treepack", "inspect", data.name, "--max-tokens", "32k", "--window", "16m", "--html", page]
        subprocess.run([sys.executable, *inspect], check=True, stdout=subprocess.DEVNULL, cwd=data.parent)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1280, "height": 1000}, device_scale_factor=1)
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-shown='0']")
        shown.focus("#next")
        shown.keyboard.press("Tab")  # chooses the first bar, whose samples the page then lists
        shown.keyboard.press("Tab")
        shown.evaluate("scrollTo(0, 0)")
        shown.screenshot(path=DOCS / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
