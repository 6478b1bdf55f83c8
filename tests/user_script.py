"""What a user writes, as an editor and `mypy --strict` see it; `test_types.py` has it checked, and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import treepack
from treepack.logprobs import TermLogProbs
from treepack.reports import Report

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, kind):
        return value


NumPy = npt.NDArray[Any]


def samples() -> list[dict[str, Any]]:
    return [
        {"input_ids": np.array([1, 2, 3, 4]), "advantage": 0.5},
        {"input_ids": [1, 2, 5], "advantage": -0.25},
    ]


def host(packed: treepack.Packed) -> None:
    """On the host everything is NumPy's."""
    tree = packed[0]
    assert_type(tree, treepack.PackedTree[NumPy])
    assert_type(packed[:1], list[treepack.PackedTree[NumPy]])
    assert_type(packed.for_rank(0), list[treepack.PackedTree[NumPy]])
    assert_type(tree.input_ids, NumPy)
    assert_type(tree.subtree_end, NumPy)
    assert_type(tree.terms["advantage"], NumPy)
    assert_type(tree.samples["advantage"], NumPy)
    assert_type(tree.arrays["term_row"], NumPy)
    assert_type(tree.path_index(), list[NumPy])
    assert_type(tree.attention_mask(), NumPy)
    values: npt.NDArray[np.float64] = np.zeros((tree.num_tokens, 3))
    assert_type(tree.unpack(values), list[npt.NDArray[np.float64]])
    assert_type(tree.num_terms, int)
    assert_type(packed.stats.packing_ratio, float)
    assert_type(packed.skipped, list[treepack.Skipped])
    assert_type(tree.numpy(), treepack.PackedTree[NumPy])


def device(packed: treepack.Packed) -> None:
    """After `.to` everything is torch's."""
    for host_tree in packed:
        tree = host_tree.to("cpu")
        assert_type(tree, treepack.PackedTree[Tensor])
        assert_type(tree.input_ids, Tensor)
        assert_type(tree.terms["advantage"], Tensor)
        assert_type(tree.tiles[128], tuple[Tensor, Tensor])
        assert_type(tree.path_index(), list[Tensor])
        assert_type(tree.unpack(torch.zeros(tree.num_tokens)), list[Tensor])
        assert_type(tree.unpack_terms(torch.zeros(tree.num_terms)), list[Tensor])
        assert_type(tree.sampling_mask_table(), Tensor)
        assert_type(tree.to(torch.device("cpu")), treepack.PackedTree[Tensor])
        assert_type(tree.numpy().term_row, NumPy)


def stream() -> None:
    packer = treepack.Packer(max_tokens=16, ranks=1)
    for sample in samples():
        for trees in packer.add(sample):
            assert_type(trees, tuple[treepack.PackedTree[NumPy], ...])
    for (tree,) in packer.flush():
        assert_type(tree.sample_index, NumPy)
    assert_type(packer.stats, treepack.Stats)


def loss(model: Any, tree: treepack.PackedTree[Tensor], also: bool) -> Tensor:
    """What comes back says what was asked for."""
    log_probs = treepack.term_log_probs(model, tree)
    assert_type(log_probs, Tensor)
    both = treepack.term_log_probs(model, tree, entropy=True, temperature=0.7)
    assert_type(both, TermLogProbs)
    assert_type(both.log_probs, Tensor)
    assert_type(treepack.term_log_probs(model, tree, hidden_states=True), TermLogProbs)
    assert_type(treepack.term_log_probs(model, tree, entropy=also), Tensor | TermLogProbs)
    return -(log_probs * tree.terms["advantage"]).sum()


def any_tree(tree: treepack.PackedTree) -> int:
    """A tree of either kind."""
    return tree.num_tokens + int(tree.position_samples.sum())


def page(packed: treepack.Packed) -> None:
    assert_type(treepack.report(packed), Report)
    assert_type(treepack.report(packed[0]).html, str)
    assert_type(treepack.report(packed[:1], title="one"), Report)


def wrong(packed: treepack.Packed, model: Any) -> None:
    """Mistakes that a checker finds; each `ignore` would be reported were it not needed."""
    treepack.pack(samples(), max_tokens=16, order="last")  # type: ignore[arg-type]
    treepack.pack(samples(), max_token=16)  # type: ignore[call-arg]
    treepack.Packer(max_tokens="many")  # type: ignore[arg-type]
    _ = packed.input_ids  # type: ignore[attr-defined]  # of a tree
    treepack.term_log_probs(model, packed[0])  # type: ignore[arg-type]  # still on the host
    treepack.report("packed")  # type: ignore[arg-type]


def main() -> None:
    packed = treepack.pack(samples(), max_tokens=16)
    assert_type(packed, treepack.Packed)
    host(packed)
    device(packed)
    stream()
    print(any_tree(packed[0]) + any_tree(packed[0].to("cpu")))


if __name__ == "__main__":
    main()
