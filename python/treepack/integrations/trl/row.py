"""TreeRow: the samples of one rank under TRL's names, packed by treepack.

TRL asks a row after each sample what it would hold (`fits`, `load`), and for its arrays once (`pack`). The questions
need one number, how long a prefix the row has already, which a small trie of runs answers in O(L); the arrays come from
`treepack.pack`. Neither touches a token from Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._core import PackError
from ...packing import pack
from ...tree.tree import HostTree

__all__ = ["TreeRow"]

Array = npt.NDArray[Any]
Columns = dict[str, Array]

KEPT, COUNTS = "sampling_mask", "sampling_mask_counts"
_TAKEN = frozenset(
    ["input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics", KEPT, COUNTS, "identity"]
)


class TreeRow:
    """One rank's forward, as `trl.experimental.async_grpo.packing.TreeRow` of TRL 1.16.0 has it.

    A sample is a dict of `input_ids` (L,), `completion_mask` (L,), `old_log_probs` (L,), `advantage`, `group_id`, with
    NumPy arrays or torch tensors. It may also bring what the sampler recorded for each token: `sampling_mask` (flat
    ids) with `sampling_mask_counts` (L,), and tables, which are all other arrays of shape (L, K, ...). Samples that
    were trained on the same token with other sets or other tables then do not share the position that predicts it.

    Attributes:
        samples: the dicts, in order. groups: their `group_id`s. trained: the sum of their masks; a mask of 1 on token 0
            counts, although it is no loss term.
        tokens: the token of each position, in order of arrival. load: query-key pairs of attention, the sum of
            depth + 1 over positions.
        extras: {name: (row shape, dtype)} of the columns beyond TRL's that `pack` gives.
    """

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.groups: set[Any] = set()
        self.trained = 0
        self.extras: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._columns: list[Columns] = []
        self._runs = _Runs()
        self._novel: list[Array] = []  # what each sample added to the tokens
        self._size = 0
        self._load = 0
        self._exact: tuple[int, int, Array] | None = None  # size, load and tokens of a row with extras

    @property
    def tokens(self) -> Sequence[int]:
        if not self.extras:
            return _Tokens(self._novel, self._size)
        size, _, tokens = self._measured()
        return _Tokens([tokens], size)

    @property
    def load(self) -> int:
        return self._measured()[1] if self.extras else self._load

    def fits(self, sample: Mapping[str, Any], budget: int) -> bool:
        """Whether the row with `sample` stays within `budget` positions and `budget` trained tokens.

        Raises PackError for a sample without tokens.
        """
        if self.trained + int(sample["completion_mask"].sum()) > budget:
            return False
        number = len(self.samples)
        ids = _ids(sample, number)
        if self._size + len(ids) - self._runs.shared(ids) > budget:
            return False
        extras = {**self.extras, **_extras(sample, number)}
        if not extras or len(self.tokens) + len(ids) <= budget:
            return True
        return _native([*self._columns, _columns(sample, number)], extras).num_tokens <= budget

    def add(self, sample: dict[str, Any]) -> None:
        """Take a sample. Raises PackError where a table has other rows than one of the same name before it,
        and as `fits` does."""
        number = len(self.samples)
        extras = _extras(sample, number)
        for name, row in extras.items():
            if (before := self.extras.get(name, row)) != row:
                raise _refused(number, f"{name} has rows of {row}; samples before it have {before}")
        columns = _columns(sample, number)
        ids = columns["input_ids"]
        shared = self._runs.insert(ids)
        if shared < len(ids):
            self._novel.append(ids[shared:])
        self._size += len(ids) - shared
        self._load += (len(ids) * (len(ids) + 1) - shared * (shared + 1)) // 2
        self.extras |= extras
        self._exact = None
        self._columns.append(columns)
        self.samples.append(sample)
        self.groups.add(sample["group_id"])
        self.trained += int(sample["completion_mask"].sum())

    def pack(self) -> dict[str, Tensor]:
        """The row as tensors, of N positions, S segments, M loss terms and K gathered keys.

        Returns:
            int64 (N,): `input_ids`, `position_ids`, `shift_labels`. `tree_kv_index` int64 (K,), `tree_cu_seqlens_q`,
            `tree_cu_seqlens_k` int32 (S + 1,), `tree_max_seqlens` int64 (2,): see `PackedTree.varlen_index`. (M,):
            `token_index` int64, the position that predicts the term, `old_log_probs`, `advantages` float32,
            `segment_id` int64, the sample. With kept sets `sampling_mask_counts` int32 (N,), the number of ids kept for
            what the position predicts (0 = none recorded), and `sampling_mask` int32, the ids end to end. Each table:
            (N, K, ...), the row recorded for what the position predicts, 0 where that is not trained.

        Raises:
            PackError: the row is empty, or a sample cannot be packed (which one, what it has, what is allowed).
        """
        if not self._size:
            raise PackError("the row holds no token: every rank needs a sample")
        tree = _native(self._columns, self.extras)
        index = tree.varlen_index()
        samples = tree.term_sample.astype(np.int64)
        token_index = tree.row_position[tree.term_row].astype(np.int64)
        advantages = np.array([float(sample["advantage"]) for sample in self.samples], np.float32)
        out = {
            "input_ids": tree.input_ids,
            "position_ids": tree.position_ids,
            "shift_labels": tree.shift_labels,
            "tree_kv_index": index.kv_index,
            "tree_cu_seqlens_q": index.cu_seqlens_q,
            "tree_cu_seqlens_k": index.cu_seqlens_k,
            "tree_max_seqlens": np.array([index.max_seqlen_q, index.max_seqlen_k], np.int64),
            "token_index": token_index,
            "old_log_probs": tree.terms["old_log_probs"],
            "advantages": advantages[samples],
            "segment_id": samples,
        }
        for name, (shape, dtype) in self.extras.items():
            if name == KEPT:
                out[KEPT] = tree.sampling_mask
            else:
                out[name] = np.zeros((tree.num_tokens, *shape), dtype)
                if name == COUNTS:
                    out[name][tree.row_position] = tree.sampling_mask_counts
                elif name in tree.terms:
                    out[name][token_index] = tree.terms[name]
        return {name: torch.from_numpy(array) for name, array in out.items()}

    def _measured(self) -> tuple[int, int, Array]:
        if not self._columns:
            return 0, 0, np.zeros(0, np.int64)
        if self._exact is None:
            tree = _native(self._columns, self.extras)
            load = int(tree.position_ids.sum()) + tree.num_tokens
            self._exact = tree.num_tokens, load, tree.input_ids[np.argsort(tree.position_source)]
        return self._exact


# --- a sample -------------------------------------------------------------------------------------------------------


def _array(value: Any, dtype: Any = None) -> Array:
    if isinstance(value, Tensor):
        value = value.detach()
        value = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    return np.ascontiguousarray(value, dtype)


def _refused(number: int, detail: str) -> PackError:
    return PackError(detail, sample=number, called="sample {} of the row")


def _ids(sample: Mapping[str, Any], number: int) -> Array:
    ids = _array(sample["input_ids"], np.int64)
    if ids.ndim != 1 or not len(ids):
        raise _refused(number, f"input_ids has shape {ids.shape}; one axis with at least one token is needed")
    return ids


def _columns(sample: Mapping[str, Any], number: int) -> Columns:
    """The arrays of a sample as `treepack.pack` borrows them."""
    columns = {
        "input_ids": _ids(sample, number),
        "completion_mask": (_array(sample["completion_mask"]) != 0).view(np.uint8),
        "old_log_probs": _array(sample["old_log_probs"], np.float32),
    }
    extras = _extras(sample, number)
    return columns | {name: _array(sample[name], np.int32 if name in (KEPT, COUNTS) else None) for name in extras}


def _extras(sample: Mapping[str, Any], number: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Row shape and dtype of what a sample brings beyond TRL's own columns."""
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    if (sample.get(KEPT) is None) != (sample.get(COUNTS) is None):
        raise _refused(number, f"it has one of {KEPT} and {COUNTS}; kept sets need both")
    if sample.get(KEPT) is not None:
        found[KEPT] = found[COUNTS] = (), np.dtype(np.int32)
    for name, value in sample.items():
        if name not in _TAKEN and getattr(value, "ndim", 0) > 1 and len(value) == len(sample["input_ids"]):
            array = _array(value)
            found[name] = array.shape[1:], array.dtype
    return found


# --- all samples of a row -------------------------------------------------------------------------------------------


def _native(samples: list[Columns], extras: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> HostTree:
    """One tree of all samples, in TRL's branching and order, in which a position has one kept set and one table."""
    tables = {name: row for name, row in extras.items() if name not in (KEPT, COUNTS)}
    if tables:
        samples = [
            columns
            | {
                name: np.zeros((len(columns["input_ids"]), *shape), dtype)
                for name, (shape, dtype) in tables.items()
                if name not in columns
            }
            for columns in samples
        ]
    tree = _one(samples)
    if extras and (codes := _disagreements(tree, tables)) is not None:
        cuts = np.cumsum([len(columns["input_ids"]) for columns in samples])[:-1]
        parts = np.split(codes, cuts)
        tree = _one([columns | {"identity": part} for columns, part in zip(samples, parts, strict=True)])
    return tree


def _one(samples: list[Columns]) -> HostTree:
    tokens = sum(len(columns["input_ids"]) for columns in samples)
    packed = pack(
        samples, max_tokens=max(tokens, 1), branching="label", order="first_seen", placement="first_fit"
    )  # all fit the first tree, so that placement has nothing to look for
    return packed[0]


def _disagreements(tree: HostTree, tables: Mapping[str, Any]) -> Array | None:
    """An identity (raw tokens,) that keeps terms with other kept sets or tables apart; None where all agree.

    Where the terms of a position disagree, each gets the number of its set and tables. A sample that passes without a
    term there goes with the first that has one, so that a history shares with the turn that it was sampled in.
    """
    position = tree.row_position[tree.term_row]
    code = tree.term_row.astype(np.int64)  # equal for equal position and kept set
    for name in tables:
        values = np.ascontiguousarray(tree.terms[name])
        if values.size:
            lines = values.reshape(len(values), -1).view(np.uint8).reshape(len(values), -1)
            _, number = np.unique(lines.view(f"V{lines.shape[1]}").ravel(), return_inverse=True)
            _, code = np.unique(code * (int(number.max()) + 1) + number, return_inverse=True)
    at, first = np.unique(position, return_index=True)
    usual = np.zeros(tree.num_tokens, np.int64)
    usual[at] = code[first] + 1
    if np.array_equal(usual[position], code + 1):
        return None
    codes: Array = usual[np.concatenate(tree.path_index())]
    codes[tree.term_source - 1] = code + 1  # the position that predicts a term is that of the token before it
    return codes


# --- prefixes -------------------------------------------------------------------------------------------------------


class _Run:
    """`ids[start:end]`, and what follows it by first token."""

    __slots__ = ("children", "end", "ids", "start")

    def __init__(self, ids: Array, start: int, end: int):
        self.ids, self.start, self.end = ids, start, end
        self.children: dict[int, _Run] = {}


class _Runs:
    """How many tokens of a sample a row has already, under label branching.

    Samples are kept with an end mark, -1, in a compressed trie. A position belongs to its token and the next one, so of
    the tokens that agree, mark included, the last is not shared.
    """

    def __init__(self) -> None:
        self._root: dict[int, _Run] = {}

    def shared(self, ids: Array) -> int:
        return max(self._walk(_marked(ids))[0] - 1, 0)

    def insert(self, ids: Array) -> int:
        """`shared`, and keep `ids` from now on."""
        ids = _marked(ids)
        agree, run, siblings = self._walk(ids)
        if agree < len(ids):
            if run is not None and agree < run.end:
                rest = _Run(run.ids, agree, run.end)
                rest.children = run.children
                run.end, run.children = agree, {int(run.ids[agree]): rest}
                siblings = run.children
            siblings[int(ids[agree])] = _Run(ids, agree, len(ids))
        return max(agree - 1, 0)

    def _walk(self, ids: Array) -> tuple[int, _Run | None, dict[int, _Run]]:
        """(number of tokens that agree, the run in which they end, what follows that run)."""
        at, run, siblings = 0, None, self._root
        while at < len(ids):
            below = siblings.get(int(ids[at]))
            if below is None:
                break
            run, siblings = below, below.children
            stop = min(run.end, len(ids))
            differs = run.ids[at:stop] != ids[at:stop]
            first = int(differs.argmax())
            if differs[first]:
                return at + first, run, siblings
            at = stop
            if at < run.end:
                break
        return at, run, siblings


def _marked(ids: Array) -> Array:
    return np.append(ids, -1)


class _Tokens(Sequence[int]):
    """Parts as one list of ints, made when it is read; its length is free."""

    def __init__(self, parts: list[Array], size: int):
        self._parts, self._size = list(parts), size
        self._list: list[int] | None = None

    def _all(self) -> list[int]:
        if self._list is None:
            self._list = [token for part in self._parts for token in part.tolist()]
        return self._list

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())
