"""Are the commands of a shell block ones that this repository has? Nothing is run.

`make` targets are in the Makefile, files given to Python are there, modules can be found, and the options of
`treepack` are those of its command line. A program that is not named here fails, so that no block goes unchecked.
"""

import importlib.util
import re
import shlex

import pytest

# Programs of others: their own business.
OTHERS = frozenset({"cargo", "cd", "cp", "export", "git", "ls", "mkdir", "pip", "rm", "twine", "uv"})
ENDS = frozenset({"&&", "||", "|", ";", "&"})


def check_commands(text, root):
    for command in commands(text):
        program = command[0]
        if program == "make":
            check_make(command[1:], root)
        elif program == "treepack":
            check_treepack(command[1:])
        elif re.fullmatch(r"(.*/)?(python|pytest)[\d.]*", program):
            check_python(command if "pytest" not in program else ["python", "-m", "pytest", *command[1:]], root)
        elif program == "torchrun":
            script = next(word for word in command if word.endswith(".py"))
            check_python(["python", *command[command.index(script) :]], root)
        else:
            assert program.rsplit("/", 1)[-1] in OTHERS, f"{program}: doc_commands.py does not know this program"


def commands(text):
    """The simple commands of a script as lists of words, without comments, prompts and variables set in front."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if word in ENDS:
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"[A-Za-z_]\w*=.*", word):
                words.append(word)


def check_make(words, root):
    targets = re.findall(r"^([a-z][a-z-]*):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"make {word}: the Makefile has {', '.join(targets)}"


def check_python(words, root):
    rest = words[1:]
    if not rest or rest[0] in ("-c", "--version"):
        return
    if rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), f"python -m {rest[1]}: there is no such module"
        rest = [x for x in rest[2:] if x.startswith("tests/")]
    for path in rest[:1]:
        assert (root / path).exists(), f"{path}: there is no such file"


def check_treepack(words):
    typer = pytest.importorskip("typer", reason="the command line needs treepack[cli]")
    cli = pytest.importorskip("treepack.cli", reason="treepack.cli is not installed")
    group = typer.main.get_command(cli.app)
    names = [word for word in words if word in group.commands]
    command = group.commands[names[0]] if names else group
    known = {option for found in (group, command) for x in found.params for option in (*x.opts, *x.secondary_opts)}
    known |= {"--help", "-h"}
    if words and not words[0].startswith("-"):
        assert words[0] in group.commands, f"treepack {words[0]}: there is {', '.join(group.commands)}"
    for word in words:
        if re.match(r"-{1,2}[a-zA-Z]", word):
            assert word.split("=")[0] in known, f"treepack {' '.join(words)}: {word} is not among {sorted(known)}"
