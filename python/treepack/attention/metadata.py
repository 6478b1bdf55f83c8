"""What attention needs to know of a packed forest, made once and shared by all layers and heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .tiles import LIST_SIZES


class TreeTiles:
    """What attention needs to know about one packed forest, made once and shared by all layers and heads.

    Threads may share one: what two of them make at the same time is equal, and one of the two is kept.

    Attributes:
        subtree_end: (N,) int32.
        above: the queries are the rows from here on, a multiple of 128; 0: all rows.
        position_ids: (N,) depth of each token, or None: derived when a sliding window asks for it.
        tiles: {128: (rows, items), 64: (rows, items)}, the tile lists of `tiles.py`; a size that is not
            there is made when first needed.
        row_checked: whether the tree was checked for the model that runs it (rope that follows the row's length).
        layers: how many layers of a model have run on it.
        longest: the longest sample, where it is known.
        cache: block masks of other implementations, under keys of their own.

    Raises:
        ValueError: tile lists that are not int32 or not on the device of `subtree_end`.
    """

    def __init__(
        self,
        subtree_end: Tensor,
        position_ids: Tensor | None = None,
        tiles: dict[int, tuple[Tensor, Tensor]] | None = None,
    ):
        self.subtree_end = subtree_end
        self.position_ids = position_ids
        self.tiles = dict(tiles or {})
        for block, lists in self.tiles.items():
            for x in lists:
                if x.device != subtree_end.device or x.dtype != torch.int32:
                    raise ValueError(
                        f"the tile lists of {block} hold {x.dtype} on {x.device}; they must be int32 on the device of "
                        f"subtree_end, {subtree_end.device}: move the tree as a whole with tree.to(device)"
                    )
        self.above = 0
        self.row_checked = False
        self.layers = 0
        self.longest: int | None = None
        self.cache: dict[Any, Any] = {}
        self._depth: Tensor | None = None
        self._lists: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}
        self._schedules: dict[int, Tensor] = {}
        self._items: dict[tuple[int, int, int], Tensor] = {}
        self._last_rows: dict[int, TreeTiles] = {}

    def last_rows(self, queries: int) -> TreeTiles:
        """The same forest for queries that are its last rows. Padding goes in front until they begin a tile, so it has
        `above - (N - queries)` rows more."""
        if queries in self._last_rows:
            return self._last_rows[queries]
        before = self.subtree_end.shape[0] - queries
        padding = -before % max(LIST_SIZES)
        # Kept with the tree: a pass under torch.inference_mode() must not leave tensors that training cannot save.
        with torch.inference_mode(False):
            rows = torch.arange(padding, dtype=torch.int32, device=self.subtree_end.device)
            end, depth = torch.cat([rows, self.subtree_end + padding]), self.position_ids
            depth = None if depth is None else torch.cat([torch.zeros_like(rows, dtype=depth.dtype), depth])
        same = {} if padding else self.tiles | {key[0]: x for key, x in self._lists.items() if key[1:] == (0, False)}
        made = TreeTiles(end, depth, same)
        made.above, made.longest = before + padding, self.longest
        if not torch.compiler.is_compiling():
            self._last_rows[queries] = made
        return made

    def depth(self) -> Tensor:
        """(N,) int32 depth of each token."""
        if self._depth is None:
            depth = reference.tree_depth(self.subtree_end) if self.position_ids is None else self.position_ids
            self._depth = depth.to(torch.int32).contiguous()
        return self._depth

    def lists(self, block: int, window: int = 0, transpose: bool = False) -> tuple[Tensor, Tensor]:
        """`(rows, items)` of one tile size; with a window, the lists of that window."""
        if not window and not transpose and block in self.tiles:
            return self.tiles[block]
        key = (block, window, transpose)
        if key not in self._lists:
            from .operator import tile_lists

            depth = self.depth() if window else None
            self._lists[key] = tile_lists(self.subtree_end, depth, block, window, transpose, self.above)
        return self._lists[key]

    def schedule(self, window: int = 0) -> Tensor:
        """(tiles, 4) int32, in which order the Hopper kernels take tiles of 128: `tiles.tile_schedule`; with a window
        (8 tiles + T,) int32: `tiles.window_schedule`."""
        if window not in self._schedules:
            from .operator import tile_schedule, window_schedule

            rows = self.lists(128, window)[0]
            self._schedules[window] = (
                window_schedule(self.subtree_end, self.depth(), window, rows, self.above)
                if window
                else tile_schedule(self.subtree_end, rows, self.above)
            )
        return self._schedules[window]

    def dkv_items(self, heads: int, kv_heads: int, window: int = 0) -> Tensor:
        """int32, which program of the Hopper dK/dV computes what for layers with these heads:
        `tiles.py`."""
        key = (heads, kv_heads, window)
        if key in self._items:
            return self._items[key]
        from .operator import backward_items

        schedule = self.schedule(window)
        if window:
            schedule = schedule[: 4 * self.lists(128, window)[0].shape[0]].view(-1, 4)
        items: Tensor = backward_items(schedule, heads, kv_heads, self.above)
        if not torch.compiler.is_compiling():  # a checkpointed layer may not change what is outside of it
            self._items[key] = items
        return items

    def prepare(
        self, window: int = 0, *, training: bool, hopper: bool, heads: tuple[int, int] | None = None
    ) -> tuple[Tensor | None, ...]:
        """What the Triton kernels read beside `subtree_end` for one kind of layer, made where it is not there yet: the
        inputs of the operator from `depth` to `dkv_items`.

        Args:
            window: the layer's sliding window, 0 = none.
            training: the backward pass will run.
            hopper: the Hopper kernels may run.
            heads: query heads and K/V heads of the layer; None where they are not known yet.
        """
        large, small = LIST_SIZES
        forward = self.lists(large, window)
        backward = self.lists(small, window) if training else forward
        queries = self.lists(small, window, transpose=True) if training and window else (None, None)
        schedule = self.schedule(window) if hopper else None
        items = self.dkv_items(*heads, window) if hopper and training and heads else None
        return self.depth() if window else None, *forward, *backward, *queries, schedule, items

    def metadata_bytes(self) -> int:
        """Bytes of everything kept here that a plain forward and backward pass reads: `subtree_end` and the two
        lists."""
        tensors = [self.subtree_end, *(x for block in LIST_SIZES for x in self.lists(block))]
        return sum(x.numel() * x.element_size() for x in tensors)


def tree_tiles(subtree_end: Tensor, position_ids: Tensor | None = None) -> TreeTiles:
    """The metadata of a forest from `subtree_end` alone, on its device, without waiting for it.

    Args:
        subtree_end: (N,) int32 or int64, one past the last descendant of each token; `subtree_end[i] == i` marks
            padding.
        position_ids: (N,) depth of each token; derived where absent.

    Returns:
        A `TreeTiles` to hand to `tree_attention` in place of a tree.
    """
    tiles = TreeTiles(subtree_end.to(torch.int32).contiguous(), position_ids)
    for block in LIST_SIZES:
        tiles.lists(block)
    return tiles


def metadata(tree: Any, subtree_end: Tensor | None, position_ids: Tensor | None) -> TreeTiles:
    if (tree is None) == (subtree_end is None):
        raise ValueError("give either a tree or subtree_end=...")
    if isinstance(tree, TreeTiles):
        return tree
    # Kept with a PackedTree, so that all layers that are given the tree share it. Not while a compiler traces the call:
    # what it would leave there are tensors of its own; nor in inference mode, whose tensors cannot be trained on.
    tracing = torch.compiler.is_compiling()
    shared = position_ids is None and not tracing and not torch.is_inference_mode_enabled()
    keep = getattr(tree, "derived", None) if shared else None
    if keep is not None and "attention" in keep:
        kept: TreeTiles = keep["attention"]
        return kept
    given = None
    if tree is not None:
        subtree_end, given = tree.subtree_end, getattr(tree, "tiles", None)
        position_ids = getattr(tree, "position_ids", None) if position_ids is None else position_ids
    if not isinstance(subtree_end, Tensor):
        raise TypeError(
            f"subtree_end must be a torch tensor, not {type(subtree_end).__name__}; "
            "move the tree with tree.to(device) first"
        )
    if subtree_end.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"subtree_end must be int32 or int64, not {subtree_end.dtype}")
    made = TreeTiles(subtree_end.to(torch.int32).contiguous(), position_ids, given)
    if keep is not None:
        keep["attention"] = made
    return made
