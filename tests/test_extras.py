"""Without torch: what needs it says which command installs it."""

import subprocess
import sys

import pytest

NEEDS = {
    "treepack.tree_attention": "treepack.tree_attention needs torch",
    "treepack.term_log_probs": "treepack.term_log_probs needs torch",
    "import treepack.integrations.transformers": "treepack.integrations needs torch",
    "treepack.pack([{'input_ids': [1, 2]}], max_tokens=8)[0].to('cpu')": "a tree on a device, or with torch values",
}


@pytest.mark.parametrize("line", list(NEEDS))
def test_says_what_to_install(line):
    program = f"import sys; sys.modules['torch'] = None; import treepack\n{line}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert NEEDS[line] in last
    assert last.endswith("pip install 'treepack[torch]'")
