"""Files of preference pairs: which columns are read, and chats in their several forms."""

import json

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")

from treepack import offline
from treepack.readers import ReadError


def test_columns_of_any_name(tmp_path):
    row = {"chosen": [1, 2], "rejected": [1, 3], "x": 0.5}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    offline.pack_file(path, tmp_path / "out", max_tokens=8, pairs=True, columns={"chosen_x": "x"})
    assert offline.load(tmp_path / "out")[0].samples["chosen_x"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="pair is the number of the pair"):
        offline.pack_file(path, tmp_path / "no", max_tokens=8, pairs=True, columns={"pair": "x"})


def pack(tmp_path, rows, name="out", **options):
    """The samples of a file of pairs as they come out, chosen and rejected in turn: ids, and what is trained."""
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    offline.pack_file(path, tmp_path / name, max_tokens=512, pairs=True, **options)
    (tree,) = offline.load(tmp_path / name)
    order = np.argsort(tree.samples["pair"], kind="stable")
    ids, terms = tree.unpack(tree.input_ids), tree.unpack_terms(tree.term_target)
    return [(ids[at].tolist(), terms[at].tolist()) for at in order]


def refused(tmp_path, rows, **options):
    with pytest.raises(ReadError) as error:
        pack(tmp_path, rows, "no", **options)
    return str(error.value).replace(str(tmp_path / "no.jsonl"), "FILE")


PROMPT = [1, 2, 3, 4, 5]
APART = [([*PROMPT, 6, 7], [6, 7]), ([*PROMPT, 8], [8])]


@pytest.mark.parametrize(
    "names",
    [("prompt_ids", "chosen_ids", "rejected_ids"), ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")],
)
def test_sides_that_hold_the_prompt_are_whole(tmp_path, names):
    """By the first rows, whatever the names say: the prompt is never there twice."""
    apart = dict(zip(names, (PROMPT, [6, 7], [8]), strict=True))
    whole = dict(zip(names, (PROMPT, [*PROMPT, 6, 7], [*PROMPT, 8]), strict=True))
    assert pack(tmp_path, [apart], "apart") == APART
    assert pack(tmp_path, [whole], "whole") == APART
    mixed = whole | {names[2]: [8]}
    text = refused(tmp_path, [mixed])
    assert text.startswith(
        f"FILE: some of '{names[1]}' and '{names[2]}' begin with '{names[0]}' and some do not, so a side"
    )
    given = {"prompt_ids": ""}
    assert pack(tmp_path, [whole], "given", columns=given) == APART
    # Past the rows that are looked at first.
    assert refused(tmp_path, [apart] * 70 + [whole]).startswith(
        f"FILE, line 71: {names[1]} begins with {names[0]}, and in"
    )
    assert refused(tmp_path, [whole] * 70 + [apart]).startswith(
        f"FILE, line 71: {names[1]} does not hold {names[0]} at"
    )


@pytest.mark.parametrize("form", ["{side}_{name}", "{name}_{side}"])
def test_masks_and_labels_of_a_side(tmp_path, form):
    """Without them all of a completion would be trained, and a whole sample after the common prefix."""
    whole = {"chosen": [*PROMPT, 6, 7], "rejected": [*PROMPT, 8, 9]}
    apart = {"prompt_ids": PROMPT, "chosen": [6, 7], "rejected": [8, 9]}
    expected = [([*PROMPT, 6, 7], [7]), ([*PROMPT, 8, 9], [8])]
    masks = {"chosen": [0, 1], "rejected": [1, 0]}
    for number, (rows, front) in enumerate(((whole, [0] * 5), (apart, []))):
        for name in ("completion_mask", "loss_mask", "tool_mask"):
            more = {form.format(side=side, name=name): front + mask for side, mask in masks.items()}
            assert pack(tmp_path, [rows | more], f"{number}{name}") == expected
        labels = {
            side: [-100 if not on else token for on, token in zip(front + masks[side], rows[side], strict=True)]
            for side in masks
        }
        more = {form.format(side=side, name="labels"): values for side, values in labels.items()}
        assert pack(tmp_path, [rows | more], f"{number}labels") == expected
    padded = {side: [0, 0, *ids] for side, ids in whole.items()}
    real = {form.format(side=side, name="attention_mask"): [0, 0, *[1] * 7] for side in whole}
    assert pack(tmp_path, [padded | real], "padded") == [([*PROMPT, 6, 7], [6, 7]), ([*PROMPT, 8, 9], [8, 9])]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"completion_mask": [0, 1]}, "column 'completion_mask' does not say of which side it marks the tokens"),
        ({"loss_mask": [0, 1]}, "column 'loss_mask' does not say of which side"),
        ({"labels": [-100, 7]}, "column 'labels' does not say of which side"),
        (
            {"chosen_env_weights_mask": [1, 0]},
            "column 'chosen_env_weights_mask' is not read, and its values are 0 and 1",
        ),
        ({"chosen_loss_mask": [0, 1]}, "completion_mask is a column of one side alone; name it for both"),
    ],
)
def test_masks_that_nobody_reads(tmp_path, more, says):
    rows = [{"chosen": [6, 7], "rejected": [8, 9]} | more]
    assert says in refused(tmp_path, rows)
    (name,) = more
    if "chosen" not in name:
        assert pack(tmp_path, rows, columns={name: ""}) == [([6, 7], [7]), ([8, 9], [9])]


def test_a_label_of_a_pair_is_no_mask(tmp_path):
    rows = [{"chosen": [6, 7], "rejected": [6, 9], "labels": 1, "mask": 0}]
    assert pack(tmp_path, rows) == [([6, 7], [7]), ([6, 9], [9])]


# --- conversations --------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="chat messages need transformers")
    import tiny_tokenizers as tiny

    return tiny.letters(tmp_path / "tiny", tiny.CHATML)


QUESTION = [{"role": "system", "content": "be"}, {"role": "user", "content": "why"}]
ANSWERS = {side: [{"role": "assistant", "content": text}] for side, text in (("chosen", "so"), ("rejected", "no"))}


def spoken(tokenizer, samples):
    import tiny_tokenizers as tiny

    chat = tiny.transformers.AutoTokenizer.from_pretrained(tokenizer)
    return [
        tuple("".join(chat.convert_ids_to_tokens(ids)).replace("<|im_end|>", "|") for ids in sample)
        for sample in samples
    ]


EXPECTED = [
    (f"<|im_start|>system\nbe|\n<|im_start|>user\nwhy|\n<|im_start|>assistant\n{text}|\n", f"{text}|")
    for text in ("so", "no")
]


@pytest.mark.parametrize("parquet", [False, True])
def test_prompts_are_compared_after_the_clean_up(tmp_path, tokenizer, parquet):
    """Nulls, parts, JSON text and flags: sides that start with the prompt hold it once, those that go on get it."""
    other_form = [
        {"role": "system", "content": [{"type": "text", "text": "be"}], "name": None},
        QUESTION[1] | {"tool_calls": None},
    ]
    rows = [
        {"prompt": QUESTION} | {side: other_form + turns for side, turns in ANSWERS.items()},
        {"prompt": QUESTION, "chosen": ANSWERS["chosen"], "rejected": QUESTION + ANSWERS["rejected"]},
        {"prompt": json.dumps(other_form)} | {side: json.dumps(turns) for side, turns in ANSWERS.items()},
        {"prompt": QUESTION} | {side: [turns[0] | {"weight": 1}] for side, turns in ANSWERS.items()},
        {"prompt": "why"} | {side: QUESTION + turns for side, turns in ANSWERS.items()},
    ]
    for number, row in enumerate(rows):
        if not parquet:
            assert spoken(tokenizer, pack(tmp_path, [row], f"out{number}", tokenizer=tokenizer)) == EXPECTED
            continue
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        if number == 0:
            continue  # Arrow has no column of text and of parts
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
        offline.pack_file(
            tmp_path / "x.parquet", tmp_path / f"p{number}", max_tokens=512, pairs=True, tokenizer=tokenizer
        )
        (tree,) = offline.load(tmp_path / f"p{number}")
        samples = zip(tree.unpack(tree.input_ids), tree.unpack_terms(tree.term_target), strict=True)
        assert spoken(tokenizer, samples) == EXPECTED


def test_what_the_prompt_answered_is_not_trained(tmp_path, tokenizer):
    prompt = [*QUESTION, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "and?"}]
    for name, row in (
        ("on", {"prompt": prompt} | ANSWERS),
        ("whole", {"prompt": prompt} | {side: prompt + turns for side, turns in ANSWERS.items()}),
    ):
        samples = spoken(tokenizer, pack(tmp_path, [row], name, tokenizer=tokenizer))
        assert [terms for _, terms in samples] == ["so|", "no|"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": QUESTION} | {side: QUESTION[1:] + turns for side, turns in ANSWERS.items()},
            "line 1: chosen starts with a message of role 'user', and is not the prompt and more: they differ at",
        ),
        (
            {"prompt": QUESTION, **ANSWERS, "rejected": [{"role": "user", "content": "other"}, *ANSWERS["rejected"]]},
            "line 1: rejected starts with a message of role 'user'",
        ),
        (
            {"prompt": "why"} | ANSWERS,
            "line 1: prompt is text and chosen starts with a message of role 'assistant', so the",
        ),
        ({"chosen": "so", "rejected": "no"}, "line 1: chosen is text; a list of"),
    ],
)
def test_sides_that_would_hold_the_prompt_twice_or_lose_it(tmp_path, tokenizer, row, says):
    assert says in refused(tmp_path, [row], tokenizer=tokenizer)


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


def test_a_prompt_of_single_numbers_is_refused_and_a_count_is_none(tmp_path):
    sides = {"chosen": [1, 2], "rejected": [1, 3]}
    text = refused(tmp_path, [{"prompt_ids": 5, **sides}])
    assert "column 'prompt_ids' is named as the tokens of a prompt and holds single numbers" in text
    counted = pack(tmp_path, [{"prompt_tokens": 5, **sides}], "counted")
    assert counted == [([1, 2], [2]), ([1, 3], [3])]
    assert pack(tmp_path, [{"prompt_ids": 5, **sides}], "left", columns={"prompt_ids": ""}) == counted
