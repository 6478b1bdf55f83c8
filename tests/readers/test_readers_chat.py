"""Chat messages through a tokenizer folder: which tokens are trained, by marks of the template and by difference."""

import json

import pytest

transformers = pytest.importorskip("transformers", reason="chat messages need transformers")
tokenizers = pytest.importorskip("tokenizers", reason="chat messages need tokenizers")

from treepack.readers import ReadError, open_rollouts  # noqa: E402

TURN = "<{{ m.role }}>{{ m.content }}<end>"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)
# Thoughts of all but the last turn are dropped, as reasoning models do.
DROPS = (
    "{% for m in messages %}<{{ m.role }}>{% if not loop.last %}{{ m.content.split('.')[-1] }}{% else %}"
    "{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "how much"},
    {"role": "assistant", "content": "think. four"},
    {"role": "user", "content": "sure"},
    {"role": "assistant", "content": "yes"},
]
TEXT = "<user>how much<end><assistant>think. four<end><user>sure<end><assistant>yes<end>"


@pytest.fixture
def folder(tmp_path):
    """Makes a tokenizer of one token per letter and three special ones, with a chat template."""

    def make(template):
        special = ["<user>", "<assistant>", "<end>"]
        vocabulary = {chr(code): code for code in range(32, 127)} | {name: 200 + i for i, name in enumerate(special)}
        model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        tokenizer.add_special_tokens(special)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
        path = tmp_path / f"tokenizer-{len(list(tmp_path.iterdir()))}"
        fast.save_pretrained(path)
        return str(path)

    return make


def read(tmp_path, tokenizer, row):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((sample,),) = open_rollouts(path, tokenizer=tokenizer).batches()
    names = {200: "<user>", 201: "<assistant>", 202: "<end>"}
    text = [names.get(token) or chr(token) for token in sample["input_ids"].tolist()]
    trained = [piece for piece, mask in zip(text, sample["completion_mask"], strict=True) if mask]
    return sample, "".join(text), "".join(trained)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by difference", "by marks"])
def test_the_turns_of_the_assistant_are_trained(tmp_path, folder, template):
    sample, text, trained = read(tmp_path, folder(template), {"messages": MESSAGES, "advantage": 0.5, "uid": "q1"})
    assert text == TEXT
    assert trained == "think. four<end>yes<end>"
    assert (sample["advantage"], sample["group_id"]) == (0.5, "q1")


def test_what_was_stored_for_tokens_is_left_out(tmp_path, folder):
    row = {"messages": MESSAGES, "loss_mask": [1, 0], "logprobs": [0.0], "input_ids": [1, 2]}
    sample, _, trained = read(tmp_path, folder(PLAIN), row)
    assert set(sample) == {"input_ids", "completion_mask"}
    assert trained == "think. four<end>yes<end>"


def test_parquet_fills_missing_keys_with_nulls(tmp_path, folder):
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    row = {"messages": [{**MESSAGES[0], "name": "x"}, MESSAGES[1]]}
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist([row]), tmp_path / "chat.parquet")
    ((sample,),) = open_rollouts(tmp_path / "chat.parquet", tokenizer=folder(PLAIN)).batches()
    assert sample["completion_mask"].sum() == len("think. four") + 1


def test_a_template_that_rewrites_history_is_refused(tmp_path, folder):
    tokenizer = folder(DROPS)
    with pytest.raises(ReadError, match=r"line 1: the chat template renders message 1 differently"):
        read(tmp_path, tokenizer, {"messages": MESSAGES})
    _, text, trained = read(tmp_path, tokenizer, {"messages": MESSAGES[:2]})
    assert (text, trained) == (TEXT[: len("<user>how much<end><assistant>think. four<end>")], "think. four<end>")


def test_refusals(tmp_path, folder):
    tokenizer = folder(PLAIN)
    with pytest.raises(ReadError, match=r"--tokenizer DIR"):
        read(tmp_path, None, {"messages": MESSAGES})
    with pytest.raises(ReadError, match=r"line 1: messages is text"):
        read(tmp_path, tokenizer, {"messages": "hello"})
    with pytest.raises(ReadError, match=r"message 0 has no role; it has from, value"):
        read(tmp_path, tokenizer, {"messages": [{"from": "human", "value": "x"}]})
    with pytest.raises(ReadError, match=r"message 0 has no content"):
        read(tmp_path, tokenizer, {"messages": [{"role": "user"}]})
    with pytest.raises(ReadError, match=r"tokenizer .*nowhere: no such folder"):
        read(tmp_path, str(tmp_path / "nowhere"), {"messages": MESSAGES})
    (tmp_path / "other").mkdir()
    with pytest.raises(ReadError, match=r"tokenizer .*other: it cannot be loaded"):
        read(tmp_path, str(tmp_path / "other"), {"messages": MESSAGES})
    with pytest.raises(ReadError, match=r"no chat template"):
        read(tmp_path, folder(None), {"messages": MESSAGES})
