"""What a layer with a state needs to know of a packed forest, from `subtree_end` alone, made once for all layers.

    run        a maximal range of tokens with one `subtree_end`: each but the first has the token before as its parent
    segment    a run, in depth-first order; the state before it is the state after `segment_parent`

Runs are the segments of a `PackedTree`, but that a sample which ends inside another starts none: nothing forks there.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Index = npt.NDArray[np.int32]
_KEY = "recurrent"  # under which segments are kept with a tree


class TreeSegments:
    """The segments of one packed forest on a device, shared by all layers with a state.

    Attributes:
        subtree_end: (N,) int32 on the device; `subtree_end[i] == i` marks padding.
        cu_segments: (S + 1,) int32 NumPy: where each segment starts; the last entry is one past the last real token.
        segment_parent: (S,) int32 NumPy: parent segment, -1 at a root.
        starts, stops: (S,) int32 NumPy. Where padding lies between trees a segment stops before the next one starts.
        cache: what implementations made of this forest, under keys of their own.

    Raises:
        ValueError: a `subtree_end` that is not that of a forest in depth-first order.
    """

    def __init__(self, subtree_end: Tensor, host: Index | None = None):
        self.subtree_end = subtree_end
        host = subtree_end.cpu().numpy() if host is None else host
        self.starts, self.stops, self.segment_parent = _segments(host)
        self.cu_segments = np.append(self.starts, self.stops[-1:] if len(self.stops) else [0]).astype(np.int32)
        self.cache: dict[Any, Any] = {}

    @property
    def tokens(self) -> int:
        """N, padding included."""
        return self.subtree_end.shape[0]

    @property
    def parent(self) -> Tensor:
        """(N,) int32 on the device: the token before each in its sample; -1 at roots and at padding."""
        if "parent" not in self.cache:
            self.cache["parent"] = self.to_device(self.parent_on_host())
        kept: Tensor = self.cache["parent"]
        return kept

    def parent_on_host(self) -> Index:
        parent = np.full(self.tokens, -1, np.int32)
        for a, b in self._ranges():
            parent[a:b] = np.arange(a - 1, b - 1)
        above = self.segment_parent
        parent[self.starts] = np.where(above < 0, -1, self.stops[above] - 1)
        return parent

    @property
    def real(self) -> Tensor:
        """(N,) bool on the device: false at padding."""
        if "real" not in self.cache:
            real = np.zeros(self.tokens, np.bool_)
            for a, b in self._ranges():
                real[a:b] = True
            self.cache["real"] = self.to_device(real)
        kept: Tensor = self.cache["real"]
        return kept

    @property
    def padded(self) -> bool:
        """Whether there are rows of padding."""
        return int((self.stops - self.starts).sum()) < self.tokens

    def contiguous_tokens(self) -> int:
        """The number of real tokens, which the kernels want before all padding.

        Raises:
            ValueError: rows of padding before a real token.
        """
        if (self.stops[:-1] != self.starts[1:]).any() or self.starts[:1].any():
            raise ValueError(
                "rows of padding must come after all trees; here some lie before a real token, which only "
                'impl="reference" takes'
            )
        return int(self.cu_segments[-1])

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        """A host array on the device of the forest. Nothing waits: a copy to a GPU starts from page-locked memory."""
        # Kept with the tree: a pass under torch.inference_mode() must not leave tensors that training cannot save.
        with torch.inference_mode(False):
            made = torch.from_numpy(np.ascontiguousarray(array))
            if not self.subtree_end.is_cuda:
                return made.to(self.subtree_end.device)
            return made.pin_memory().to(self.subtree_end.device, non_blocking=True)

    def _ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))


def _segments(subtree_end: Index) -> tuple[Index, Index, Index]:
    """(starts, stops, parents) of the segments, in depth-first order."""
    end = subtree_end.astype(np.int64)
    index = np.arange(len(end))
    real = end > index
    wrong = np.flatnonzero((end < index) | (end > len(end)))
    if len(wrong):
        raise ValueError(f"subtree_end of token {wrong[0]} is {end[wrong[0]]}, outside {wrong[0]}..{len(end)}")
    before = np.append(-1, end[:-1])
    starts = np.flatnonzero(real & (end != before))
    goes_on = np.append(real[1:] & (end[1:] == end[:-1]), False)
    stops = np.flatnonzero(real & ~goes_on) + 1
    parents = np.full(len(starts), -1, np.int32)
    open_segments: list[int] = []
    ends = end[starts].tolist()
    for segment, start in enumerate(starts.tolist()):
        while open_segments and ends[open_segments[-1]] <= start:
            open_segments.pop()
        if open_segments:
            above = open_segments[-1]
            parents[segment] = above
            if ends[segment] > ends[above]:
                raise ValueError(
                    f"subtree_end of token {start} is {ends[segment]}, that of its ancestor {starts[above]} is "
                    f"{ends[above]}: these are not the subtrees of a forest in depth-first order"
                )
        open_segments.append(segment)
    return starts.astype(np.int32), stops.astype(np.int32), parents


def tree_segments(tree: Any) -> TreeSegments:
    """The segments of a tree, kept with it: layers that are given the tree share them.

    Args:
        tree: a `PackedTree` or a `TreeTiles` on the device of the layer, or a `TreeSegments`: anything with
            `subtree_end`. From a `PackedTree` that was packed here, nothing waits for the device; `subtree_end` alone
            is read back from it once.

    Raises:
        TypeError: a tree on the host as NumPy arrays, or something that has no `subtree_end`.
        ValueError: a `subtree_end` that is not that of a forest.
    """
    if isinstance(tree, TreeSegments):
        return tree
    end = getattr(tree, "subtree_end", None)
    if end is None:
        raise TypeError(f"tree must be a PackedTree or a TreeTiles on the device of the layer, not {_kind(tree)}")
    if not isinstance(end, Tensor):
        raise TypeError(f"the tree holds {_kind(end)}: move it to the device of the layer first, tree.to(device)")
    if end.dim() != 1 or end.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"subtree_end must be (N,) int32 or int64, not {tuple(end.shape)} {end.dtype}")
    keep: MutableMapping[Any, Any] | None = getattr(tree, "derived", None)
    keep = getattr(tree, "cache", None) if keep is None else keep
    if keep is not None and _KEY in keep:
        kept: TreeSegments = keep[_KEY]
        return kept
    host = tree.numpy().subtree_end if hasattr(tree, "numpy") else None
    made = TreeSegments(end.to(torch.int32).contiguous(), host)
    if keep is not None:
        keep[_KEY] = made
    return made


def share_segments(tiles: Any, segments: TreeSegments) -> None:
    """Keeps segments that are known already with a `TreeTiles`, which would else read `subtree_end` back from the
    device."""
    tiles.cache[_KEY] = segments


def _kind(x: Any) -> str:
    return "NumPy arrays" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
