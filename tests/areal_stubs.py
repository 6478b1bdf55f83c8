"""AReaL's `models/tree_attn` alone: its files from an installed or unpacked wheel, over stand-ins for what they import.

The rest of AReaL needs dozens of packages. The wheel is looked for in the folder that TREEPACK_AREAL names, in
`areal/` of the environment (where `make test` puts it: `pip install --no-deps --target`), then on the path.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

#: Everything that was given to `areal.utils.stats_tracker.scalar`.
SCALARS: list[dict] = []


def folder():
    """The package folder `areal`, or None."""
    named = os.environ.get("TREEPACK_AREAL")
    places = [Path(named)] if named else [Path(sys.prefix) / "areal"]
    found = [place / "areal" for place in places] + places
    spec = None if named or "areal" in sys.modules else importlib.util.find_spec("areal")  # finds it, runs nothing
    found += [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return next((place for place in found if (place / "models" / "tree_attn" / "tree.py").is_file()), None)


class Fields:
    """Stands for AReaL's dataclasses MicroBatchSpec and MicroBatchList: what it is given, by name."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def __len__(self):
        return len(self.mbs)


class Spec(Fields):
    """MicroBatchSpec with the defaults that tree packing reads."""

    def __init__(self, max_tokens_per_mb=None, n_mbs=1, granularity=1, n_mbs_divisor=1):
        fields = {"n_mbs": n_mbs, "granularity": granularity, "n_mbs_divisor": n_mbs_divisor}
        super().__init__(max_tokens_per_mb=max_tokens_per_mb, **fields)


def load(block_size=8):
    """AReaL's own modules `tree`, `functional`, `module_fsdp` and `triton_kernel` over the stand-ins; once a process.

    block_size: budgets are multiples of it. AReaL's default of 128 would take long samples to fill more than one tree.

    Raises:
        ImportError: AReaL is not found.
    """
    place = folder() if "areal" not in sys.modules else None
    if "areal" not in sys.modules:
        if place is None:
            raise ImportError("no areal: set TREEPACK_AREAL to a folder with the unpacked wheel, or see make test")
        os.environ["AREAL_FLEX_ATTENTION_BLOCK_SIZE"] = str(block_size)
        _stand_ins(place)
    names = ("tree", "functional", "module_fsdp", "triton_kernel")
    return SimpleNamespace(**{name: importlib.import_module(f"areal.models.tree_attn.{name}") for name in names})


def loaded():
    """`load()`, or a skip of the whole test file with the reason."""
    try:
        return load()
    except ImportError as error:
        pytest.skip(f"AReaL 1.0.4 is not here: {error}", allow_module_level=True)


def _stand_ins(place):
    def module(name, path=None, **members):
        made = ModuleType(name)
        if path is not None:
            made.__path__ = [str(path)]
        vars(made).update(members)
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)

    module("areal", place, __version__="1.0.4")
    module("areal.api", [])
    module("areal.api.cli_args", MicroBatchSpec=Spec)
    module("areal.infra", [])
    module("areal.infra.platforms", is_npu_available=True)  # where torch.compile is not used
    module("areal.models", place / "models")
    module("areal.utils", [])
    module("areal.utils.data", MicroBatchList=Fields)
    module("areal.utils.logging", getLogger=logging.getLogger)
    module("areal.utils.stats_tracker", scalar=lambda **value: SCALARS.append(value))
    module(
        "areal.utils.perf_tracer",
        trace_perf=lambda _: lambda function: function,
        trace_scope=lambda _: contextlib.nullcontext(),
    )
    module("areal.utils.functional", place / "utils" / "functional")  # vocab_parallel is AReaL's own


# ------------------------------------------------------------------------------------------------------- batches


def padded(samples, side="right", **columns):
    """A batch as AReaL has it: `samples` (lists of ids) padded with 7, a packable mask and log-probs, and what is not
    packable. `side` is right, left or, for holes between tokens, a number that seeds where they are."""
    rng = np.random.default_rng(side if isinstance(side, int) else 0)
    width = max(map(len, samples)) + (side != "right")
    ids = torch.full((len(samples), width), 7)
    mask = torch.zeros(len(samples), width, dtype=torch.int64)
    values = torch.full((len(samples), width), float("nan"))
    for row, sample in enumerate(samples):
        count = len(sample)
        at = {"right": np.arange(count), "left": np.arange(width - count, width)}.get(side)
        if at is None:
            at = np.sort(rng.permutation(width)[:count])
        ids[row, at] = torch.tensor(sample, dtype=torch.int64)
        mask[row, at] = 1
        values[row, at] = torch.arange(count) + 100.0 * row
    batch = {"input_ids": ids, "attention_mask": mask, "logprobs": values, "loss_mask": (values % 2 > 0).int()}
    rewards = torch.arange(len(samples)) / 4
    return batch | {"rewards": rewards, "wide": values[..., None], "names": ["x"] * len(samples)} | columns


def positions(trie):
    """For each sequence the packed positions of its tokens."""
    spans = {sequence: trie.get_sequence_tree_indices(sequence) for sequence in trie.all_sequence_ids}
    return {name: torch.cat([torch.arange(a, b + 1) for a, b in ranges]) for name, ranges in spans.items()}


def same_place(theirs, ours, size):
    """(size,) int64: where each position of their trie is in ours; padding stays where it is."""
    place = torch.arange(size)
    here = positions(ours)
    for sequence, there in positions(theirs).items():
        place[there] = here[sequence]
    assert sorted(place.tolist()) == list(range(size))
    return place


# --------------------------------------------------------------------------------------------------------- ranks

MAX_TOKENS = 8
#: Samples of each rank: three trees, and one.
RANKS = [[[1, 2, 3, 4, 5, 6], [2, 2, 3, 4, 5, 6], [1, 3, 3, 4, 5, 6]], [[1, 2]]]


def rank(number, store):
    """One rank of a gloo job: its micro-batches by AReaL and by treepack, saved as `<number>.pt` beside `store`."""
    import torch.distributed as dist

    from treepack.integrations import areal

    torch.set_num_threads(1)
    theirs = load().tree.build_packed_tree_batch
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=len(RANKS))
    try:
        data = padded(RANKS[number])
        found = []
        for build in (theirs, areal.build_packed_tree_batch):
            batch = build(data, Spec(MAX_TOKENS), dp_group=dist.group.WORLD)
            figures = {name: vars(batch)[name] for name in ("group_lens", "padding_lengths", "padded_to_lengths")}
            figures["sequences"] = [mb["trie_node"].all_sequence_ids for mb in batch.mbs]
            names = ("input_ids", "position_ids", "logprobs")
            figures["dummies"] = [
                {name: mb[name] for name in names} for mb in batch.mbs if not mb["trie_node"].all_sequence_ids
            ]
            found.append(figures)
        torch.save(found, Path(store).parent / f"{number}.pt")
    finally:
        dist.destroy_process_group()
