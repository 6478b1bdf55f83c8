"""What of a conversation is trained, by templates of several forms and tokenizers of two kinds: the content and the end
token of each of the assistant's turns, whatever the template prints around them."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="chat messages need transformers")
pytest.importorskip("tokenizers", reason="chat messages need tokenizers")

import tiny_tokenizers as tiny

from treepack.readers import ReadError, open_rollouts

MESSAGES = [
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "ah  yes  no"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": " yes"},
]
TOKENIZERS = {
    "letters": tiny.letters,
    "byte level": lambda folder, template: tiny.byte_level(folder, template, trim_offsets=False),
    "trimmed": tiny.byte_level,
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(tmp_path, request):
    return lambda template: TOKENIZERS[request.param](tmp_path / f"made-{len(list(tmp_path.iterdir()))}", template)


def read(tmp_path, tokenizer, row):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((sample,),) = open_rollouts(path, tokenizer=tokenizer).batches()
    return sample


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (tiny.CHATML, ["ah  yes  no<|im_end|>", " yes<|im_end|>"]),
        (tiny.HEADERS, ["ah  yes  no<|eot|>", " yes<|eot|>"]),
        (tiny.TRIMS, [" ah  yes  no </s>", " yes </s>"]),
        (tiny.MARKS_CONTENT, ["ah  yes  no<|im_end|>", " yes<|im_end|>"]),
        (tiny.MARKS_MORE, ["ah  yes  no<|im_end|>", " yes<|im_end|>"]),
    ],
    ids=["ChatML", "headers", "trims", "marks without the end", "marks with more"],
)
def test_content_and_end_token(tmp_path, tokenizer, template, expected):
    folder = tokenizer(template)
    sample = read(tmp_path, folder, {"messages": MESSAGES})
    text, runs = tiny.trained(folder, sample)
    assert runs == expected
    reference = tiny.transformers.AutoTokenizer.from_pretrained(folder)
    whole = reference.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)
    assert sample["input_ids"].tolist() == whole["input_ids"]
    assert text == reference.apply_chat_template(MESSAGES, tokenize=False)


def test_a_token_over_the_start_of_a_turn_is_context(tmp_path):
    """ " yes" is one token whose space is the template's: with offsets that leave the space out it seems to begin in
    the turn. A token whose space was said is trained."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    for number, trim in enumerate((False, True)):
        folder = tiny.byte_level(tmp_path / f"t{number}", template, trim_offsets=trim)
        for said, expected in (("yes no", [" no</s>"]), (" yes no", [" yes no</s>"]), ("ah", ["ah</s>"])):
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
            text, runs = tiny.trained(folder, read(tmp_path, folder, {"messages": messages}))
            assert text == f"user: ?</s>assistant: {said}</s>"
            assert runs == expected, (trim, said)


def test_an_end_token_of_another_name_after_a_tool_call(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *MESSAGES[2:]]
    folder = tokenizer(tiny.HEADERS)
    _, runs = tiny.trained(folder, read(tmp_path, folder, {"messages": messages}))
    assert runs == ['{"a": 1}<|eom|>', " yes<|eot|>"]


def test_an_empty_answer_trains_its_end_token(tmp_path, tokenizer):
    for template in (tiny.CHATML, tiny.MARKS_CONTENT, tiny.MARKS_MORE):
        folder = tokenizer(template)
        messages = [MESSAGES[0], {"role": "assistant", "content": ""}]
        _, runs = tiny.trained(folder, read(tmp_path, folder, {"messages": messages}))
        assert runs == ["<|im_end|>"]


def test_thoughts_that_are_dropped(tmp_path, tokenizer):
    """By difference a template that rewrites what was said is refused from the second answer on; one answer is fine."""
    messages = [MESSAGES[0], {"role": "assistant", "content": "hm</think>no"}]
    folder = tokenizer(tiny.DROPS)
    _, runs = tiny.trained(folder, read(tmp_path, folder, {"messages": messages}))
    assert runs == ["hm</think>no<|im_end|>"]
    with pytest.raises(ReadError, match=r"line 1: the chat template renders message 1 differently once more follow"):
        read(tmp_path, folder, {"messages": [*messages, *MESSAGES[2:]]})


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.MARKS_CONTENT, tiny.MARKS_MORE])
@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"train": 0}])
def test_a_message_that_is_not_to_be_trained(tmp_path, tokenizer, template, flag):
    folder = tokenizer(template)
    first, second = MESSAGES[1] | flag, MESSAGES[3] | {name: not value for name, value in flag.items()}
    sample = read(tmp_path, folder, {"messages": [MESSAGES[0], first, MESSAGES[2], second]})
    assert tiny.trained(folder, sample)[1] == [" yes<|im_end|>"]
    plain = read(tmp_path, folder, {"messages": MESSAGES})
    assert sample["input_ids"].tolist() == plain["input_ids"].tolist()
    sample = read(tmp_path, folder, {"messages": [MESSAGES[0], second, MESSAGES[2], first]})
    assert tiny.trained(folder, sample)[1] == [" yes<|im_end|>"]
    # What a user said is not trained anyway.
    sample = read(tmp_path, folder, {"messages": [MESSAGES[0] | flag, *MESSAGES[1:]]})
    assert np.array_equal(sample["completion_mask"], plain["completion_mask"])


def test_a_template_that_prints_no_text(tmp_path):
    """Templates for images walk over parts; over text they walk letter by letter and print nothing."""
    template = (
        "{% for m in messages %}<|im_start|>{% for p in m.content %}{{ p['text'] }}{% endfor %}<|im_end|>{% endfor %}"
    )
    folder = tiny.letters(tmp_path / "t", template)
    with pytest.raises(ReadError, match="its chat template does not print the content of an assistant's message"):
        read(tmp_path, folder, {"messages": MESSAGES})


def test_a_template_that_wants_a_system_message(tmp_path):
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + tiny.CHATML
    folder = tiny.letters(tmp_path / "t", template)
    sample = read(tmp_path, folder, {"messages": [{"role": "system", "content": "be"}, *MESSAGES[:2]]})
    assert tiny.trained(folder, sample)[1] == ["ah  yes  no<|im_end|>"]


def test_arguments_as_the_template_takes_them(tmp_path):
    """Most templates take objects; one that joins text gets the text that the server wrote, one that prints an object
    as Python does gets JSON."""
    said = '{"b":1, "a": null}'
    call = {"type": "function", "function": {"name": "f", "arguments": said}}
    messages = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    forms = {
        "{{ c.function.arguments | tojson }}": '{"b": 1, "a": null}',
        "{{ '=' + c.function.arguments }}": "=" + said,
        "{{ c.function.arguments }}": said,
    }
    for number, (form, expected) in enumerate(forms.items()):
        template = tiny.CHATML.replace("{{ c.function.arguments | tojson }}", form)
        folder = tiny.letters(tmp_path / f"t{number}", template)
        _, runs = tiny.trained(folder, read(tmp_path, folder, {"messages": messages}))
        assert runs == [f"<call>f {expected}</call><|im_end|>"]
