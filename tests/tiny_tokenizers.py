"""Tokenizer folders made on the spot, and chat templates in the forms that models have. Nothing is downloaded."""

import tokenizers
import transformers

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>", "<|eom|>", "<s>", "</s>")

#: The ChatML form: a newline after the end token, which nobody generated.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Headers between special tokens; another end token after a call of a tool.
HEADERS = (
    "{{ '<s>' }}{% for m in messages %}<|start|>{{ m.role }}<|sep|>\n\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<|eom|>{% else %}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|sep|>\n\n{% endif %}"
)
#: Trims what was said, wants turns that alternate, and ends in an end of text with a space in front.
TRIMS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[Q] {{ m.content | trim }} [A]{% else %} {{ m.content | trim }} </s>\n\n{% endif %}"
    "{% endfor %}"
)
#: Marks what is generated, but leaves the end token out.
MARKS_CONTENT = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role + '\n' }}\n    {%- if m.role == 'assistant' %}\n"
    "        {%- generation %}\n        {{- m.content }}\n        {%- endgeneration %}\n    {%- else %}\n"
    "        {{- m.content }}\n    {%- endif %}\n    {{- '<|im_end|>\n' }}\n{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
#: Marks the newline after the end token as well.
MARKS_MORE = MARKS_CONTENT.replace("{{- m.content }}\n        {%- endg", "{{- m.content + '<|im_end|>\n' }}{%- endg")
MARKS_MORE = MARKS_MORE.replace(
    "{{- '<|im_end|>\n' }}", "{%- if m.role != 'assistant' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
#: Drops the thoughts of every answer but the last, as models that reason do.
DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}{% else %}"
    "{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters(folder, template):
    """A tokenizer of one token per letter; its offsets cover the text."""
    vocabulary = {letter: number for number, letter in enumerate(map(chr, (10, *range(32, 127))))}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return _save(folder, tokenizer, template)


def byte_level(folder, template, trim_offsets=True):
    """A byte-level BPE with words that begin with a space; its offsets leave spaces out."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s"), ("n", "o"), ("Ġ", "no")]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return _save(folder, tokenizer, template)


def _save(folder, tokenizer, template):
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.save_pretrained(folder)
    return str(folder)


def trained(folder, sample):
    """The text of a sample, and the texts of its runs of trained tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids, mask = sample["input_ids"].tolist(), sample["completion_mask"].tolist()
    runs = []
    for number, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (not number or not mask[number - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return _text(tokenizer, ids), [_text(tokenizer, run) for run in runs]


def _text(tokenizer, ids):
    joined = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    if tokenizer.backend_tokenizer.decoder is None:  # letters: a space between any two tokens
        names = tokenizer.convert_ids_to_tokens(ids)
        joined = "".join(names)
    return joined
