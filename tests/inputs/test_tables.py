"""Containers: DataFrames, Arrow tables, slices of a data set and text labels pack as a list of dicts does."""

import numpy as np
import pytest
from helpers import says

import treepack

ROWS = [
    {
        "input_ids": [1, 2, 3, 4],
        "completion_mask": [0, 1, 1, 1],
        "old_log_probs": [0.0, -0.5, -4.0, -1.0],
        "weight": 1.5,
    },
    {"input_ids": [1, 2, 5], "completion_mask": [0, 0, 1], "old_log_probs": [0.0, 0.0, -2.0], "weight": 2.5},
    {"input_ids": [1, 2], "completion_mask": [0, 1], "old_log_probs": [0.0, -0.75], "weight": 0.5},
]
GROUPS = ["a", "b", "a"]


def rows():
    return [row | {"group_id": group} for row, group in zip(ROWS, GROUPS, strict=True)]


def columns():
    return {name: [row[name] for row in rows()] for name in rows()[0]}


def pandas_frame():
    return pytest.importorskip("pandas").DataFrame(rows())


def arrow_table():
    return pytest.importorskip("pyarrow").table(columns())


def record_batch():
    return pytest.importorskip("pyarrow").RecordBatch.from_pylist(rows())


def parquet_through_pandas(tmp_path_factory=None):
    import io

    pytest.importorskip("pyarrow")
    file = io.BytesIO()
    pandas_frame().to_parquet(file)
    return pytest.importorskip("pandas").read_parquet(file)  # lists come as arrays in a column of objects


def data_set_slice():
    return pytest.importorskip("datasets").Dataset.from_list(rows())[:]


def data_set():
    return pytest.importorskip("datasets").Dataset.from_list(rows())


def object_arrays():
    out = {}
    for name, values in columns().items():
        out[name] = np.empty(3, object)
        out[name][:] = values
    return out


CONTAINERS = [pandas_frame, arrow_table, record_batch, parquet_through_pandas, data_set_slice, data_set, columns]


@pytest.mark.parametrize("make", [*CONTAINERS, object_arrays])
def test_it_packs_as_a_list_of_dicts_does(make):
    (wanted,) = treepack.pack(rows(), max_tokens=16)
    (tree,) = treepack.pack(make(), max_tokens=16)
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5]
    for name in ("input_ids", "subtree_end", "term_target", "term_sample", "sample_index"):
        assert getattr(tree, name).tolist() == getattr(wanted, name).tolist()
    assert tree.samples["weight"].tolist() == [1.5, 2.5, 0.5]
    assert tree.samples["group_id"].tolist() == [0, 1, 0]
    assert tree.terms["old_log_probs"].tolist() == wanted.terms["old_log_probs"].tolist()


def test_numbers_keep_their_dtype():
    pa, pd = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    fields = {"input_ids": pa.list_(pa.int32()), "x": pa.list_(pa.float64()), "k": pa.list_(pa.list_(pa.int16(), 2))}
    schema = pa.schema({**fields, "w": pa.float64(), "b": pa.list_(pa.bool_())})
    row = {"input_ids": [1, 2], "x": [0.5, 1.5], "k": [[1, 2], [3, 4]], "w": 0.25, "b": [True, True]}
    for table in (pa.Table.from_pylist([row] * 2, schema), pa.Table.from_pylist([row] * 3, schema).slice(1)):
        (tree,) = treepack.pack(table, max_tokens=8)
        assert [tree.terms[name].dtype for name in ("x", "k", "b")] == [np.float64, np.int16, np.bool_]
        assert tree.terms["k"].tolist() == [[3, 4]] * 2
        assert tree.samples["w"].dtype == np.float64
    frame = pd.DataFrame({"input_ids": [[1, 2], [1, 3]], "w": [0.25, 0.5], "n": [1, 2]})
    (tree,) = treepack.pack(frame, max_tokens=8)
    assert (tree.samples["w"].dtype, tree.samples["n"].dtype) == (np.float64, np.int64)


def test_attention_masks_of_a_slice_cut_padding_row_by_row():
    batch = {"input_ids": [[0, 7, 8], [7, 9]], "attention_mask": [[0, 1, 1], [1, 1]], "advantage": [0.5, 1.0]}
    (tree,) = treepack.pack(batch, max_tokens=8)
    assert tree.input_ids.tolist() == [7, 8, 9]
    assert tree.samples["advantage"].tolist() == [0.5, 1.0]


def test_one_row_of_a_slice_is_a_sample():
    """Nothing can be padded to the length of another one; a mask is heeded, and arrays are a batch as ever."""
    slices = [
        {"input_ids": [[1, 2, 3]], "completion_mask": [[0, 1, 1]], "advantage": [0.5], "group_id": ["a"]},
        pytest.importorskip("datasets").Dataset.from_list([rows()[1], rows()[0]])[:1],
    ]
    for batch, ids, terms in zip(slices, ([1, 2, 3], [1, 2, 5]), ([2, 3], [5]), strict=True):
        (tree,) = treepack.pack(batch, max_tokens=8)
        assert (tree.input_ids.tolist(), tree.term_target.tolist()) == (ids, terms)
        assert tree.samples["group_id"].tolist() == [0]
    (tree,) = treepack.pack({"input_ids": [[1, 2, 0]], "attention_mask": [[1, 1, 0]]}, max_tokens=8)
    assert tree.input_ids.tolist() == [1, 2]
    with pytest.raises(treepack.PackError, match="a padded batch needs an attention_mask"):
        treepack.pack({"input_ids": np.array([[1, 2, 3]])}, max_tokens=8)
    with pytest.raises(treepack.PackError, match="sample 0: it has a column 'zork' and no completion_mask"):
        treepack.pack({"input_ids": [[1, 2, 3]], "zork": [[0, 0, 1]]}, max_tokens=8)


def test_rows_of_one_length_are_a_padded_batch_and_say_so():
    with pytest.raises(treepack.PackError, match="a padded batch needs an attention_mask"):
        treepack.pack({"input_ids": [[1, 2], [1, 3]]}, max_tokens=8)


@pytest.mark.parametrize(
    ("labels", "codes"),
    [
        (np.array(["b", "a", "b"]), [0, 1, 0]),
        (np.array(["b", "a", "b"], object), [0, 1, 0]),
        (np.array([b"b", b"a", b"b"]), [0, 1, 0]),
        ([np.str_("b"), "a", np.array("b")], [0, 1, 0]),
        (np.array([7, 5, 7]), [7, 5, 7]),
    ],
)
def test_text_labels_of_numpy(labels, codes):
    """CASE 73, in a list, in padded and flat batches, in a stream."""
    ids = np.array([[1, 2], [1, 3], [1, 4]])
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "group_id": labels}
    flat = {"input_ids": ids.ravel(), "cu_seqlens": [0, 2, 4, 6], "group_id": labels}
    listed = [{"input_ids": x, "group_id": label} for x, label in zip(ids, labels, strict=True)]
    for samples in (batch, flat, listed):
        (tree,) = treepack.pack(samples, max_tokens=8)
        assert tree.samples["group_id"].tolist() == codes
    packer = treepack.Packer(max_tokens=8)
    for sample in listed:
        packer.add(sample)
    assert packer.flush()[0][0].samples["group_id"].tolist() == codes


def test_what_is_wrong_with_a_table():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame([[[1, 2], 1, 2]], columns=["input_ids", "x", "x"])
    with pytest.raises(treepack.PackError, match="the table has 2 columns named 'x'; rename one"):
        treepack.pack(frame, max_tokens=8)
    with pytest.raises(treepack.PackError) as caught:
        treepack.pack({"input_ids": [[1, 2], [1]], "x": [1.0]}, max_tokens=8)
    says(caught, "the columns have different numbers of rows: {'input_ids': 2, 'x': 1}")
    with pytest.raises(treepack.PackError, match="column 'x' is a float; beside lists of samples a list is needed"):
        treepack.pack({"input_ids": [[1, 2], [1]], "x": 1.0}, max_tokens=8)
    with pytest.raises(TypeError, match="sample 0: question is text"):
        treepack.pack(pd.DataFrame({"input_ids": [[1, 2]], "question": ["x"]}), max_tokens=8)
    with pytest.raises(treepack.PackError, match="sample 1: it has a column 'zork' and no completion_mask"):
        treepack.pack(pd.DataFrame({"input_ids": [[1, 2], [1, 2, 3]], "zork": [[1, 1], [1, 0, 1]]}), max_tokens=8)
    assert len(treepack.pack(pd.DataFrame({"input_ids": []}), max_tokens=8)) == 0


def test_nothing_is_imported_for_others():
    import subprocess
    import sys

    code = "import sys, treepack; treepack.pack([{'input_ids': [1, 2]}], max_tokens=8)\n"
    code += "assert not {'pandas', 'pyarrow', 'datasets', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
