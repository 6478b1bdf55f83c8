"""Without a package that one can do without: a ModuleNotFoundError says what needs it and which command installs it."""

import subprocess
import sys

import pytest

PACK = "treepack.pack([{'input_ids': [1, 2]}], max_tokens=8)"
READ = "from treepack.readers import open_rollouts; list(open_rollouts({!r}).batches())"
NEEDS = [
    ("torch", "treepack.tree_attention", "treepack.tree_attention needs torch: pip install 'treepack[torch]'"),
    ("torch", "treepack.term_log_probs", "treepack.term_log_probs needs torch: pip install 'treepack[torch]'"),
    (
        "torch",
        "import treepack.integrations.transformers",
        "treepack.integrations needs torch: pip install 'treepack[torch]'",
    ),
    (
        "torch",
        f"{PACK}[0].to('cpu')",
        "a tree on a device, or with torch values, needs torch: pip install 'treepack[torch]'",
    ),
    (
        "transformers",
        "treepack.term_log_probs",
        "treepack.term_log_probs needs transformers: pip install 'treepack[transformers]'",
    ),
    ("torch", "treepack.row_log_probs", "treepack.row_log_probs needs torch: pip install 'treepack[torch]'"),
    ("jinja2", f"treepack.report({PACK})", "treepack.report needs jinja2: pip install 'treepack[cli]'"),
    ("pyarrow", "import treepack.offline.rows", "treepack.offline needs pyarrow: pip install 'treepack[cli]'"),
    ("pyarrow", READ.format("x.parquet"), "x.parquet: Parquet needs pyarrow: pip install 'treepack[cli]'"),
    ("pyarrow", READ.format("x.jsonl.zst"), "x.jsonl.zst: .zst needs pyarrow: pip install 'treepack[cli]'"),
    ("pyarrow", READ.format("folder"), "folder: a Hugging Face dataset needs pyarrow: pip install 'treepack[cli]'"),
    (
        "transformers",
        "from treepack.readers.chat import ChatEncoder; ChatEncoder('folder')",
        "tokenizer folder: it needs transformers: pip install 'treepack[transformers]'",
    ),
]


@pytest.mark.parametrize(("package", "line", "message"), NEEDS)
def test_says_what_to_install(package, line, message, tmp_path):
    for name in ("x.parquet", "x.jsonl.zst"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "folder" / name).write_text("{}")
    program = f"import sys; sys.modules[{package!r}] = None; import treepack\n{line}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    kind, _, said = done.stderr.splitlines()[-1].partition(": ")
    assert said == message
    assert kind == "treepack._optional.MissingPackage"


def test_it_is_a_module_that_was_not_found():
    from treepack._optional import MissingPackage, require

    with pytest.raises(ModuleNotFoundError) as caught:
        require("no_such_module", "this test")
    assert (type(caught.value), caught.value.name) == (MissingPackage, "no_such_module")
    require("json", "this test")


def test_what_the_package_shows():
    """`dir(treepack)` is its public names, however much of it is loaded."""
    program = (
        "import treepack, treepack.readers; assert dir(treepack) == sorted(treepack.__all__); treepack.__version__"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
