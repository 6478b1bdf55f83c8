"""A mask under another name, without `completion_mask`: refused, since it would train every token without a word."""

import json

import numpy as np
import pytest
from helpers import says

import treepack
from treepack.readers import USUAL, open_rollouts

OTHERS = ["labels", "loss_mask", "response_mask", "assistant_masks", "assistant_mask", "action_mask"]
IDS = [5, 6, 7]
TRAINED = [0, 0, 1]


def value(name):
    """What the column holds where the last of three tokens is trained."""
    return np.array([-100, -100, 7] if name == "labels" else TRAINED)


def calls(columns):
    """The same two samples as a list (of lists, of arrays that are ready), padded and flat, each with what it says."""
    sample = {"input_ids": np.array(IDS), **columns}
    row = {name: np.stack([x, x]) for name, x in sample.items()}
    flat = {name: np.concatenate([x, x]) for name, x in sample.items()}
    yield "sample 0: it has", [{name: x.tolist() for name, x in sample.items()}] * 2
    yield "sample 0: it has", [sample] * 2
    yield "the batch has", {**row, "attention_mask": np.ones((2, 3), int)}
    yield "the batch has", {**flat, "cu_seqlens": [0, 3, 6]}


def test_the_names_are_those_of_the_readers():
    assert {*USUAL["completion_mask"][1:], *USUAL["labels"]} == set(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_refused_in_every_form(name):
    given = "labels != -100" if name == "labels" else name
    for where, samples in calls({name: value(name)}):
        named = {"per_token": [name]} if "cu_seqlens" in samples else {}
        for keywords in ({}, named):
            with pytest.raises(treepack.PackError) as caught:
                treepack.pack(samples, max_tokens=8, **keywords)
            says(caught, f"{where} a column {name!r} and no completion_mask", f"completion_mask = {given}")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("mask", [TRAINED, [1, 1, 1]])
def test_beside_a_completion_mask_it_is_a_column(name, mask):
    for _, samples in calls({name: value(name), "completion_mask": np.array(mask)}):
        named = {"per_token": [name]} if "cu_seqlens" in samples else {}
        (tree,) = treepack.pack(samples, max_tokens=8, **named)
        targets = [7] if mask == TRAINED else [6, 7]
        assert tree.term_target.tolist() == targets * 2
        assert tree.terms[name].tolist() == value(name)[-len(targets) :].tolist() * 2


def test_a_label_of_the_whole_sample_is_no_mask():
    classes = np.array([1, 0])
    batches = [
        [{"input_ids": IDS, "labels": int(label)} for label in classes],
        {"input_ids": np.array([IDS, IDS]), "attention_mask": np.ones((2, 3), int), "labels": classes},
        {"input_ids": np.array(IDS * 2), "cu_seqlens": [0, 3, 6], "labels": classes},
    ]
    for samples in batches:
        named = {"per_sample": ["labels"]} if "cu_seqlens" in samples else {}
        (tree,) = treepack.pack(samples, max_tokens=8, **named)
        assert tree.samples["labels"].tolist() == [1, 0]
        assert tree.num_terms == 4


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_advises_trains_what_the_mask_says(name):
    sample = {"input_ids": IDS, name: value(name)}
    mask = sample.pop(name)
    (tree,) = treepack.pack([{**sample, "completion_mask": mask != -100 if name == "labels" else mask}], max_tokens=8)
    assert tree.term_target.tolist() == [7]


def test_columns_that_were_ready_before_hide_nothing():
    """Arrays with the columns of the last call are packed without a look from Python; these have others."""
    good = {"input_ids": np.array(IDS), "labels": value("labels"), "completion_mask": np.array(TRAINED, np.uint8)}
    plain = {"input_ids": np.array(IDS), "weight": np.array([3, 1, 2])}
    for ready in (good, plain):
        for _ in range(2):
            treepack.pack([ready, ready], max_tokens=8)
        with pytest.raises(treepack.PackError, match="'labels' and no completion_mask"):
            treepack.pack([{"input_ids": np.array(IDS), "labels": value("labels")}] * 2, max_tokens=8)


@pytest.mark.parametrize("name", OTHERS)
def test_a_stream_refuses_it_and_goes_on(name):
    packer = treepack.Packer(max_tokens=8)
    packer.add({"input_ids": [1, 2]})
    for _ in range(2):
        with pytest.raises(treepack.PackError, match=f"sample 1: it has a column {name!r} and no completion_mask"):
            packer.add({"input_ids": np.array(IDS), name: value(name)})
    packer.add({"input_ids": [1, 3]})
    ((tree,),) = packer.flush()
    assert tree.num_samples == 2


@pytest.mark.parametrize("name", OTHERS)
def test_files_have_it_read_as_the_mask(tmp_path, name):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"input_ids": IDS, name: value(name).tolist()}) + "\n")
    ((sample,),) = open_rollouts(path).batches()
    assert sorted(sample) == ["completion_mask", "input_ids"]
    (tree,) = treepack.pack([sample], max_tokens=8)
    assert tree.term_target.tolist() == [7]


def test_batches_of_tools_have_to_name_it():
    pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
    from treepack import offline

    batch = {"input_ids": [IDS], "loss_mask": [TRAINED]}
    with pytest.raises(treepack.PackError, match="'loss_mask' and no completion_mask"):
        offline.pack_batch(batch, max_tokens=8)
    columns = {"input_ids": "input_ids", "completion_mask": "loss_mask"}
    (tree,) = offline.trees_of(offline.pack_batch(batch, max_tokens=8, columns=columns))
    assert tree.term_target.tolist() == [7]
