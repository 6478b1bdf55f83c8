"""pack(): samples in, trees out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, SupportsIndex

from .. import _core
from ..inputs import column_checks
from ..inputs.columns import Inputs
from ..inputs.reader import Readers
from ..tree.mesh import Mesh, number_of
from ..tree.packed import Packed
from .options import BatchOptions

_readers = Readers()


def pack(
    samples: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    *,
    max_tokens: SupportsIndex,
    max_terms: SupportsIndex | None = None,
    max_kept: SupportsIndex | None = None,
    vocab_size: SupportsIndex | None = None,
    branching: Literal["token", "label"] = "token",
    order: Literal["largest_first", "first_seen"] = "largest_first",
    placement: Literal["shared", "first_fit"] = "shared",
    overlong: Literal["raise", "skip"] = "raise",
    pad_to_multiple_of: SupportsIndex | None = None,
    ranks: SupportsIndex | Mesh = 1,
    cut: bool = False,
    max_ancestors: SupportsIndex | None = None,
    per_token: Sequence[str] = (),
    per_sample: Sequence[str] = (),
) -> Packed:
    """Fold samples that share prefixes into prefix trees within a budget.

    Arguments:
        samples: one of
            - a list of dicts with `input_ids` (L,) and optionally `completion_mask` (L,) of 0 and 1 (1 = trained;
              absent = every token is trained), `old_log_probs` (L,), `advantage`, `group_id` (any hashable), `identity`
              (integers, (L,), (L, ...) or one; tokens merge where it is equal), kept sets (`sampling_mask`: flat ids,
              `sampling_mask_counts` (L,): ids of each token's set, 0 = none) and any further column: a scalar is per
              sample, an array (L, ...) per token. Every sample has the same columns. Lists, NumPy and torch (CPU).
              An `attention_mask` (L,) marks padding, which is cut out. A column that looks like a mask (0 and 1 for
              each token, booleans, labels) is refused where there is no `completion_mask`, since every token would be
              trained; one of ones says that this is meant.
            - a pandas DataFrame, a pyarrow Table or a slice of a `datasets` Dataset, with a row for each sample.
            - a padded batch: `input_ids` (B, S), `attention_mask` (B, S), the columns (B, S, ...) per token or (B,) per
              sample, `sampling_mask_counts` (B, S) with `sampling_mask` flat.
            - a flat batch: `input_ids` (R,), `cu_seqlens` (n + 1,), the columns (R, ...) or (n,).
            - a batch of nested tensors: `input_ids` (B, tokens), the columns nested alike per token or (B,) per sample.
        max_tokens: most positions of a tree, padding included. The length of a sample is bounded by it alone.
        max_terms: most loss terms of a tree.
        max_kept: most kept ids of a tree.
        vocab_size: if given, all ids must be below it.
        branching: "token" (fewest positions) or "label" (a position has a single next token, as `shift_labels` needs).
        order: of siblings and roots: the subtree with most positions first (fewest partial attention tiles), or by
            arrival.
        placement: "shared" (fewest positions: never more positions or trees than first fit) or "first_fit" (in arrival
            order, each sample into the first tree in which its additional positions fit).
        overlong: a sample that fits no tree raises, or is skipped and listed in `packed.skipped`.
        pad_to_multiple_of: pad each tree to a multiple of this.
        ranks: trees come in micro-batches of this many, one for each rank, none without a sample as long as there are
            enough samples, balanced by attention work plus a linear term; see `Packed.for_rank`. Or the dimension of
            a torch DeviceMesh over which data parallelism goes, `mesh["dp"]`.
        cut: one tree of all samples (of each rank), cut into ranges of at most `max_tokens` rows (`tree.ranges`), which
            `RangeRunner` runs one by one: no token is there twice, and a sample may be longer than `max_tokens`. See
            docs/ranges.md.
        max_ancestors: with `cut`, most ancestors of a range, whose keys and values attention reads with it; None: as
            many as there are.
        per_token, per_sample: names of further columns of a flat batch, where a shape cannot tell them apart.

    Floats from Python become float32, NumPy and torch columns keep their dtype.

    Raises:
        PackError: input that cannot be packed: which sample, what it has, what is allowed.
        TypeError: a value of the wrong type or dtype.

    >>> import treepack
    >>> packed = treepack.pack([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}], max_tokens=16)
    >>> packed[0].input_ids, packed[0].subtree_end
    (array([1, 2, 3, 4]), array([4, 4, 3, 4], dtype=int32))
    """
    start = perf_counter()
    ranks = number_of(ranks)
    options = BatchOptions.of(locals())
    keywords = options.for_rust()
    reader = _readers.get_reader(samples)
    borrowed = reader.borrow(samples, lambda ready, formats: _core.pack_ready(ready, formats, keywords))
    if borrowed is not None:
        return Packed(*borrowed, options, start, per_token, per_sample)
    columns = reader.read(samples, per_token, per_sample)
    suspects = {} if isinstance(samples, Inputs) else column_checks.check(columns)
    core = _core.pack(columns, keywords)
    if not suspects and not column_checks.has_second_mask(columns):
        reader.learn(columns, column_checks.looked_at(columns))
    return Packed(core, columns.formats, options, start, per_token, per_sample)
