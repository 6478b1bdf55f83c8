"""Every code block of every page is run or checked: what for which language, says `doc_blocks.py`."""

import doctest
import importlib
import re
from contextlib import ExitStack

import pytest

pytest.importorskip("sybil", reason="the blocks of the pages are found by sybil (dependency group test)")

from doc_blocks import LANGUAGES, PAGES, ROOT, Page, blocks, is_code, parse
from doc_commands import check_commands

import treepack

BLOCKS = [
    pytest.param(path, index, id=f"{path.relative_to(ROOT)}-{examples[index].line}")
    for path in PAGES
    for examples in [parse(path)]
    for index in blocks(examples)
]


@pytest.fixture(scope="module")
def page_of():
    """path, names that its blocks find -> its `Page`; one page is open at a time."""
    with ExitStack() as stack:
        opened = {}

        def page(path, **names):
            key = path, *names.items()
            if key not in opened:
                stack.close()
                opened.clear()
                opened[key] = stack.enter_context(Page(path))
                if names:
                    opened[key].examples[0].namespace.update(names)
            return opened[key]

        yield page


# FlexAttention on the CPU runs its eager form, which the pages want.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("path", "index"), BLOCKS)
def test_block(page_of, path, index):
    page_of(path).run(index)


def test_recipes_in_float32(page_of):
    """The recipes mix columns, parameters and log-probs: what one dtype promotes without a word, another refuses."""
    torch = pytest.importorskip("torch", reason="the recipes are about torch")
    pytest.importorskip("transformers", reason="the recipes are about models of transformers")
    page = page_of(ROOT / "docs" / "integrations.md", dtype=torch.float32)
    page.run(blocks(page.examples)[-1])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_found(path):
    """Each fence opens a block of a language with a check, and is one of those that `test_block` runs."""
    fences = re.findall(r"^ *(```+|~~~+)(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    opening = [language.strip() for _, language in fences[::2]]
    assert len(fences) % 2 == 0
    assert set(opening) <= {"python", *LANGUAGES}
    visible = [x for x in parse(path) if x.document.text[x.start : x.start + 4] != "<!--"]
    assert len(visible) >= len(opening)


def docstrings():
    """The docstring examples of the package, those of `doctest: +SKIP` left out, one case for each object."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in sorted((ROOT / "python" / "treepack").rglob("*.py")):
        if ">>> " not in module.read_text(encoding="utf-8"):
            continue
        name = ".".join(module.relative_to(ROOT / "python").with_suffix("").parts)
        loaded = importlib.import_module(name.removesuffix(".__init__"))
        for case in finder.find(loaded, loaded.__name__):
            if any(not example.options.get(doctest.SKIP) for example in case.examples):
                yield pytest.param(case, id=case.name)


@pytest.mark.parametrize("case", list(docstrings()))
def test_docstring(case):
    case.globs["treepack"] = treepack
    if re.search(r"\b(torch|model)\b", case.docstring):
        case.globs["torch"] = pytest.importorskip("torch", reason="the example is about torch")
    if "(model" in case.docstring:
        tiny_models = pytest.importorskip("tiny_models", reason="the example needs a model of transformers")
        case.globs.update(model=tiny_models.tiny("qwen2"), samples=tiny_models.shared_samples())
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(case).failed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("make tset", "make tset"),
        ("FOO=1 make demo ROLLOUTS=x.npz && make nothing  # a comment", "make nothing"),
        ("python examples/nothing.py", "examples/nothing.py"),
        ("python -m nothing_of_this_name", "nothing_of_this_name"),
        ("nothing --of-this", "nothing"),
    ],
)
def test_unknown_commands_are_found(text, message):
    with pytest.raises(AssertionError, match=message):
        check_commands(text, ROOT)


def test_known_commands_pass():
    check_commands(
        "$ make test  # all\nA=1 make demo \\\n  ROLLOUTS='my file.npz'\npython examples/demo.py --x 1\n", ROOT
    )


def test_python_is_distinguished_from_text():
    assert is_code("from x import y\ny()\n")
    assert not is_code("three samples    one tree\n")
    assert not is_code("a <- b\n")
