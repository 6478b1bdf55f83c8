"""Files in which nothing is trained stop; conversations with nothing to train are reported, with the roles there."""

import json

import pytest

from treepack.readers import ReadError, ReadWarning, open_rollouts


def write(tmp_path, rows, name="rows.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / name


def read(path, start=0, **options):
    return [sample for batch in open_rollouts(path, **options).batches(1, start=start) for sample in batch]


def chat(role, **flags):
    return {"messages": [{"role": "user", "content": "q"}, {"role": role, "content": "a", **flags}]}


@pytest.fixture
def tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="chat messages need transformers")
    import tiny_tokenizers as tiny

    return tiny.letters(tmp_path / "tokenizer", tiny.CHATML)


@pytest.mark.parametrize("role", ["gpt", "model", "bot", "ASSISTANT", "agent"])
def test_a_role_of_another_name(tmp_path, tokenizer, role):
    path = write(tmp_path, [chat(role)] * 3)
    with pytest.raises(ReadError) as error:
        read(path, tokenizer=tokenizer)
    assert str(error.value) == (
        f"{path}: none of its 3 samples has a loss term: messages of the role 'assistant' are trained, and the roles "
        f"there are {', '.join(sorted([repr(role), repr('user')]))}: rename the one whose messages are to be trained "
        "to 'assistant'"
    )
    path = write(tmp_path, [chat("assistant"), chat(role), chat("assistant"), chat(role)])
    with pytest.warns(ReadWarning, match=rf"2 of 4 samples have no loss term, the first is line 2: .* {role!r}"):
        assert len(read(path, tokenizer=tokenizer)) == 4


def test_nothing_that_is_to_be_trained(tmp_path, tokenizer):
    path = write(tmp_path, [chat("assistant", weight=0)])
    with pytest.raises(ReadError, match=r"the roles are 'assistant', 'user'; weight, loss or train may say so"):
        read(path, tokenizer=tokenizer)


def test_masks_of_zeros(tmp_path):
    zeros, ones = ({"input_ids": [1, 2, 3], "loss_mask": [1, on, on]} for on in (0, 1))
    path = write(tmp_path, [zeros] * 2)
    with pytest.raises(
        ReadError, match="none of its 2 samples has a loss term: loss_mask trains no token that has one"
    ):
        read(path)
    assert len(read(path, start=1)) == 1  # of a part nothing can be said
    assert len(read(write(tmp_path, [zeros, ones]))) == 2
    assert len(read(write(tmp_path, [{"input_ids": [1]}] * 2))) == 2  # no mask: as much as there can be


def test_the_commands_say_so(tmp_path, tokenizer, capsys):
    pytest.importorskip("typer", reason="the command line needs treepack[cli]")
    from treepack.cli.commands import run

    path = write(tmp_path, [chat("gpt"), chat("assistant"), chat("gpt")])
    options = [str(path), "--tokenizer", tokenizer]
    for command in (["inspect", *options], ["pack", *options, "--out", str(tmp_path / "out")]):
        assert run(command) == 0
        out, err = capsys.readouterr()
        assert err.startswith(
            f"treepack: warning: {path}: 2 of 3 samples have no loss term, the first is line 1: messages"
        )
        assert err.count("\n") == 1
        assert "warning" not in out
    for limit, says in ((1, "1 of 1 samples"), (9, "2 of 3 samples")):
        assert run(["inspect", *options, "--limit", str(limit)]) == 0
        assert capsys.readouterr().err.count(says) == 1
    path = write(tmp_path, [chat("gpt")])
    for command in (["inspect", *options], ["pack", *options, "--out", str(tmp_path / "none")]):
        assert run(command) == 2
        out, err = capsys.readouterr()
        assert "none of its 1 samples has a loss term" in err
        assert out == ""
    assert not (tmp_path / "none").exists()
