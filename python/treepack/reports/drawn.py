"""One tree to what the page draws of it: bars, samples, text, pictures, as plain lists and numbers for JSON."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np

from .bars import bars_of
from .pictures import grey, mask_of, tiles_of
from .png import png
from .samples import Given, columns_of_samples, drawn_order, within
from .segments import segments_of
from .texts import texts_of

if TYPE_CHECKING:
    from ..tree.tree import HostTree

#: Runs of prompt and trained tokens beyond one a bar, over all drawn trees.
RUNS = 24_000
#: Pictures of masks and tiles, over all drawn trees, before base64.
PICTURE_BYTES = 480_000
#: Columns of samples and text of bars, over all drawn trees, as the page holds them.
SAMPLE_BYTES, TEXT_BYTES = 1_400_000, 300_000
#: Pixels along one side of a picture, at most.
PIXELS = 512
#: Letters of a name, and names of columns that are shown.
NAME, COLUMNS = 200, 40


def drawn_tree(tree: HostTree, bars: int, trees: int, given: Given | None, tokenizer: Any) -> dict[str, Any]:
    """What the page draws of one tree out of `trees`, in `bars` bars."""
    segments = segments_of(tree)
    drawn = bars_of(segments, bars, RUNS // trees)
    merged = np.flatnonzero(drawn.segments > 1)
    columns = sorted({*tree.terms, *tree.samples, *tree.positions})
    texts = {} if tokenizer is None else texts_of(tree, drawn, segments.trained, tokenizer, TEXT_BYTES // trees)
    return {
        "tokens": int(tree.cu_segments[-1]),
        "padding": tree.num_tokens - int(tree.cu_segments[-1]),
        "alone": int((segments.tokens * segments.samples).sum()),
        "samples": len(tree.sample_index),
        "segments": len(segments.start),
        "rows": len(tree.row_position),
        "terms": len(tree.term_row),
        "pairs": int((tree.position_ids[: tree.cu_segments[-1]] + 1).sum()),
        "columns": [name[:NAME] for name in columns[:COLUMNS]],
        "more_columns": max(len(columns) - COLUMNS, 0),
        "bars": {
            "parent": drawn.parent.tolist(),
            "tokens": drawn.tokens.tolist(),
            "samples": drawn.samples.tolist(),
            "trained": drawn.trained.tolist(),
            "terms": drawn.terms.tolist(),
            "runs": drawn.runs.tolist(),
            "grain": drawn.grain,
            "merged": np.stack([merged, drawn.segments[merged], drawn.reach[merged]]).T.tolist(),
        },
        "texts": texts,
        **_samples(tree, SAMPLE_BYTES // trees, given),
        **_pictures(tree, PICTURE_BYTES // trees),
    }


def _samples(tree: HostTree, most: int, given: Given | None) -> dict[str, Any]:
    """The columns of the samples, from the top of the picture down."""
    order = drawn_order(tree).tolist()
    columns = {name: [values[i] for i in order] for name, values in columns_of_samples(tree, given).items()}
    kept, left = within(columns, most, COLUMNS)
    return {"of_samples": {name[:NAME]: values for name, values in kept.items()}, "left_of_samples": left}


def _pictures(tree: HostTree, most: int) -> dict[str, Any]:
    """The mask and the tiles of a tree: half the pixels along a side until both files together are short enough."""
    pixels = PIXELS
    while True:
        mask, tiles = mask_of(tree.subtree_end, pixels), tiles_of(tree, pixels)
        none = np.zeros_like(tiles.full_shares)
        mask_png = png(grey(mask.shares))
        tiles_png = png(grey(np.stack([tiles.full_shares, tiles.partial_shares, none], axis=-1)))
        if len(mask_png) + len(tiles_png) <= most or pixels == 1:
            break
        pixels //= 2
    return {
        "mask": {"step": mask.step, "png": b64encode(mask_png).decode()},
        "tiles": {
            "step": tiles.step,
            "side": tiles.side,
            "full": tiles.full,
            "partial": tiles.partial,
            "png": b64encode(tiles_png).decode(),
        },
    }
