"""Ragged kept sets to a padded table, on the device: (T,) ids and (R,) counts to (R, width) filled with -1.

The host sends only the ragged arrays; a dense table is mostly padding (positions times the widest set). On CUDA a
Triton kernel writes every cell of the table once; elsewhere two index operations of torch do the same, equal bit for
bit. -1 is no token id, so a consumer masks by it and id 0 stays a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kept_set_table"]

MAX_IDS = 2**31 - 1


def kept_set_table(
    sampling_mask: Tensor,
    sampling_mask_counts: Tensor,
    width: int | None = None,
    *,
    dtype: torch.dtype = torch.int64,
    impl: str | None = None,
) -> Tensor:
    """The kept sets of all rows as one padded table, on the device of the inputs.

    Args:
        sampling_mask: (T,) int32 or int64, the kept ids of all rows end to end, T < 2^31.
        sampling_mask_counts: (R,) int32 or int64, how many belong to each row; 0 = no set.
        width: columns of the table; None = the widest set.
        dtype: int64 or int32.
        impl: "triton" or "torch"; None = "triton" on CUDA, "torch" elsewhere.

    Returns:
        (R, width): the ids of each row, in order, then -1.

    Raises:
        ValueError: too many ids, counts that do not sum to T, a width below the widest set, devices that differ.
        Nothing has been written then.
        TypeError: dtypes other than the above.
    """
    _check(sampling_mask, sampling_mask_counts, dtype)
    rows = sampling_mask_counts.shape[0]
    widest, smallest, total = 0, 0, 0
    if rows:  # one transfer of three numbers; the shape of the result has to be known here anyway
        counts = sampling_mask_counts.long()
        widest, smallest, total = torch.stack([counts.max(), counts.min(), counts.sum()]).tolist()
    if smallest < 0 or total != sampling_mask.shape[0]:
        raise ValueError(
            f"sampling_mask_counts sum to {total} (smallest {smallest}), "
            f"but sampling_mask holds {sampling_mask.shape[0]} ids"
        )
    if width is None:
        width = widest
    elif width < widest:
        raise ValueError(f"width={width} is below the widest set, which has {widest} ids")
    impl = impl or ("triton" if sampling_mask.is_cuda else "torch")
    if impl == "triton":
        return _by_triton(sampling_mask, sampling_mask_counts, width, dtype)
    if impl == "torch":
        return _by_torch(sampling_mask, sampling_mask_counts, width, dtype)
    raise ValueError(f'impl={impl!r} is unknown; choose "triton" or "torch"')


def _check(sampling_mask: Tensor, counts: Tensor, dtype: torch.dtype) -> None:
    if sampling_mask.dim() != 1 or counts.dim() != 1:
        raise ValueError(
            f"sampling_mask and sampling_mask_counts must be flat, "
            f"not {tuple(sampling_mask.shape)} and {tuple(counts.shape)}"
        )
    if sampling_mask.shape[0] > MAX_IDS:
        raise ValueError(
            f"sampling_mask holds {sampling_mask.shape[0]} ids; at most {MAX_IDS} fit one tree: "
            "use smaller micro-batches"
        )
    for name, x in (("sampling_mask", sampling_mask), ("sampling_mask_counts", counts)):
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, not {x.dtype}")
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"the table is int64 or int32, not {dtype}")
    if sampling_mask.device != counts.device:
        raise ValueError(f"sampling_mask is on {sampling_mask.device}, sampling_mask_counts on {counts.device}")


def _by_torch(ids: Tensor, counts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    rows = counts.shape[0]
    table = torch.full((rows, width), -1, dtype=dtype, device=ids.device)
    counts = counts.long()
    # Row r starts at r * width in the table and at the sum of the counts before it in the ids: the difference moves
    # each id to its cell.
    shift = torch.arange(rows, device=ids.device) * width - (counts.cumsum(0) - counts)
    cells = torch.arange(ids.shape[0], device=ids.device) + torch.repeat_interleave(
        shift, counts, output_size=ids.shape[0]
    )
    table.view(-1)[cells] = ids.to(dtype)
    return table


def _by_triton(ids: Tensor, counts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    from .kept_sets_triton import fill_table

    return fill_table(ids, counts, width, dtype)
