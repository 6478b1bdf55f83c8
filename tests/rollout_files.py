"""The same rows as files of every format, and what reading them says: for the tests of columns."""

import json

import numpy as np
import pytest

import treepack
from treepack.readers import ReadError, open_rollouts

pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")


def jsonl(folder, *rows):
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(folder, *rows):
    path = folder / "rollouts.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def npz(folder, *rows):
    path = folder / "rollouts.npz"
    tokens = {"input_ids": "tokens"}
    flat = {tokens.get(name, name): np.concatenate([np.array(row[name]) for row in rows]) for name in rows[0]}
    np.savez(path, offsets=np.cumsum([0] + [len(row["input_ids"]) for row in rows]), **flat)
    return path


def dataset(folder, *rows):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder / "set"))
    return folder / "set"


WRITERS = [jsonl, parquet, npz, dataset]


def message(path, **options):
    with pytest.raises(ReadError) as caught:
        for _ in open_rollouts(path, **options).batches():
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def terms(path, **options):
    samples = [sample for batch in open_rollouts(path, **options).batches() for sample in batch]
    return [target for tree in treepack.pack(samples, max_tokens=99) for target in tree.term_target.tolist()]
