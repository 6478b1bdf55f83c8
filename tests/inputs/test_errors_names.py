"""Names that users gave, in messages: plain words as they are, anything else by its repr, and never a second line."""

import json

import pytest

import treepack
from treepack.errors import PackTypeError, escaped, shown
from treepack.readers import ReadError, open_rollouts

GOOD = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}
PLAIN = ["x", "loss_mask", "loss mask", "trajectory[].tokens.prompt_ids", "old-log-probs", "größe", "上", "a.b/c"]
OTHERS = {
    "\n": r"'\n'",
    "": "''",
    " ": "' '",
    "a\nb": r"'a\nb'",
    "a: b": "'a: b'",
    "it's": '"it\'s"',
    "\x1b": r"'\x1b'",
}
OTHERS |= {"a ": "'a '", "a  b": "'a  b'", "\u2028": r"'\u2028'", "\u202e": r"'\u202e'", "x; y": "'x; y'"}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_words(name):
    assert shown(name) == name


@pytest.mark.parametrize(("name", "text"), OTHERS.items())
def test_a_column_of_a_sample(name, text):
    assert shown(name) == text
    for call in (lambda x: treepack.pack([x], max_tokens=8), treepack.Packer(max_tokens=8).add):
        with pytest.raises(PackTypeError) as caught:
            call({**GOOD, name: None})
        assert str(caught.value) == f"sample 0: {text} is None; a number is needed"
        with pytest.raises(treepack.PackError) as caught:
            call({**GOOD, name: [1, 2]})
        assert str(caught.value).startswith(f"sample 0: {text} has 2 rows; input_ids has 3 tokens")


@pytest.mark.parametrize(("name", "text"), OTHERS.items())
def test_a_column_of_a_batch(name, text):
    padded = {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], name: [[1, 2, 3]]}
    flat = {"input_ids": [5, 6], "cu_seqlens": [0, 2], "completion_mask": [0, 1], name: [1, 2, 3]}
    for batch, more, begins in [
        (padded, {}, f"{text} has shape (1, 3); "),
        (flat, {"per_token": [name]}, f"{text} has 3 rows; the batch has 2 tokens"),
    ]:
        with pytest.raises(treepack.PackError) as caught:
            treepack.pack(batch, max_tokens=8, **more)
        assert str(caught.value).startswith(begins)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text in OTHERS.items() if name])
def test_a_column_of_a_file(tmp_path, name, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 6], name: "b"}) + "\n")
    rollouts = open_rollouts(path)
    assert repr(rollouts.account).count("\n") == 0
    assert f"not read: {text} (text)" in str(rollouts.account)
    with pytest.raises(ReadError) as caught:
        list(open_rollouts(path, columns={"x": name}).batches(1))
    assert str(caught.value) == f"{path}, line 1: {text} is text ('b'); numbers are needed"
    path.write_text(json.dumps({name: "b"}) + "\n")
    with pytest.raises(ReadError, match="no column of token ids") as caught:
        open_rollouts(path)
    assert f"it has {text}. Looked for" in str(caught.value)


def test_a_file_of_two_lines(tmp_path):
    path = tmp_path / "a\nb.jsonl"
    path.write_text("{")
    with pytest.raises(ReadError) as caught:
        open_rollouts(path)
    assert str(caught.value).startswith(f"{tmp_path}/a\\nb.jsonl, line 1: not JSON: ")


def test_a_source_of_two_lines():
    error = treepack.PackError("input_ids is empty", sample=0, source="a\nb.jsonl")
    assert str(error) == r"a\nb.jsonl: sample 0: input_ids is empty"
    assert escaped("a\tb\x1b[2J ü") == r"a\tb\x1b[2J ü"
