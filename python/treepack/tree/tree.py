"""PackedTree: the arrays of a tree, per-sample values back, the way to a device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import ALIGN, ARRAYS, TILE_SIZES, PackError
from . import segments
from .columns import Arrays, Columns
from .device import copied, load_torch, spread, to_stay, torch_dtype
from .ranges import InRanges

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeVar  # a type checker knows it; nothing is installed for it

    from ..inputs.columns import Format

    #: What the arrays of a tree are: NumPy arrays on the host, torch tensors after `.to(device)`.
    Array = TypeVar("Array", default=Any)
    Values = TypeVar("Values")
else:
    from typing import TypeVar

    Array = TypeVar("Array")

#: dtypes of the arrays beside the gathered columns, those of the tile lists among them.
_DTYPES = {name: np.dtype(dtype) for name, dtype, *_ in ARRAYS} | {
    f"tiles{size}.{part}": np.dtype(np.int32) for size in TILE_SIZES for part in ("rows", "items")
}


class PackedTree(InRanges, Generic[Array]):
    """One packed tree: a forest of prefix trees in one row of a model.

    N positions (padding included), S segments, n samples, R rows, M loss terms, T kept ids. Arrays are NumPy views of
    `buffer`; after `.to(device)` they are torch tensors of the same names and dtypes. For type checkers the tree of
    `pack` is a `PackedTree[numpy.typing.NDArray[Any]]`, that of `.to` a `PackedTree[torch.Tensor]`.
    """

    def __init__(
        self,
        buffer: Array,
        fields: Mapping[str, tuple[int, int]],
        formats: Mapping[str, Format],
        disagreements: Mapping[str, tuple[int, int, int]],
    ):
        self.buffer = buffer
        """uint8 (nbytes,): the one buffer that all arrays are views of."""
        self._fields = fields
        self._formats = formats
        self._disagreements = disagreements
        self._views: dict[str, Any] = {}
        self._cuts: Any = None
        self._origin: HostTree | None = None  # of a tree on a device: the one on the host that it came from
        self.derived: dict[str, Any] = {}
        """What others made of this tree and keep with it (attention: its metadata); neither moved nor pickled."""

    # --- positions ---

    @property
    def input_ids(self) -> Array:
        """(N,) int64: packed tokens."""
        return self._array("input_ids")

    @property
    def position_ids(self) -> Array:
        """(N,) int64: depth, which is the index in the sample; what RoPE needs."""
        return self._array("position_ids")

    @property
    def parent(self) -> Array:
        """(N,) int32: packed index of the previous token, -1 at a root."""
        return self._array("parent")

    @property
    def subtree_end(self) -> Array:
        """(N,) int32: one past the last descendant. Query q sees key k exactly if k <= q < subtree_end[k]."""
        return self._array("subtree_end")

    @property
    def position_source(self) -> Array:
        """(N,) int32: index into the flat input of this token in the first-arrived sample of this tree that has it; -1
        at padding."""
        return self._array("position_source")

    @property
    def position_samples(self) -> Array:
        """(N,) int32: number of samples that pass through the position; 0 at padding."""
        return self._array("position_samples")

    @property
    def shift_labels(self) -> Array:
        """(N,) int64: the next token where it is trained in any sample, else -100. Label branching only."""
        if "shift_labels" not in self._fields:
            raise AttributeError(
                "shift_labels needs branching='label'; with 'token' a position at a fork has several next tokens"
            )
        return self._array("shift_labels")

    # --- segments and samples ---

    @property
    def cu_segments(self) -> Array:
        """(S + 1,) int32: segment boundaries. A segment is an unbranched run; it ends at forks and ends of samples."""
        return self._array("cu_segments")

    @property
    def segment_parent(self) -> Array:
        """(S,) int32: parent segment, -1 at a root."""
        return self._array("segment_parent")

    @property
    def sample_index(self) -> Array:
        """(n,) int32: which input samples are in this tree, in order of arrival."""
        return self._array("sample_index")

    @property
    def sample_last_segment(self) -> Array:
        """(n,) int32: the segment at which each sample ends; its path from a root is the sample."""
        return self._array("sample_last_segment")

    # --- rows and terms ---

    @property
    def row_position(self) -> Array:
        """(R,) int32: position of each row. A row is a distinct (position, kept set) whose log-probs are needed."""
        return self._array("row_position")

    @property
    def term_row(self) -> Array:
        """(M,) int32: row of each loss term; terms go sample by sample in arrival order, in a sample in token order."""
        return self._array("term_row")

    @property
    def term_target(self) -> Array:
        """(M,) int32: target token of each term."""
        return self._array("term_target")

    @property
    def term_sample(self) -> Array:
        """(M,) int32: sample of each term, as place in `sample_index`."""
        return self._array("term_sample")

    @property
    def term_source(self) -> Array:
        """(M,) int32: index into the flat input of the target token of each term."""
        return self._array("term_source")

    @property
    def cu_terms(self) -> Array:
        """(n + 1,) int32: boundaries of the terms of each sample."""
        return self._array("cu_terms")

    @property
    def sampling_mask(self) -> Array:
        """(T,) int32: kept token ids of each row, end to end."""
        return self._array("sampling_mask") if "sampling_mask" in self._fields else self._zeros("sampling_mask", 0)

    @property
    def sampling_mask_counts(self) -> Array:
        """(R,) int32: number of kept ids of each row; 0 = no set, the full vocabulary."""
        if "sampling_mask_counts" in self._fields:
            return self._array("sampling_mask_counts")
        return self._zeros("sampling_mask_counts", self._fields["row_position"][1])

    def sampling_mask_table(self, width: int | None = None, *, dtype: Any = None) -> Tensor:
        """The kept sets as one padded table, (R, width) torch int64 (or `dtype`), -1 after the ids of each row; made
        on the device of this tree. `width` defaults to the widest set. A row of -1 alone has no set."""
        from .kept_sets import kept_set_table

        torch = load_torch()
        with to_stay():
            ids, counts = torch.as_tensor(self.sampling_mask), torch.as_tensor(self.sampling_mask_counts)
            return kept_set_table(ids, counts, width, dtype=dtype or torch.int64)

    # --- columns ---

    @property
    def terms(self) -> Mapping[str, Array]:
        """Columns per loss term, (M, ...): per-token columns at the target token, per-sample columns repeated (but for
        `group_id`, which only `samples` has)."""
        return Columns("terms", self.arrays, self._disagreements)

    @property
    def samples(self) -> Mapping[str, Array]:
        """Per-sample columns, (n,), in the order of `sample_index`."""
        return Columns("samples", self.arrays, self._disagreements)

    @property
    def positions(self) -> Mapping[str, Array]:
        """Per-token columns per position, (N, ...), 0 at padding. PackError where samples that share one disagree."""
        return Columns("positions", self.arrays, self._disagreements)

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Every array by its full name, in the order of the buffer: "input_ids", ..., "terms.advantage"."""
        return Arrays(self._fields, self._array)

    @property
    def column_formats(self) -> Mapping[str, Format]:
        """(dtype, shape of a row) of every column, by its name."""
        return self._formats

    @property
    def disagreements(self) -> Mapping[str, tuple[int, int, int]]:
        """The per-token columns that have no value per position, and where: (sample, other sample, token) of one pair
        of samples that share a position and differ there."""
        return self._disagreements

    # --- back to samples ---

    @property
    def num_tokens(self) -> int:
        """N, padding included."""
        return self._fields["input_ids"][1]

    @property
    def num_samples(self) -> int:
        """n; 0 for a dummy."""
        return self._fields["sample_index"][1]

    @property
    def num_terms(self) -> int:
        """M."""
        return self._fields["term_row"][1]

    def path_index(self) -> list[Array]:
        """For each sample the packed index of each of its tokens, int32 (L,)."""
        host = self.numpy()
        index = segments.path_index(host.cu_segments, host.segment_parent, host.sample_last_segment)
        return [self._like_buffer(path) for path in index]

    def unpack(self, values: Values) -> list[Values]:
        """(N, ...) -> one array or tensor (L, ...) per sample. Differentiable for torch."""
        rows: Any = self._checked_rows(values, self.num_tokens, "positions")
        paths: list[Any]
        if isinstance(rows, np.ndarray):
            paths = self.numpy().path_index()
        else:
            torch = load_torch()
            paths = [torch.as_tensor(path, device=rows.device).long() for path in self.path_index()]
        return cast("list[Values]", [rows[path] for path in paths])

    def unpack_terms(self, values: Values, *, fill: float | None = None) -> list[Values]:
        """(M, ...) -> one array or tensor per sample, with a row for each of its terms. With `fill` a row for each of
        its tokens, as in `old_log_probs`, and `fill` where none is trained. Differentiable for torch."""
        rows: Any = self._checked_rows(values, self.num_terms, "terms")
        host = self.numpy()
        parts = [rows[start:end] for start, end in pairwise(host.cu_terms.tolist())]
        if fill is None:
            return parts
        return [spread(part, *at, fill) for part, at in zip(parts, segments.term_tokens(host), strict=True)]

    def attention_mask(self) -> Array:
        """Dense mask, bool (N, N): [q, k] is true where query q sees key k. For tests and for looking."""
        return self._like_buffer(segments.attention_mask(self.numpy().subtree_end))

    def varlen_index(self) -> segments.VarlenIndex:
        """The tree for variable-length attention with gathered keys: every segment is a sequence of queries, and its
        keys are the positions of its path from a root. Costs the sum of path lengths, `tree_attention` does not."""
        host = self.numpy()
        kv_index, cu_q, cu_k, max_q, max_k = segments.varlen_index(host.cu_segments, host.segment_parent)
        like = self._like_buffer
        return segments.VarlenIndex(like(kv_index), like(cu_q), like(cu_k), max_q, max_k)

    # --- device ---

    @property
    def device(self) -> Any:
        """Where the arrays are: "cpu" where they are NumPy's, else the `torch.device`."""
        buffer: Any = self.buffer
        return "cpu" if isinstance(buffer, np.ndarray) else buffer.device

    @property
    def tiles(self) -> dict[int, tuple[Array, Array]]:
        """The tile lists of attention, by tile size: (rows (tiles, 4), items (T,)), int32; see
        `attention/tiles.py`. Made once, in O(segments + visible tiles); `to` takes them along."""
        if "tiles" not in self._views:
            lists: dict[int, tuple[Any, Any]]
            fields = {name for name in self._fields if name.startswith("tiles")}
            if fields:
                lists = {
                    size: (self._array(f"tiles{size}.rows"), self._array(f"tiles{size}.items")) for size in TILE_SIZES
                }
            else:
                host = self.numpy()
                lists = {size: self._make_tile_lists(host, size) for size in TILE_SIZES}
            self._views["tiles"] = {size: (rows.reshape(-1, 4), items) for size, (rows, items) in lists.items()}
        by_size: dict[int, tuple[Array, Array]] = self._views["tiles"]
        return by_size

    def _make_tile_lists(self, host: HostTree, size: int) -> tuple[Array, Array]:
        rows, items = _core.tile_lists(host.cu_segments, host.subtree_end, size)
        return self._like_buffer(rows), self._like_buffer(items)

    def numpy(self) -> HostTree:
        """The same tree with NumPy arrays, without a copy from the device where it came from the host."""
        tree: Any = self
        if isinstance(tree.buffer, np.ndarray):
            return cast("HostTree", tree)
        if self._origin is None:
            self._origin = PackedTree(tree.buffer.cpu().numpy(), self._fields, self._formats, self._disagreements)
            self._origin._cuts = self._cuts
        return self._origin

    def to(self, device: Any, *, pin_memory: bool | None = None, non_blocking: bool = True) -> PackedTree[Tensor]:
        """The same tree with torch tensors on a device, tile lists included: one copy of one buffer.

        pin_memory: stage the copy in page-locked memory, which lets it overlap with other work; by default on CUDA
            devices.
        """
        device = load_torch().device(device)
        fields, buffer, origin = dict(self._fields), cast(Any, self.buffer), self._origin
        if isinstance(buffer, np.ndarray):
            origin, parts, size = self.numpy(), [buffer], len(buffer)
            for tile, lists in origin.tiles.items():
                for name, array in zip(("rows", "items"), lists, strict=True):
                    fields[f"tiles{tile}.{name}"] = (size, array.size)
                    parts.append(array.reshape(-1).view(np.uint8))
                    size += array.nbytes + -array.nbytes % ALIGN
            pinned = device.type == "cuda" if pin_memory is None else pin_memory
            buffer = copied(parts, device, pinned, non_blocking)
        else:
            with to_stay():
                buffer = buffer.to(device)
        moved: PackedTree[Any] = PackedTree(buffer, fields, self._formats, self._disagreements)
        moved._origin, moved._cuts = origin, self._cuts
        return moved

    # --- inside ---

    def _array(self, name: str) -> Array:
        view: Array | None = self._views.get(name)
        return self._view(name) if view is None else view

    def _view(self, name: str) -> Array:
        offset, rows = self._fields[name]
        dtype, tail = self._format(name)
        buffer: Any = self.buffer
        if isinstance(buffer, np.ndarray):
            view: Any = np.ndarray((rows, *tail), dtype, buffer, offset)
        else:
            with to_stay():
                part = buffer[offset : offset + rows * dtype.itemsize * prod(tail)]
                view = part.view(torch_dtype(dtype)).reshape(rows, *tail)
        self._views[name] = view
        return cast("Array", view)

    def _format(self, name: str) -> Format:
        dtype = _DTYPES.get(name)
        return self._formats[name.split(".", 1)[1]] if dtype is None else (dtype, ())

    def _zeros(self, name: str, count: int) -> Array:
        """What a call without kept sets has instead of their arrays; not part of the buffer."""
        if name not in self._views:
            self._views[name] = self._like_buffer(np.zeros(count, np.int32))
        return cast("Array", self._views[name])

    def _like_buffer(self, array: npt.NDArray[Any]) -> Array:
        """A host array, or the same as a tensor where this tree's arrays are tensors."""
        like, out = cast(Any, self.buffer), cast(Any, array)
        if not isinstance(like, np.ndarray):
            with to_stay():
                out = load_torch().from_numpy(array).to(like.device)
        return cast("Array", out)

    def _checked_rows(self, values: Any, rows: int, what: str) -> Any:
        if values.ndim == 0 or len(values) != rows:
            raise PackError(f"values has shape {tuple(values.shape)}; this tree has {rows} {what}")
        return values

    def __getstate__(self) -> dict[str, Any]:
        made: dict[str, Any] = {"_views": {}, "_origin": None, "derived": {}}
        return {**vars(self), **made, "_fields": dict(self._fields), "_formats": dict(self._formats)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        buffer: Any = self.buffer
        if not isinstance(buffer, np.ndarray) and buffer.is_inference():  # unpickled or copied under it
            with to_stay():
                self.buffer = buffer.clone()

    def __repr__(self) -> str:
        return f"PackedTree({self.num_tokens} tokens, {self.num_samples} samples, {self.num_terms} terms)"


#: A tree whose arrays are NumPy's.
HostTree = PackedTree[npt.NDArray[Any]]
