"""What the tests of rows that hold several samples share: rows as tools write them, files of them, what is read."""

import json

import numpy as np
import pytest

from treepack.readers import ReadError, open_rollouts


def write(folder, format, rows):
    path = folder / f"rows.{format}"
    if format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif format == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        pa = pytest.importorskip("pyarrow", reason="Parquet and datasets need pyarrow")
        table = pa.Table.from_pylist(rows)
        if format == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=1)
        else:
            datasets = pytest.importorskip("datasets", reason="folders of datasets need datasets")
            datasets.disable_progress_bars()
            datasets.Dataset(table).save_to_disk(str(path))
    return path


def read(path, samples=1024, start=0, **options):
    return [sample for batch in open_rollouts(path, **options).batches(samples, start=start) for sample in batch]


def plain(sample):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def close(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(map(plain, got), wanted, strict=True):
        assert one == {
            name: pytest.approx(value, nan_ok=True) if isinstance(value, float | list) else value
            for name, value in other.items()
        }


def step(prompt, answer, log_probs, **more):
    """A step of verifiers and of prime-rl before its traces."""
    tokens = {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": answer,
        "completion_mask": [1] * len(answer),
        "completion_logprobs": log_probs,
        "overlong_prompt": False,
        "is_truncated": False,
        "routed_experts": None,
    }
    said = {"role": "user", "content": "?"}
    response = {"id": "r", "message": {"role": "assistant", "content": "!", "tokens": {**tokens}}}
    return {"prompt": [said], "completion": [said], "response": response, "tokens": tokens, **more}


TRAJECTORIES = [
    {
        "example_id": 4,
        "prompt": [{"role": "user", "content": "?"}],
        "completion": [{"role": "assistant", "content": "!"}],
        "reward": 1.0,
        "trajectory": [
            step([1, 2], [3, 4], [-0.5, -0.25], reward=None, advantage=0.75),
            step([1, 2, 3, 4, 5], [6], [-0.125], reward=None, advantage=0.5),
            step([1, 2, 9], [6, 7], [-1.0, -2.0], reward=None, advantage=-0.5),  # its history was rewritten
        ],
    },
    {
        "example_id": 5,
        "prompt": [{"role": "user", "content": "?"}],
        "completion": [{"role": "assistant", "content": "!"}],
        "reward": 0.0,
        "trajectory": [step([8], [9, 9], [-0.5, -0.5], reward=None, advantage=-1.0)],
    },
]


def sample(prompt, answer, log_probs=None, **more):
    out = {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}
    if log_probs is not None:
        out["old_log_probs"] = [0.0] * len(prompt) + log_probs
    return out | more


EXPECTED = [
    sample([1, 2], [3, 4], [-0.5, -0.25], reward=1.0, advantage=0.75, group_id=4),
    sample([1, 2, 3, 4, 5], [6], [-0.125], reward=1.0, advantage=0.5, group_id=4),
    sample([1, 2, 9], [6, 7], [-1.0, -2.0], reward=1.0, advantage=-0.5, group_id=4),
    sample([8], [9, 9], [-0.5, -0.5], reward=0.0, advantage=-1.0, group_id=5),
]


def choice(index, ids, log_probs, **more):
    content = [
        {"token": f"token_id:{token}", "logprob": lp, "top_logprobs": []}
        for token, lp in zip(ids, log_probs, strict=True)
    ]
    message = {"role": "assistant", "content": "!"}
    return {"index": index, "message": message, "logprobs": {"content": content}, "token_ids": ids, **more}


def message(tmp_path, rows, **options):
    with pytest.raises(ReadError) as caught:
        read(write(tmp_path, "jsonl", rows), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(tmp_path / "rows.jsonl"), "FILE")
