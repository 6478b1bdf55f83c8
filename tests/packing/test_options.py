"""One list of options: what takes them by name has those of `PackOptions`, with the same defaults and types."""

import inspect
from dataclasses import MISSING, asdict, fields
from typing import get_args, get_type_hints

import pytest
from helpers import says

import treepack
from treepack.packing.options import BatchOptions, PackOptions

#: How the trees of a batch are cut.
CUT = {"cut": False, "max_ancestors": None}
OPTIONS = {each.name: each.default for each in fields(PackOptions)}
#: Arguments that are no options.
OTHERS = {"samples", "per_token", "per_sample", "self"}
#: Options that a way to pack has one value for.
WITHOUT = {"pack": set(), "Packer": {"placement"}}


def parameters(function):
    found = inspect.signature(function).parameters
    return {name: x.default for name, x in found.items() if name not in OTHERS}


def choices(hint):
    """The values of a Literal, or of one among other types."""
    return {x for part in (hint, *get_args(hint)) for x in get_args(part) if isinstance(x, str)}


@pytest.mark.parametrize(("name", "function"), [("pack", treepack.pack), ("Packer", treepack.Packer.__init__)])
def test_those_who_take_options_by_name(name, function):
    given = parameters(function)
    wanted = {option: default for option, default in OPTIONS.items() if option not in WITHOUT[name]}
    wanted |= CUT if name == "pack" else {}
    wanted = {option: inspect.Parameter.empty if x is MISSING else x for option, x in wanted.items()}
    assert list(given.items()) == list(wanted.items())
    hints = get_type_hints(function)
    for option, allowed in PackOptions.CHOICES.items():
        if option in given:
            assert choices(hints[option]) == set(allowed)


def test_offline_packing_has_these_and_its_own():
    offline = pytest.importorskip("treepack.offline.options", reason="offline packing needs pyarrow")
    by_name = offline.Options(max_tokens=8).for_manifest()
    assert list(by_name) == [*(x for x in OPTIONS if x != "ranks"), "window", "shard_tokens", "pairs"]
    assert all(by_name[x] == default for x, default in OPTIONS.items() if x not in ("max_tokens", "ranks"))
    with pytest.raises(TypeError, match="ranks"):
        offline.Options(max_tokens=8, ranks=2)


def test_the_command_line_has_all_of_offline_packing():
    pytest.importorskip("typer", reason="the command line needs typer")
    pytest.importorskip("rich", reason="the command line needs rich")
    from treepack.cli.pack_command import pack
    from treepack.offline.options import Options

    given = parameters(pack)
    for each in (each for each in fields(Options) if each.init and each.name != "max_tokens"):
        assert given[each.name] == each.default, each.name


def test_the_collator_has_some():
    pytest.importorskip("torch")
    from treepack.integrations.collator import DataCollatorForTreePacking

    given = {each.name: each.default for each in fields(DataCollatorForTreePacking)}
    shared = set(given) & set(OPTIONS)
    assert shared == {"max_tokens", "branching", "order", "pad_to_multiple_of"}
    assert all(given[name] == OPTIONS[name] for name in shared - {"max_tokens"})


def test_of_a_call():
    def call(max_tokens, order="first_seen", other=3):
        return PackOptions.of(locals())

    assert call(8) == PackOptions(max_tokens=8, order="first_seen")
    assert PackOptions(max_tokens=8).pack_keywords() == {**OPTIONS, "max_tokens": 8}


def test_of_a_batch():
    assert BatchOptions(max_tokens=8).pack_keywords() == {**OPTIONS, **CUT, "max_tokens": 8}
    assert BatchOptions(max_tokens=8, cut=True, max_ancestors=3).pack_keywords()["max_ancestors"] == 3
    for given, parts in (
        ({"max_ancestors": 5}, ("max_ancestors is 5", "cut=True")),
        ({"cut": True, "max_ancestors": 0}, ("max_ancestors is 0", "allowed is 1 or more")),
        ({"cut": True, "max_terms": 4}, ("max_terms is 4", "leave max_terms out")),
        ({"cut": True, "max_kept": 4}, ("max_kept is 4", "leave max_kept out")),
        ({"cut": True, "pad_to_multiple_of": 4}, ("pad_to_multiple_of is 4", "leave pad_to_multiple_of out")),
        ({"cut": True, "max_ancestors": 4, "overlong": "skip"}, ("overlong is 'skip'", "no sample is skipped")),
    ):
        with pytest.raises(treepack.PackError) as error:
            treepack.pack([{"input_ids": [1, 2]}], max_tokens=8, **given)
        says(error, *parts)
    with pytest.raises(TypeError, match="cut is 1; True or False"):
        BatchOptions(max_tokens=8, cut=1)


def test_what_is_not_allowed():
    for name, value in (("max_tokens", 0), ("ranks", 0), ("max_terms", -1), ("order", "last"), ("placement", "stream")):
        with pytest.raises(treepack.PackError) as error:
            PackOptions(**{"max_tokens": 8, name: value})
        says(error, name, repr(value), "allowed")
    for name, value in (("max_tokens", None), ("max_tokens", 1.5), ("ranks", True), ("vocab_size", "9")):
        with pytest.raises(TypeError, match=name):
            PackOptions(**{"max_tokens": 8, name: value})
    assert asdict(PackOptions(max_tokens=2**70))["max_tokens"] == 2**63
