"""One clean-up of messages: the same rows give the same tokens from every format, whatever the format does to them."""

import json

import pytest

pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
pytest.importorskip("transformers", reason="chat messages need transformers")
pytest.importorskip("tokenizers", reason="chat messages need tokenizers")

import tiny_tokenizers as tiny  # noqa: E402

from treepack.readers import ReadError, messages, open_rollouts  # noqa: E402
from treepack.readers.plain import plain_values  # noqa: E402

USER = {"role": "user", "content": "q"}
FOUND = {"role": "assistant", "content": "ok"}


def call(name, arguments, **more):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


#: Rows whose objects have other keys in every row, as Arrow fills them up; a key of each kind that has to stay.
#: Keys are in one order over all rows: an Arrow struct has one.
ROWS = [
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call("find", {"city": "Rom", "near": {"km": 3}})]},
            {"role": "tool", "content": "3 hits", "name": "find", "tool_call_id": "c1"},
            FOUND,
        ],
        "tools": [
            tool("find", city={"type": "string", "default": "Rom"}, path={"type": "string", "default": "."}),
            tool("read", path={"type": "string"}, unit={"type": ["string", "null"], "default": None, "const": None}),
        ],
    },
    {
        "messages": [
            {"role": "system", "content": "be"},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call("book", {"near": {"m": 7}, "seats": [1, 2]})]},
            FOUND | {"weight": 0},
        ],
        "tools": [tool("book", seats={"type": "array", "items": {"type": "integer"}}, kind={"enum": ["a", None]})],
    },
    {"messages": [USER, FOUND], "tools": None},
]


def with_rewards(rows):
    return [row | {"reward": float(number)} for number, row in enumerate(rows)]


def jsonl(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def pandas_parquet(folder, rows):
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    pandas.DataFrame(rows).to_parquet(folder / "frame.parquet")
    return folder / "frame.parquet"


def json_text(folder, rows):
    """Messages and tools as text, as some tools store what Arrow has no type for."""
    for row in rows:
        row |= {name: json.dumps(row[name]) for name in ("messages", "tools")}
    return parquet(folder, rows)


def json_parts(folder, rows):
    """Each call and each tool as text of its own, arguments as text within."""
    for row in rows:
        turns = [dict(message) for message in row["messages"]]
        for turn in turns:
            if "tool_calls" in turn:
                turn["tool_calls"] = [json.dumps(text_arguments(call)) for call in turn["tool_calls"]]
        row |= {"messages": turns, "tools": row["tools"] and [json.dumps(tool) for tool in row["tools"]]}
    return jsonl(folder, rows)


def text_arguments(call):
    return call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}


def json_features(folder, rows):
    datasets = pytest.importorskip("datasets", reason="folders of datasets need datasets")
    datasets.disable_progress_bars()
    json_ = getattr(datasets, "Json", None) or pytest.skip("Json() features are of datasets 5")
    message = {name: datasets.Value("string") for name in ("role", "content", "name", "tool_call_id")}
    message |= {"tool_calls": json_(), "weight": datasets.Value("int64")}
    features = {
        "messages": datasets.List(message),
        "tools": datasets.List(json_()),
        "reward": datasets.Value("float64"),
    }
    every = [row | {"messages": [dict.fromkeys(message) | turn for turn in row["messages"]]} for row in rows]
    data = datasets.Dataset.from_list(every, features=datasets.Features(features))
    data.save_to_disk(str(folder / "data"))
    return folder / "data"


def dataset(folder, rows):
    datasets = pytest.importorskip("datasets", reason="folders of datasets need datasets")
    datasets.disable_progress_bars()
    datasets.Dataset(pa.Table.from_pylist(rows)).save_to_disk(str(folder / "plain"))
    return folder / "plain"


def rows_in_memory(folder, rows):
    return rows


def frame(folder, rows):
    return pytest.importorskip("pandas", reason="frames need pandas").DataFrame(rows)


def arrow_table(folder, rows):
    return pa.Table.from_pylist(rows)


def dataset_in_memory(folder, rows):
    return pytest.importorskip("datasets", reason="data sets need datasets").Dataset(pa.Table.from_pylist(rows))


FILES = [jsonl, parquet, pandas_parquet, json_text, json_parts, json_features, dataset]


@pytest.mark.parametrize("write", [*FILES, rows_in_memory, frame, arrow_table, dataset_in_memory])
def test_the_same_tokens_from_every_format(tmp_path, write):
    folder = tiny.letters(tmp_path / "tokenizer", tiny.CHATML)
    (batch,) = open_rollouts(write(tmp_path, with_rewards(ROWS)), tokenizer=folder).batches()
    texts = [tiny.trained(folder, sample)[0] for sample in batch]
    runs = [tiny.trained(folder, sample)[1] for sample in batch]
    tools = [row["tools"] and "".join(json.dumps(tool) + "\n" for tool in row["tools"]) for row in ROWS]
    start, end = "<|im_start|>", "<|im_end|>"
    asked = f"{start}user\nq{end}\n{start}assistant\n"
    find = f'<call>find {{"city": "Rom", "near": {{"km": 3}}}}</call>{end}'
    book = f'<call>book {{"near": {{"m": 7}}, "seats": [1, 2]}}</call>{end}'
    answer = f"{start}assistant\nok{end}\n"
    assert texts == [
        f"{start}system\n{tools[0]}{end}\n{asked}{find}\n{start}tool\n3 hits{end}\n{answer}",
        f"{start}system\n{tools[1]}{end}\n{start}system\nbe{end}\n{asked}{book}\n{answer}",
        f"{asked}ok{end}\n",
    ]
    assert runs == [[find, f"ok{end}"], [book], [f"ok{end}"]]


def test_tools_in_some_lines(tmp_path):
    """A line without tools has none; where the first line has none and a later one does, they would be lost."""
    folder = tiny.letters(tmp_path / "tokenizer", tiny.CHATML)
    bare = {"messages": ROWS[2]["messages"]}
    (first, second) = next(open_rollouts(jsonl(tmp_path, [ROWS[0], bare]), tokenizer=folder).batches())
    assert "find" in tiny.trained(folder, first)[0]
    assert tiny.trained(folder, second)[0] == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    path = jsonl(tmp_path, [bare, ROWS[0]])
    with pytest.raises(ReadError, match=r"line 2: it has 'tools', which the first line has not; .* --column tools="):
        list(open_rollouts(path, tokenizer=folder).batches())
    assert len(next(open_rollouts(path, tokenizer=folder, columns={"tools": ""}).batches())) == 2


# --- by eye ---------------------------------------------------------------------------------------------------------


def cleaned(value):
    return messages.clean_messages(value, "FILE, line 3").messages


def test_nulls_go_at_every_depth_and_what_means_something_stays():
    filled = {"role": "assistant", "content": None, "name": None, "tool_calls": [call("f", {"a": {"b": None}}, x=None)]}
    assert cleaned([filled]) == [{"role": "assistant", "tool_calls": [call("f", {"a": {}})]}]
    # Text was written by a model, not filled by Arrow; a list is never filled.
    said = [FOUND | {"tool_calls": [call("f", '{"a": null, "b": [1, null]}')]}]
    assert cleaned(said)[0]["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": [1, None]}
    schema = {"type": ["string", "null"], "default": None, "enum": ["a", None], "const": None, "items": None}
    properties = {"default": None, "x": schema, "y": {"default": {"z": None}}, "gone": None}
    parameters = {"type": "object", "properties": properties, "$defs": None}
    (tool,) = messages.clean_tools([{"function": {"name": "f", "strict": None, "parameters": parameters}}], "")
    kept = {"type": ["string", "null"], "default": None, "enum": ["a", None], "const": None}
    properties = {"x": kept, "y": {"default": {"z": None}}}
    assert tool == {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def test_what_arrow_filled_is_distinguished_from_what_was_written():
    """`default: null` of a parameter that may be null, or of one for which no row has another default."""
    may = {"type": ["string", "null"], "default": None, "const": None}
    rows = [
        {"a": {"type": "integer", "default": 3}, "b": {"type": "string", "default": None}, "c": may},
        {"a": {"type": "integer"}, "b": {"type": "string", "default": None}, "c": may},
        {"a": {"type": "integer"}, "b": {"type": "string", "default": None}, "c": may | {"default": "x"}},
    ]
    array = pa.array(rows)
    assert plain_values(array) == rows
    array = pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int64()))
    assert plain_values(array) == [{"x": 1}, None]


def test_content_in_parts():
    parts = [
        {"type": "text", "text": "a ", "image_url": None},
        "b",
        {"text": "c"},
        {"type": "output_text", "text": "d"},
    ]
    assert cleaned([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a bcd"}]
    assert cleaned([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_calls_and_tools_that_are_not_there():
    assert cleaned([FOUND | {"tool_calls": []}]) == [FOUND]
    assert messages.clean_tools([], "") is messages.clean_tools(None, "") is messages.clean_tools("[]", "") is None
    assert cleaned([FOUND | {"tool_calls": [call("f", "")]}])[0]["tool_calls"] == [call("f", {})]


def test_nothing_given_is_changed():
    given = [FOUND | {"weight": 0, "tool_calls": [call("f", '{"a": 1}', x=None)], "content": [{"text": "ok"}]}]
    before = json.dumps(given)
    turns = messages.clean_messages(given, "")
    assert json.dumps(given) == before
    assert turns.trained == [False]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("hello", "messages is text; a list of"),
        ([], "messages is an empty list"),
        ([7], "message 0 has no role; it is a number, needed are role and content"),
        ([USER, {"from": "gpt", "value": "x"}], "message 1 has no role; it has from, value, needed are"),
        ([{"role": None}], "message 0 has no role; it has nothing, needed are"),
        ([{"role": "user", "content": None}], "message 0 has no content; it has role"),
        ([{"role": "assistant", "tool_calls": []}], "message 0 has no content; it has role"),
        ([{"role": "user", "content": {"a": 1}}], "message 0 has content that is an object; text, or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "message 0: part 1 of content is of type 'image_url'; only parts of text can be packed",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0: part 0 of content has type; {"),
        ([{"role": "user", "content": [3]}], "message 0: part 0 of content is a number; text is needed"),
        ([FOUND | {"weight": 0.5}], "message 0 has weight 0.5; allowed are 0 and false (not trained), 1 and true"),
        ([FOUND | {"train": "no"}], "message 0 has train 'no'; allowed are 0 and false"),
        ([FOUND | {"weight": 0, "train": True}], "message 0 has weight 0 and train True, which do not agree"),
        ([USER | {"weight": 1}], "message 0 of role 'user' has weight 1; only messages of the role 'assistant'"),
        (
            [FOUND | {"tool_calls": [call("f", "{a: 1}")]}],
            "message 0: tool_calls[0]: arguments is text that is no JSON (Expecting property name",
        ),
        ([FOUND | {"tool_calls": [call("f", "[1]")]}], "message 0: tool_calls[0]: arguments is JSON text of a list"),
        ([FOUND | {"tool_calls": ["f"]}], "message 0: tool_calls[0] is text; an object with the name"),
    ],
)
def test_what_cannot_be_meant(value, says):
    with pytest.raises(ReadError) as error:
        cleaned(value)
    assert str(error.value).startswith(f"FILE, line 3: {says}")


def test_tools_that_are_none():
    for value, says in (("f", "tools is text"), (7, "tools is a number"), (["f"], "tools[0] is text; an object")):
        with pytest.raises(ReadError) as error:
            messages.clean_tools(value, "FILE, line 3")
        assert str(error.value).startswith(f"FILE, line 3: {says}")
