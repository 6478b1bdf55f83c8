"""`branching="label", order="first_seen"` against arrays that another implementation of label-fork trees produced.

The seven tiny cases are beside this file and small enough to check by eye; four pieces of real rollouts lie in
`$TREEPACK_DATA/golden`. Names there: `token_index` is `row_position[term_row]`, `segment_id` is `term_sample`, and the
`tree_*` arrays are the gathered form that `varlen_index()` gives.
"""

import json
from pathlib import Path

import naive
import numpy as np
import pytest

import treepack

TINY = json.loads((Path(__file__).parent / "label_fork_tiny.json").read_text())
REAL = ["lats_agent_tree", "qwen_math_n8", "tau_airline_traj", "tau_airline_turns"]


def compare(samples, expected):
    """One tree, array for array."""
    (tree,) = treepack.pack(samples, max_tokens=1 << 20, branching="label", order="first_seen")
    index = tree.varlen_index()
    got = {
        "input_ids": tree.input_ids,
        "position_ids": tree.position_ids,
        "shift_labels": tree.shift_labels,
        "tree_kv_index": index.kv_index,
        "tree_cu_seqlens_q": index.cu_seqlens_q,
        "tree_cu_seqlens_k": index.cu_seqlens_k,
        "tree_max_seqlens": np.array([index.max_seqlen_q, index.max_seqlen_k]),
        "token_index": tree.row_position[tree.term_row],
        "old_log_probs": tree.terms["old_log_probs"],
        "advantages": tree.terms["advantage"],
        "segment_id": tree.term_sample,
    }
    assert set(got) == set(expected)
    for name, values in expected.items():
        values = np.asarray(values)
        assert got[name].shape == values.shape, name
        exact = values.astype(np.float32) if values.dtype.kind == "f" else values
        assert np.array_equal(got[name], exact), name
    assert got["old_log_probs"].dtype == got["advantages"].dtype == np.float32
    assert index.cu_seqlens_q.dtype == index.cu_seqlens_k.dtype == np.int32


@pytest.mark.parametrize("case", sorted(TINY))
def test_tiny_case(case):
    compare(TINY[case]["samples"], TINY[case]["expected"])


@pytest.mark.parametrize("case", sorted(TINY))
def test_the_oracle_gives_the_tiny_case(case):
    samples, expected = TINY[case]["samples"], TINY[case]["expected"]
    (tree,) = naive.pack(samples, max_tokens=1000, branching="label", order="first_seen").trees
    index = naive.varlen(tree)
    assert {name: tree[name] for name in ("input_ids", "position_ids", "shift_labels")} == {
        name: expected[name] for name in ("input_ids", "position_ids", "shift_labels")
    }
    assert index["kv_index"] == expected["tree_kv_index"]
    assert index["cu_seqlens_q"] == expected["tree_cu_seqlens_q"]
    assert index["cu_seqlens_k"] == expected["tree_cu_seqlens_k"]
    assert [index["max_seqlen_q"], index["max_seqlen_k"]] == expected["tree_max_seqlens"]
    assert [tree["row_position"][row] for row in tree["term_row"]] == expected["token_index"]
    assert tree["term_sample"] == expected["segment_id"]
    assert tree["terms"] == {"old_log_probs": expected["old_log_probs"], "advantage": expected["advantages"]}


@pytest.mark.parametrize("name", REAL)
def test_real_rollouts(name, treepack_data):
    with np.load(treepack_data / "golden" / f"label_fork_{name}.npz") as z:
        golden = {key: z[key] for key in z.files}
    with np.load(treepack_data / "data" / f"{name}.npz") as z:
        tokens, mask, offsets = z["tokens"], z["completion_mask"], z["offsets"]
    samples, at = [], 0
    for s, advantage in zip(golden["sample_index"], golden["advantage"], strict=True):
        piece = slice(offsets[s], offsets[s + 1])
        n = int(offsets[s + 1] - offsets[s])
        samples.append(
            {
                "input_ids": tokens[piece],
                "completion_mask": mask[piece],
                "old_log_probs": golden["old_log_probs"][at : at + n],
                "advantage": float(advantage),
            }
        )
        at += n
    assert at == len(golden["old_log_probs"])
    expected = {key.removeprefix("expected_"): x for key, x in golden.items() if key.startswith("expected_")}
    compare(samples, expected)
