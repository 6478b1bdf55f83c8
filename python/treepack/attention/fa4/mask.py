# mypy: ignore-errors
"""The tree as a `mask_mod` of FlashAttention-4 (CuTe DSL). A module of its own: the DSL reads its source, and
importing it takes seconds."""

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def tree_mask(
    batch: cute.TensorSSA, head: cute.TensorSSA, m_idx: cute.TensorSSA, n_idx: cute.TensorSSA, seqlen_info, aux_tensors
):
    """Query m sees key n  <=>  n <= m < subtree_end[n]; aux_tensors = [subtree_end]."""
    end = utils.scalar_to_ssa(aux_tensors[0][n_idx[0]], cutlass.Int32)
    return (n_idx <= m_idx) & (m_idx < end)
