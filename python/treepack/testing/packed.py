"""Check a packed result against the samples it was made from, with NumPy alone: for a test suite or a doubtful run.

    packed, samples -> nothing, or a PackError that names the tree, the sample and the first thing that differs

Nothing here calls the packer: paths are walked from the segments, terms are recounted from the masks, sharing is
compared with the keys of the tokens. O(raw tokens x log) time, a few arrays of the size of the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import PackError
from ..tree.packed import Packed
from .samples import as_array, as_samples

__all__ = ["check_packed", "sample_paths"]

Array = npt.NDArray[Any]


def check_packed(packed: Any, samples: Any, **pack_kwargs: Any) -> None:
    """Compare every tree with what its samples say.

    Args:
        packed: what `treepack.pack(samples, ...)` returned; it knows the arguments of that call.
        samples: what was packed: a list of dicts, a table, a padded or a flat batch.
        **pack_kwargs: arguments of the call that are to hold instead.

    Raises:
        PackError: a sample is lost, not rebuilt, sees other keys than its own past, lost a loss term, a column or a
            kept set, or a tree breaks a budget. The message names the first difference.

    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}]
    >>> check_packed(treepack.pack(samples, max_tokens=8), samples)
    """
    pack_kwargs = _arguments(packed) | pack_kwargs
    listed = as_samples(samples, pack_kwargs.get("per_token", ()), pack_kwargs.get("per_sample", ()))
    flat = [{name: as_array(value) for name, value in sample.items() if name != "group_id"} for sample in listed]
    start = np.cumsum([0] + [len(sample["input_ids"]) for sample in flat], dtype=np.int64)
    placed = [int(s) for tree in packed for s in tree.sample_index] + [x.sample for x in packed.skipped]
    _same("samples in trees and in `skipped`", np.sort(placed), np.arange(len(flat)))
    multiple = pack_kwargs.get("pad_to_multiple_of") or 1
    if len(packed) % (pack_kwargs.get("ranks") or 1):
        raise PackError(f"{len(packed)} trees are no multiple of ranks, {pack_kwargs['ranks']}")
    for t, tree in enumerate(packed):
        where = f"tree {t}"
        if pack_kwargs.get("cut"):
            _check_ranges(where, tree, pack_kwargs["max_tokens"], pack_kwargs.get("max_ancestors"))
        has = {"max_tokens": tree.num_tokens, "max_terms": len(tree.term_row), "max_kept": len(tree.sampling_mask)}
        for name, amount in has.items():
            if name == "max_tokens" and pack_kwargs.get("cut"):
                continue  # of a range
            if pack_kwargs.get(name) is not None and amount > pack_kwargs[name]:
                raise PackError(f"{where}: {amount} break {name}, {pack_kwargs[name]} are allowed")
        # A tree without samples keeps the number of trees of all ranks the same; it has positions, all of them padding.
        real = max(int(tree.cu_segments[-1]), 0 if len(tree.sample_index) else 1)
        if tree.num_tokens != -(-real // multiple) * multiple:
            raise PackError(f"{where}: {tree.num_tokens} tokens, {real} padded to {multiple} expected")
        paths = sample_paths(tree)
        _check_mask(where, tree)
        _check_sharing(where, tree, paths, flat, start, pack_kwargs.get("branching") == "label")
        _check_terms(where, tree, paths, flat, start)
        _check_rows(where, tree, flat)


def _arguments(packed: Any) -> dict[str, Any]:
    """The arguments of the call that made it, where it knows them."""
    if not isinstance(packed, Packed):
        return {}
    named = {"per_token": packed.per_token, "per_sample": packed.per_sample}
    return {**packed.options.pack_keywords(), **named}


def sample_paths(tree: Any) -> list[Array]:
    """The packed index of every token of every sample, walked from its last segment up to the root."""
    out = []
    for last in tree.sample_last_segment:
        runs, segment = [], int(last)
        while segment >= 0:
            runs.append(np.arange(tree.cu_segments[segment], tree.cu_segments[segment + 1]))
            segment = int(tree.segment_parent[segment])
        out.append(np.concatenate(runs[::-1]))
    return out


def _check_ranges(where: str, tree: Any, max_tokens: int, max_ancestors: int | None) -> None:
    """Ranges follow each other over all rows, within their budgets, each with what lies above its first row."""
    boundaries = [0]
    for number, (start, stop, ancestors) in enumerate(tree.ranges):
        above, row = [], int(tree.parent[start])
        while row >= 0:
            above.append(row)
            row = int(tree.parent[row])
        _same(f"{where}, range {number}: ancestors", ancestors, np.array(above[::-1], np.int64))
        for name, has, most in (
            ("rows", stop - start, max_tokens),
            ("ancestors", len(above), len(above) if max_ancestors is None else max_ancestors),
        ):
            if has > most:
                raise PackError(f"{where}, range {number}: {has} {name}, {most} are allowed")
        if start != boundaries[-1] or stop <= start:
            raise PackError(f"{where}: range {number} is [{start}, {stop}) after one that ends at {boundaries[-1]}")
        boundaries.append(stop)
    _same(f"{where}: boundaries of the ranges", tree.cu_ranges, np.array(boundaries))
    _same(f"{where}: rows in ranges", np.array(boundaries[-1]), np.array(tree.num_tokens))


def _check_mask(where: str, tree: Any) -> None:
    """Nested subtrees and depth + 1 visible keys together say that a query sees its ancestors and itself."""
    k, end, n = np.arange(tree.num_tokens), tree.subtree_end, tree.num_tokens
    opened = np.bincount(k, minlength=n + 1) - np.bincount(end, minlength=n + 1)
    depth = np.where(k < tree.cu_segments[-1], tree.position_ids + 1, 0)
    _same(f"{where}: number of visible keys", np.cumsum(opened)[:n], depth)
    below = np.flatnonzero(tree.parent >= 0)
    over = tree.parent[below]
    nested = (over < below) & (below < end[over]) & (end[below] <= end[over]) & (depth[below] == depth[over] + 1)
    _same(f"{where}: subtrees within their parent's", nested, np.ones_like(nested))


def _check_sharing(where: str, tree: Any, paths: list[Any], flat: list[Any], start: Array, label: bool) -> None:
    """Samples pass through positions of their own token and identity, and no two children of a node are alike."""
    real = int(tree.cu_segments[-1])
    source = tree.position_source[:real]
    owner = np.searchsorted(start, source, side="right") - 1
    keys = np.zeros((real, 0), np.int64)
    for s, path in zip(tree.sample_index, paths, strict=True):
        ids = flat[s]["input_ids"].astype(np.int64)
        same = partial(_same, sample=int(s), called=f"{where}, sample {{}}")
        same("input_ids", tree.input_ids[path], ids)
        same("position_ids", tree.position_ids[path], np.arange(len(ids)))
        same("parent", tree.parent[path], np.append(-1, path[:-1]))
        identity = flat[s].get("identity", np.zeros((len(ids), 0))).reshape(len(ids), -1).astype(np.int64)
        mine = np.column_stack([ids, np.append(ids[1:], -1) if label else np.zeros(len(ids), np.int64), identity])
        keys = keys if keys.shape[1] else np.zeros((real, mine.shape[1]), np.int64)
        owned = np.flatnonzero(owner[path] == s)
        same("position_source", source[path[owned]], start[s] + owned)
        keys[path[owned]] = mine[owned]
        same("token, next token, identity against its position", mine, keys[path])
    through = np.bincount(np.concatenate([*paths, np.zeros(0, np.int64)]), minlength=real)
    _same(f"{where}: position_samples", tree.position_samples[:real], through)
    if len(np.unique(np.column_stack([tree.parent[:real], keys]), axis=0)) < real:
        raise PackError(f"{where}: two children of one position have the same key, so their prefix is not shared")


def _check_terms(where: str, tree: Any, paths: list[Any], flat: list[Any], start: Array) -> None:
    """Every trained token that has a predecessor is a term, scored at that predecessor, and brings its columns."""
    labels = np.full(tree.num_tokens, -100, np.int64)
    for j, (s, path) in enumerate(zip(tree.sample_index, paths, strict=True)):
        here = slice(tree.cu_terms[j], tree.cu_terms[j + 1])
        target, same = _targets(flat[s]), partial(_same, sample=int(s), called=f"{where}, sample {{}}")
        same("term_source", tree.term_source[here], start[s] + target)
        same("term_target", tree.term_target[here], flat[s]["input_ids"][target])
        same("term_sample", tree.term_sample[here], np.full(len(target), j))
        same("predicting positions", tree.row_position[tree.term_row[here]], path[target - 1])
        labels[path[target - 1]] = flat[s]["input_ids"][target]
        for name in (name for name in tree.terms if name in flat[s]):
            value = flat[s][name].astype(tree.terms[name].dtype)
            wanted = value[target] if value.ndim else np.full(len(target), value)
            same(f"terms[{name!r}]", tree.terms[name][here], wanted)
    if getattr(tree, "shift_labels", None) is not None:
        _same(f"{where}: shift_labels", tree.shift_labels, labels)


def _check_rows(where: str, tree: Any, flat: list[Any]) -> None:
    """Rows are distinct, in order, and carry the set that each of their terms brings."""
    cu = np.append(0, np.cumsum(tree.sampling_mask_counts, dtype=np.int64))
    sets = [frozenset(tree.sampling_mask[a:b].tolist()) for a, b in itertools.pairwise(cu)]
    used, first = np.unique(tree.term_row, return_index=True)
    _same(f"{where}: rows that have a term", used, np.arange(len(sets)))
    _same(f"{where}: order of rows", np.lexsort((first, tree.row_position)), used)
    if len(set(zip(tree.row_position.tolist(), sets, strict=True))) < len(sets):
        raise PackError(f"{where}: two rows have the same position and the same set")
    for j, s in enumerate(tree.sample_index):
        counts = flat[s].get("sampling_mask_counts", np.zeros(len(flat[s]["input_ids"]), np.int64)).astype(np.int64)
        end, target = np.cumsum(counts), _targets(flat[s])
        for i, row in zip(target, tree.term_row[tree.cu_terms[j] : tree.cu_terms[j + 1]], strict=True):
            wanted = flat[s]["sampling_mask"][end[i] - counts[i] : end[i]].tolist() if counts[i] else []
            if sets[row] != frozenset(wanted):
                text, called = f"its row keeps {sorted(sets[row])}, not {wanted}", f"{where}, sample {{}}"
                raise PackError(text, sample=int(s), token=int(i), called=called)


def _targets(sample: Mapping[str, Array]) -> Array:
    """Indexes of the trained tokens that have a predecessor."""
    trained = np.flatnonzero(sample.get("completion_mask", np.ones(len(sample["input_ids"]))))
    return trained[trained > 0]


def _same(what: str, got: Array, wanted: Array, **sample: Any) -> None:
    """Equal shapes and values (NaN equals NaN), or a PackError (of a sample) with the first difference."""
    if got.shape != wanted.shape:
        raise PackError(f"{what}: shape {got.shape}, expected {wanted.shape}", **sample)
    differ = np.argwhere((got != wanted) & ((got == got) | (wanted == wanted)))
    if len(differ):
        at = tuple(differ[0])
        text = f"{what}: {got[at]} at {[int(i) for i in at]}, expected {wanted[at]}; {len(differ)} differ"
        raise PackError(text, **sample)
