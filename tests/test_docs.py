"""Every Python block of the README and the pages runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(path, block, id=f"{path.relative_to(ROOT)}-{number}")
    # docs/integrations.md is one program in pieces: tests/test_integrations_doc.py
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if path.name != "integrations.md"
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("path", "block"), BLOCKS)
def test_block(path, block):
    exec(compile(block, str(path), "exec"), {})
