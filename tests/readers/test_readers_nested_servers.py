"""Captured responses of servers, vLLM and SGLang: a sample for each answer, with the prompt that stands beside it."""

import pytest
from nested_rows import choice, close, read, sample, write

from treepack.readers import ReadError


def test_chat_responses_of_vllm(tmp_path):
    rows = [
        {
            "id": "chatcmpl-1",
            "prompt_token_ids": [1, 2, 3],
            "choices": [choice(0, [4, 5], [-0.5, -0.25]), choice(1, [6], [-1.0])],
            "usage": {"prompt_tokens": 3, "completion_tokens": 3},
        },
        {"id": "chatcmpl-2", "prompt_token_ids": [7], "choices": [choice(0, [8], [-2.0])], "usage": None},
    ]
    expected = [sample([1, 2, 3], [4, 5], [-0.5, -0.25]), sample([1, 2, 3], [6], [-1.0]), sample([7], [8], [-2.0])]
    for format in ("jsonl", "parquet"):
        close(read(write(tmp_path, format, rows)), expected)


def test_completions_of_vllm(tmp_path):
    def completion(prompt, ids, log_probs):
        entry = {"tokens": ["x"] * len(ids), "token_logprobs": log_probs, "top_logprobs": None, "text_offset": [0]}
        return {"text": "!", "logprobs": entry, "prompt_token_ids": prompt, "token_ids": ids}

    rows = [{"id": "cmpl-1", "choices": [completion([1, 2], [3], [-0.5]), completion([4], [5, 6], [-1.0, -2.0])]}]
    close(read(write(tmp_path, "jsonl", rows)), [sample([1, 2], [3], [-0.5]), sample([4], [5, 6], [-1.0, -2.0])])


def test_outputs_of_vllm_without_a_server(tmp_path):
    """`LLM.generate`, as JSON: of each token the log-probs of some tokens, by id."""

    def at(token, log_prob):
        return {str(token): {"logprob": log_prob, "rank": 1, "decoded_token": "x"}, "77": {"logprob": -9.0, "rank": 2}}

    outputs = [
        {
            "index": 0,
            "text": "!",
            "token_ids": [3, 4],
            "cumulative_logprob": -3.0,
            "logprobs": [at(3, -1.0), at(4, -2.0)],
        },
        {"index": 1, "text": "!", "token_ids": [5], "cumulative_logprob": -0.5, "logprobs": [at(5, -0.5)]},
    ]
    rows = [{"request_id": "1", "prompt": "?", "prompt_token_ids": [1, 2], "outputs": outputs, "finished": True}]
    close(read(write(tmp_path, "jsonl", rows)), [sample([1, 2], [3, 4], [-1.0, -2.0]), sample([1, 2], [5], [-0.5])])


def test_responses_of_sglang(tmp_path):
    """Ids beside what the server says of the request, or in it: [log-prob, id, text] of each token."""
    meta = {
        "id": "x",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, "d"]],
    }
    expected = [sample([1, 2], [3, 4], [-0.5, -0.25])]
    whole = meta | {"input_token_logprobs": [[None, 1, "a"], [-7.0, 2, "b"]]}
    close(read(write(tmp_path, "jsonl", [{"text": "!", "output_ids": [3, 4], "meta_info": whole}])), expected)
    close(read(write(tmp_path, "jsonl", [{"text": "!", "meta_info": whole}])), expected)
    close(
        read(write(tmp_path, "json", [{"prompt_token_ids": [1, 2], "output_ids": [3, 4], "meta_info": meta}])), expected
    )
    chat = {"choices": [{"index": 0, "prompt_token_ids": [1, 2], "meta_info": meta}]}
    close(read(write(tmp_path, "jsonl", [chat])), expected)
    part = meta | {"input_token_logprobs": [[-7.0, 2, "b"]]}
    with pytest.raises(
        ReadError, match=r"line 1: meta_info.prompt_tokens is 2, and 1 token ids are there; .*logprob_start"
    ):
        read(write(tmp_path, "jsonl", [{"text": "!", "output_ids": [3, 4], "meta_info": part}]))


def test_a_request_beside_its_answers(tmp_path):
    """The ids of the request are the prompt of what the server answered, and no whole sample."""
    row = {"input_ids": [1, 2], "choices": [{"token_ids": [3]}, {"token_ids": [4]}]}
    close(read(write(tmp_path, "jsonl", [row])), [sample([1, 2], [3]), sample([1, 2], [4])])
