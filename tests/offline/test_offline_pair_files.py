"""Files of preference pairs: which columns are read, and chats in their several forms."""

import json

import pytest

pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")

from treepack import offline


def test_columns_of_any_name(tmp_path):
    row = {"chosen": [1, 2], "rejected": [1, 3], "x": 0.5}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    offline.pack_file(path, tmp_path / "out", max_tokens=8, pairs=True, columns={"chosen_x": "x"})
    assert offline.load(tmp_path / "out")[0].samples["chosen_x"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="pair is the number of the pair"):
        offline.pack_file(path, tmp_path / "no", max_tokens=8, pairs=True, columns={"pair": "x"})


@pytest.mark.parametrize("prompt", [None, "apart", "twice", "text"])
def test_pairs_of_chat_messages(tmp_path, prompt):
    """Each side is a conversation, whole or after the messages of a prompt; trained are the assistant's turns."""
    transformers = pytest.importorskip("transformers", reason="chat messages need transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="chat messages need tokenizers")
    vocabulary = {chr(code): code for code in range(32, 127)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}.{% endfor %}"
    template += "{% if add_generation_prompt %}<a>{% endif %}"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.save_pretrained(tmp_path / "tokenizer")
    question = {"role": "user", "content": "why"}
    row = {
        side: [question, {"role": "assistant", "content": text}]
        for side, text in (("chosen", "so"), ("rejected", "no"))
    }
    if prompt == "apart":
        row = {side: turns[1:] for side, turns in row.items()} | {"prompt": [question]}
    elif prompt:
        row["prompt"] = [question] if prompt == "twice" else "why"
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row))
    offline.pack_file(path, tmp_path / "out", max_tokens=64, pairs=True, tokenizer=str(tmp_path / "tokenizer"))
    (tree,) = offline.load(tmp_path / "out")
    texts = ["".join(map(chr, ids)) for ids in tree.unpack(tree.input_ids)]
    assert texts == ["<u>why.<a>so.", "<u>why.<a>no."]
    assert ["".join(map(chr, ids)) for ids in tree.unpack_terms(tree.term_target)] == ["so.", "no."]
