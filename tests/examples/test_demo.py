"""The demo's comparison of packed and alone on a small case, its npz reader, and its exit status."""

import sys

import numpy as np
import pytest

import treepack
from treepack import synthetic


def small_samples():
    sizes = {"rollouts": 2, "turns": 3, "prompt": 9, "thinking": 6, "answer": 4, "tool": 3}
    return [
        *synthetic.agent(prompt=11, answers=3, answer=5, vocab_size=64),
        *synthetic.multi_turn(**sizes, vocab_size=64),
    ]


@pytest.mark.parametrize("max_tokens", [40, 1_000])
def test_packed_and_alone_agree(max_tokens):
    parity = pytest.importorskip("parity", reason="the comparison needs torch")
    result = parity.compare(small_samples(), max_tokens=max_tokens, vocab_size=64)
    assert result.packed_tokens < result.raw_tokens
    assert (result.trees > 1) == (max_tokens == 40)
    assert len(result.log_probs) == len(small_samples())
    assert all(alone != 0 for _, _, alone, _ in result.gradients)
    assert result.largest_difference < 1e-10


def test_a_wrong_packing_is_noticed(monkeypatch):
    parity = pytest.importorskip("parity", reason="the comparison needs torch")
    real = parity.tree_attention

    def sees_too_much(q, k, v, subtree_end):
        return real(q, k, v, subtree_end * 0 + len(subtree_end))

    monkeypatch.setattr(parity, "tree_attention", sees_too_much)
    assert parity.compare(small_samples(), max_tokens=1_000, vocab_size=64).largest_difference > 1e-3


def test_the_demo_packs_a_file(tmp_path, monkeypatch, capsys):
    import demo

    samples = synthetic.agent(prompt=20, answers=3, answer=5)
    lengths = [len(sample["input_ids"]) for sample in samples]
    np.savez(
        tmp_path / "rollouts.npz",
        tokens=np.concatenate([sample["input_ids"] for sample in samples]).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        completion_mask=np.concatenate([sample["completion_mask"] for sample in samples]),
        group_id=np.zeros(3, np.int32),
    )
    batch = demo.load(str(tmp_path / "rollouts.npz"))
    stats = treepack.pack(batch, max_tokens=64).stats
    assert (stats.samples, stats.raw_tokens, stats.packed_tokens, stats.terms) == (3, 75, 35, 15)

    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--rollouts", str(tmp_path / "rollouts.npz"), "--max-tokens", "64"])
    assert demo.main() == 0
    assert "2.14" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": [1, 2]}, "tokens is not a file in the archive"),
        ({"tokens": [1, 2, 3], "offsets": [0, 5]}, "cu_seqlens ends at 5; input_ids has 3 tokens"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_packed_is_one_line(arrays, message, tmp_path, monkeypatch, capsys):
    import demo

    path = tmp_path / "rollouts.npz"
    if arrays is not None:
        np.savez(path, **{name: np.array(values) for name, values in arrays.items()})
    monkeypatch.setattr(sys, "argv", ["demo.py", "--rollouts", str(path)])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert f"error: {path}: {message}" in capsys.readouterr().err
