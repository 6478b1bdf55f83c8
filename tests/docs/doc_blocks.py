"""The code blocks of the pages as test cases: Markdown in, blocks that run out, by sybil's parsers.

    python            runs: all blocks of a page in order, in one namespace
    sh                every command is one that this repository has (`doc_commands.py`)
    json, toml, yaml  parses
    text              is not Python, which would have to run

What a reader does not see stands in HTML comments: `<!-- invisible-code-block: python ... -->` runs as well, and
`<!-- skip: next "why" -->` or `<!-- skip: next if(condition, reason="why") -->` leaves out the block that follows.
Blocks find `monkeypatch` and `cleanup` (a `contextlib.ExitStack`) in their namespace; both are undone after the page.
"""

import ast
import json
from contextlib import ExitStack
from pathlib import Path
from unittest import SkipTest

import pytest
from doc_commands import check_commands
from sybil import Sybil
from sybil.evaluators.skip import Skipper
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benches" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CODE = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef, ast.For, ast.With)


def check_json(example):
    json.loads(example.parsed)


def check_toml(example):
    pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib").loads(example.parsed)


def check_yaml(example):
    pytest.importorskip("yaml", reason="needs pyyaml").safe_load(example.parsed)


def check_text(example):
    assert not is_code(example.parsed), "this is Python: mark the block as python, so that it runs"


def is_code(text):
    try:
        return any(isinstance(node, CODE) for node in ast.parse(text).body)
    except SyntaxError:
        return False


def check_shell(example):
    check_commands(example.parsed, ROOT)


LANGUAGES = {"sh": check_shell, "json": check_json, "toml": check_toml, "yaml": check_yaml, "text": check_text}


def parse(path):
    """The examples of a page in order: its blocks, and the comments that skip them."""
    parsers = [SkipParser(), PythonCodeBlockParser(), *(CodeBlockParser(x, check) for x, check in LANGUAGES.items())]
    return list(Sybil(parsers=parsers).parse(path).examples())


def blocks(examples):
    """The indices of those that are blocks."""
    return [i for i, example in enumerate(examples) if not isinstance(example.region.evaluator, Skipper)]


class Page:
    """A page whose blocks run once each; what they changed is undone on leaving the `with`."""

    def __init__(self, path):
        self.examples = parse(path)
        self.done = 0
        self.cleanup = ExitStack()

    def __enter__(self):
        patch = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        if self.examples:
            self.examples[0].namespace.update(monkeypatch=patch, cleanup=self.cleanup)
        return self

    def __exit__(self, *error):
        return self.cleanup.__exit__(*error)

    def run(self, index):
        """Run example `index`, and before it those that have not run yet."""
        while self.done <= index:
            example = self.examples[self.done]
            self.done += 1
            try:
                example.evaluate()
            except SkipTest as reason:
                if self.done > index:
                    pytest.skip(str(reason))
