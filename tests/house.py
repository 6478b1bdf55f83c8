"""The rooms of the house and its arrows, read from the sources: who imports whom, in Python and in Rust.

    python tests/house.py               the map
    python tests/house.py --write       ... into docs/house.md, which shows it
    python tests/house.py --counts      how many files, rooms, arrows and circles there are
    python tests/house.py --root DIR    the same of another checkout

A room is a file or a folder at the top of the package (of integrations/, what is in it) or of rust/. `test_house.py`
fails on an arrow that points up, on a circle between files, and on an import of the package itself from inside.
Needs Python alone; nothing is imported or compiled.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The order of the rooms, and the only place that has it: a room imports from the lines above its own.
PYTHON = """
    errors _optional _version _pages
    _core
    inputs synthetic
    tree
    packing attention recurrent
    logprobs distributed
    integrations
    integrations/transformers integrations/collator readers reports
    integrations/trl integrations/areal integrations/verl integrations/models offline testing
    parity cli __init__
    __main__
"""
RUST = """
    error simd groups tiles cuts
    samples padding slab memory
    options runs trie arrays arena
    kept_sets
    plan layout
    terms packed
    writer
    pack stream
    lib
    python
"""


@dataclass
class House:
    """The files of one language by room, and their arrows."""

    name: str
    """Where they lie."""
    order: str
    """`PYTHON` or `RUST`."""
    rooms: dict[str, str]
    """{file: its room}, files by their path without a suffix: `tree/layout`, `plan/mod`."""
    arrows: set[tuple[str, str]] = field(default_factory=set)
    """(file, file that it imports)"""

    def floors(self) -> dict[str, int]:
        """The line of each room in the order."""
        lines = (line.split() for line in self.order.strip().splitlines())
        return {room: floor for floor, rooms in enumerate(lines) for room in rooms}

    def room_arrows(self) -> set[tuple[str, str]]:
        pairs = {(self.rooms[a], self.rooms[b]) for a, b in self.arrows}
        return {(a, b) for a, b in pairs if a != b}

    def homeless(self) -> list[str]:
        """Rooms that the order lacks, and rooms of the order that are not there."""
        return sorted(set(self.rooms.values()) ^ set(self.floors()))

    def upward(self) -> list[str]:
        """Arrows between files that do not point to a line above."""
        floor = self.floors()
        apart = [(a, b) for a, b in sorted(self.arrows) if self.rooms[a] != self.rooms[b]]
        return [f"{a} -> {b}" for a, b in apart if floor.get(self.rooms[b], 0) >= floor.get(self.rooms[a], 0)]

    def circles(self) -> list[list[str]]:
        """Groups of files that reach each other."""
        return [sorted(group) for group in _components(self.rooms, self.arrows) if len(group) > 1]

    def map(self) -> Iterator[str]:
        """A line for each room, in order: the rooms that it imports."""
        floor, arrows = self.floors(), self.room_arrows()
        yield f"{self.name:<30}imports"
        places = {room: place for place, room in enumerate(floor)}
        for room in floor:
            below = sorted((b for a, b in arrows if a == room), key=lambda other: places.get(other, -1))
            yield f"  {room:<28}{' '.join(below)}".rstrip()

    def counts(self) -> Iterator[str]:
        yield f"{self.name}: {len(self.rooms)} files, {sum('/' not in x for x in self.rooms)} of them at the top"
        rooms, circles = set(self.rooms.values()), self.circles()
        yield f"  {len(rooms)} rooms, {len(self.room_arrows())} arrows between rooms, {len(self.arrows)} between files"
        yield f"  {len(circles)} circles of files" + "".join(f"\n    {' '.join(circle)}" for circle in circles)


def _components(nodes: Iterable[str], arrows: set[tuple[str, str]]) -> Iterator[set[str]]:
    """Sets of nodes that reach each other (Kosaraju 1978): backwards along the arrows, last finished first."""
    after: dict[str, list[str]] = {node: [] for node in nodes}
    before: dict[str, list[str]] = {node: [] for node in after}
    for a, b in sorted(arrows):
        after[a].append(b)
        before[b].append(a)

    def reach(node: str, to: dict[str, list[str]], seen: set[str]) -> Iterator[str]:
        """Unseen nodes that are reached, each after those that it leads to."""
        if node not in seen:
            seen.add(node)
            for other in to[node]:
                yield from reach(other, to, seen)
            yield node

    seen: set[str] = set()
    finished = [x for node in after for x in reach(node, after, seen)]
    seen = set()
    for node in reversed(finished):
        if group := set(reach(node, before, seen)):
            yield group


# --- Python ---------------------------------------------------------------------------------------------------------


def python_house(root: Path = ROOT) -> House:
    """The package. Imports within functions and for type checkers alone are arrows like others; `__init__` files are
    files like others, but that a module of a folder runs the folder's own is no arrow."""
    package = root / "python" / "treepack"
    paths = [path for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi")]
    files = {path.relative_to(package).with_suffix("").as_posix(): path for path in paths}
    house = House("python/treepack/", PYTHON, {name: _python_room(name) for name in sorted(files)})
    for name, path in files.items():
        for target in imported(name, path.read_text(encoding="utf-8")):
            found = _python_file(target, files)
            if found is not None and found != name:
                house.arrows.add((name, found))
    return house


def _python_room(file: str) -> str:
    """`tree/layout` -> `tree`, but `integrations/trl/row` -> `integrations/trl`: that folder holds rooms itself."""
    parts = file.removesuffix("/__init__").split("/")
    return "/".join(parts[: 2 if parts[0] == "integrations" else 1])


def _python_file(target: tuple[str, ...], files: dict[str, Path]) -> str | None:
    """The file of a module, or of the module that has it as a name; None for what is not of the package."""
    for parts in (target, target[:-1]):
        for name in ("/".join(parts), "/".join((*parts, "__init__"))):
            if name in files:
                return name
    return None


def imported(file: str, text: str) -> Iterator[tuple[str, ...]]:
    """What a file imports of the package, from its top: ("tree", "layout", "ARRAYS"); () is the package itself."""
    parts = file.split("/")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (tuple(name[1:]) for name in names if name[0] == "treepack")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                module = parts[: len(parts) - node.level] + module
            elif module[0] == "treepack":
                module = module[1:]
            else:
                continue
            yield from ((*module, alias.name) for alias in node.names)


def imports_of_the_package(root: Path = ROOT) -> list[str]:
    """Files that import the package itself, and not a module of it."""
    return sorted({a for a, b in python_house(root).arrows if b == "__init__"})


# --- Rust -----------------------------------------------------------------------------------------------------------

_NAME = r"[A-Za-z_]\w*"
_INLINE = re.compile(rf"\bmod\s+\$?({_NAME})\s*\{{")
_DECLARED = re.compile(rf"\bmod\s+({_NAME})\s*;")


def rust_house(root: Path = ROOT) -> House:
    """The crate. A path such as `crate::trie::ROOT` is an arrow wherever it stands; `mod trie;` is none: it says where
    a file belongs. What `#[cfg(test)]` covers is left out: tests compare with whatever helps them."""
    folder = root / "rust"
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.rs")}
    house = House("rust/", RUST, {name: name.split("/")[0] for name in sorted(files)})
    modules = {_rust_module(name): name for name in files}
    for name, path in files.items():
        for target in used(_rust_module(name), path.read_text(encoding="utf-8")):
            found = next(modules[target[:n]] for n in range(len(target), -1, -1) if target[:n] in modules)
            if found != name:
                house.arrows.add((name, found))
    return house


def _rust_module(file: str) -> tuple[str, ...]:
    parts = tuple(file.split("/"))
    return parts[:-1] if parts[-1] in ("lib", "mod") else parts


def used(module: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The paths within the crate that a file of `module` names, from the crate's root."""
    text = _without_tests(_code(text))
    inline = [(match.start(), _closing(text, match.end()), match[1]) for match in _INLINE.finditer(text)]
    children = "|".join(_DECLARED.findall(text))
    start = re.compile(rf"(?<![\w:])(crate|self|super{'|' + children if children else ''})\s*::\s*")
    for match in start.finditer(text):
        here = module + tuple(name for a, b, name in inline if a < match.start() < b)
        base = () if match[1] == "crate" else here
        if match[1] == "super":
            base = here[:-1]
        elif match[1] not in ("crate", "self"):
            base = (*module, match[1])
        for path in _tree(text, match.end())[0]:
            above = base
            while path[:1] == ("super",):
                above, path = above[:-1], path[1:]
            yield (*above, *path)


def _tree(text: str, at: int) -> tuple[list[tuple[str, ...]], int]:
    """The paths that start at a place, `a::{b, c::D}` -> a::b and a::c::D, and where they end."""
    if text[at] == "{":
        paths: list[tuple[str, ...]] = []
        while text[at] != "}":
            at = re.compile(r"[{,\s]+").match(text, at).end()  # type: ignore[union-attr]
            if text[at] != "}":
                more, at = _tree(text, at)
                paths += more
                at = re.compile(rf"(\s+as\s+{_NAME})?\s*").match(text, at).end()  # type: ignore[union-attr]
        return paths, at + 1
    name = re.compile(rf"{_NAME}|\*").match(text, at)
    if name is None:
        return [()], at
    more = re.compile(r"\s*::\s*(?=[\w{*])").match(text, name.end())
    if more is None:
        return [(name[0],)], name.end()
    paths, end = _tree(text, more.end())
    return [(name[0], *path) for path in paths], end


def _code(text: str) -> str:
    """Rust without comments and without what is in strings and characters, which may hold braces."""
    literal = r'//[^\n]*|/\*.*?\*/|r(#*)".*?"\1|"(?:\\.|[^"\\])*"|\'(?:\\.[^\']*|[^\'\\])\''
    return re.sub(literal, lambda match: " " if match[0].startswith("/") else '""', text, flags=re.DOTALL)


def _without_tests(text: str) -> str:
    while match := re.search(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*\{", text):
        text = text[: match.start()] + text[_closing(text, match.end()) :]
    return text


def _closing(text: str, at: int) -> int:
    """The place after the brace that closes the one before `at`."""
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


# --- printed --------------------------------------------------------------------------------------------------------


PAGE = Path("docs", "house.md")
_BLOCK = re.compile(r"(?<=```text\n)rust/ +imports\n.*?(?=```)", re.DOTALL)


def the_map(root: Path = ROOT) -> str:
    """The map of both languages."""
    return "\n".join([*rust_house(root).map(), "", *python_house(root).map()]) + "\n"


def shown_map(root: Path = ROOT) -> str:
    """The map that the page shows."""
    (block,) = _BLOCK.findall((root / PAGE).read_text(encoding="utf-8"))
    return str(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--counts", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        page = arguments.root / PAGE
        page.write_text(_BLOCK.sub(the_map(arguments.root), page.read_text(encoding="utf-8")), encoding="utf-8")
    elif not arguments.counts:
        print(the_map(arguments.root), end="")
    if not arguments.counts:
        return
    for house in (rust_house(arguments.root), python_house(arguments.root)):
        print("\n".join(house.counts()))
    print(f"  {len(imports_of_the_package(arguments.root))} files import treepack itself")


if __name__ == "__main__":
    main()
