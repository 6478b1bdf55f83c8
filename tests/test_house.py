"""The house: arrows point one way, no two files import each other, nobody inside imports the package itself, and the
map on the page is the one that the code has. What reads the imports (`house.py`) is tested on small houses first."""

import textwrap

import house
import pytest

BOTH = pytest.mark.parametrize("read", [house.python_house, house.rust_house])


@BOTH
def test_every_room_is_in_the_order(read):
    assert read().homeless() == []


@BOTH
def test_no_arrow_points_up(read):
    assert read().upward() == []


@BOTH
def test_no_circle(read):
    assert read().circles() == []


def test_nobody_inside_imports_the_package():
    assert house.imports_of_the_package() == []


def test_the_page_shows_the_map():
    assert house.shown_map() == house.the_map(), "python tests/house.py --write puts it there"


# --- on small houses ------------------------------------------------------------------------------------------------


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def python(folder, files):
    write(folder / "python" / "treepack", {"__init__.py": "from .tree.layout import ARRAYS", **files})
    return house.python_house(folder)


def rust(folder, files):
    write(folder / "rust", {"lib.rs": "mod error;\nmod trie;\npub use error::Error;", "error.rs": "", **files})
    return house.rust_house(folder)


@pytest.mark.parametrize(
    "text",
    [
        "from ..packing import options",
        "from ..packing.options import Options",
        "import treepack.packing.options",
        "from treepack.packing.options import Options as O",
        "def late():\n    from ..packing import options",
        "if TYPE_CHECKING:\n    from ..packing.options import Options",
        "try:\n    pass\nexcept ImportError:\n    from ..packing.options import Options",
        "class C:\n    def f(self):\n        import treepack.packing.options as o",
    ],
)
def test_an_import_of_python_is_found_wherever_it_stands(tmp_path, text):
    small = python(tmp_path, {"tree/layout.py": text, "packing/__init__.py": "", "packing/options.py": ""})
    assert ("tree/layout", "packing/options") in small.arrows
    assert small.upward() == ["tree/layout -> packing/options"]


def test_what_is_no_arrow_of_python(tmp_path):
    text = """
        import numpy, treepacked
        from collections.abc import Mapping
        TEXT = "from ..packing import options"  # from ..packing import options
    """
    small = python(tmp_path, {"tree/layout.py": text, "packing/options.py": ""})
    assert small.arrows == {("__init__", "tree/layout")}


def test_a_name_of_a_folder_is_an_arrow_to_its_own_file(tmp_path):
    files = {
        "packing/__init__.py": "from .batch import pack",
        "packing/batch.py": "",
        "tree/layout.py": "",
        "cli/main.py": "from ..packing import pack",
    }
    assert python(tmp_path, files).arrows - {("__init__", "tree/layout")} == {
        ("cli/main", "packing/__init__"),
        ("packing/__init__", "packing/batch"),
    }


@pytest.mark.parametrize(
    "text", ["import treepack", "from treepack import pack", "from .. import pack", "from .. import *"]
)
def test_an_import_of_the_package_is_found(tmp_path, text):
    python(tmp_path, {"tree/__init__.py": "", "tree/layout.py": text, "synthetic.py": "from . import tree"})
    assert house.imports_of_the_package(tmp_path) == ["tree/layout"]


def test_a_circle_is_found_and_named(tmp_path):
    files = {
        "tree/layout.py": "def f():\n    from . import tree",
        "tree/tree.py": "from .columns import C",
        "tree/columns.py": "from .layout import ARRAYS",
        "tree/packed.py": "from .tree import T",
    }
    small = python(tmp_path, files)
    assert small.circles() == [["tree/columns", "tree/layout", "tree/tree"]]
    assert small.upward() == []


def test_a_room_that_the_order_lacks_is_named(tmp_path):
    small = python(tmp_path, {"tree/layout.py": "", "cellar.py": "", "integrations/attic/row.py": ""})
    assert {"cellar", "integrations/attic", "packing"} <= set(small.homeless())
    assert "tree" not in small.homeless()


@pytest.mark.parametrize(
    "text",
    [
        "use crate::trie::Trie;",
        "pub(crate) use crate::trie::{Trie, ROOT};",
        "use crate::{\n    simd::{self, run_end as end},\n    trie::Trie, // the trie\n};",
        "use super::trie::*;",
        "fn f() -> usize { crate::trie::ROOT }",
        "macro_rules! m { () => { $crate::trie::ROOT } }",
        "mod inner { use super::super::trie::ROOT; }",
    ],
)
def test_an_import_of_rust_is_found_wherever_it_stands(tmp_path, text):
    small = rust(tmp_path, {"error.rs": text, "trie.rs": "", "simd.rs": ""})
    assert ("error", "trie") in small.arrows
    assert "error -> trie" in small.upward()


def test_what_is_no_arrow_of_rust(tmp_path):
    text = """
        // use crate::trie::Trie;
        /* use crate::trie::Trie; */
        const TEXT: &str = "use crate::trie::{";
        const BRACE: (char, char) = ('{', '\\'');
        macro_rules! body { ($module:ident) => { mod $module { use super::*; } } }
        use std::collections::HashMap;
        #[cfg(test)]
        mod tests { use super::*; use crate::trie::Trie; fn f() { if true {} } }
    """
    assert rust(tmp_path, {"error.rs": text, "trie.rs": ""}).arrows == {("lib", "error")}


def test_folders_of_rust(tmp_path):
    files = {
        "trie.rs": "",
        "plan/mod.rs": "mod ranks;\nmod room;\npub use ranks::rank;",
        "plan/room.rs": "",
        "plan/ranks.rs": "use super::room::Room;\nuse super::Demand;\nuse crate::trie;",
        "pack.rs": "use crate::plan::rank;",
    }
    small = rust(tmp_path, files)
    assert small.arrows - {("lib", "error")} == {
        ("plan/mod", "plan/ranks"),
        ("plan/ranks", "plan/room"),
        ("plan/ranks", "plan/mod"),
        ("plan/ranks", "trie"),
        ("pack", "plan/mod"),
    }
    assert small.circles() == [["plan/mod", "plan/ranks"]]
