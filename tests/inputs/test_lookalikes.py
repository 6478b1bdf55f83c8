"""Columns that are more than columns, by what they hold and whatever they are called: CASES 56, 58 and 75."""

import numpy as np
import pytest
from helpers import says

import treepack
from treepack.inputs.lookalikes import Suspect, candidate, holds, pairing
from treepack.integrations.collator import DataCollatorForTreePacking

IDS = np.arange(10, 16)
MASK = [0, 0, 1, 0, 1, 1]
LABELS = [-100, -100, 12, -100, 14, 15]


def look(name, *columns, masked=False):
    suspect = Suspect(name, masked)
    for values in columns:
        suspect.look(np.asarray(values), IDS, lengths=[4])
    return suspect.found


@pytest.mark.parametrize(
    ("name", "columns", "found"),
    [
        ("zork", [MASK], "mask"),
        ("zork", [np.array(MASK, bool)], "mask"),
        ("zork", [MASK[2:]], "mask"),  # of the completion alone
        ("zork", [MASK[1:]], None),  # as long as nothing
        ("zork", [[0] * 6], "mask"),
        ("zork", [[1] * 6, MASK], "mask"),
        ("zork", [[1] * 6, [0, 1, 1, 1, 1, 1]], None),  # trains what no mask trains
        ("zork", [MASK, [0, 0, 1, 0, 1, 2]], None),  # turns, of which one sample has three
        ("zork", [[5] * 6], None),
        ("zork", [LABELS], "labels"),
        ("zork", [[-1, -1, 12, -1, 14, 15]], "labels"),
        ("zork", [[11, 12, 13, 14, 15, -100]], "labels"),  # shifted
        ("zork", [[-100, 12, 13, -100, 15, -100]], "labels"),
        ("zork", [IDS], None),
        ("zork", [IDS, LABELS], "labels"),
        ("zork", [[-1, -2, 12, -1, 14, 15]], None),
        ("zork", [[-1, 7, 12, -1, 14, 15]], None),
        ("zork", [[0, 1, 2, 3, 4, 5]], None),
        ("zork", [[0, 1, 2, 0, 1, 2]], "positions"),
        ("zork", [[1, 2, 3, 1, 2, 3]], "positions"),
        ("zork", [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]], "positions"),
        ("zork", [[0, 1, 2, 0, 1, 3]], None),
        ("zork", [[0, 2, 6]], "offsets"),
        ("zork", [[0, 6]], None),  # one sample in the row
        ("zork", [[2, 4]], "lengths"),
        ("zork", [[6]], None),
        ("zork", [[2, 5]], None),
        ("zork", [[0, 0, 1, 1, 2, 2]], None),  # turns
        ("segment_ids", [[0, 0, 1, 1, 2, 2]], "segments"),
        ("documentIds", [[1, 1, 2, 2, 3, 3]], "segments"),
        ("position_ids", [[0, 1, 2, 3, 4, 5]], None),
        ("position_ids", [[2, 3, 4, 5, 6, 7]], "positions"),
    ],
)
def test_what_values_look_like(name, columns, found):
    assert look(name, *columns) == found


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("zork", MASK, None),
        ("zork", LABELS, None),
        ("zork", [0, 1, 2, 0, 1, 2], None),
        ("position_ids", [0, 1, 2, 0, 1, 2], "positions"),
        ("seq_lengths", [2, 4], "lengths"),
        ("turn_lengths", [2, 4], None),
        ("cu_seqlens", [0, 2, 6], "offsets"),
        ("seq_idx", [0, 0, 0, 1, 1, 1], "segments"),
    ],
)
def test_beside_a_mask_names_say_what_is_packed(name, values, found):
    assert look(name, values, masked=True) == found


def test_candidates_are_integers_for_each_token():
    import torch

    for value in ([0, 1], (True, False), np.array([0, 1], np.uint8), torch.tensor([0, 1]), torch.tensor([True])):
        assert candidate(value) is not None
    nothing = [[0.0, 1.0], [[0, 1]], [], 1, None, "01", np.array([0.0, 1.0]), np.zeros((2, 2), int), np.int64(1)]
    for value in [*nothing, torch.tensor([0.0]), torch.tensor(1), torch.ones(2, dtype=torch.bfloat16), {0: 1}]:
        assert candidate(value) is None


def test_halves_of_a_pair():
    prompt, rest = np.arange(5), np.arange(5, 9)
    whole = np.concatenate([prompt, rest])
    assert holds(whole, prompt, "prompt")
    assert holds(whole, rest, "completion")
    assert not holds(rest, whole, "completion")
    assert pairing([(whole, prompt)] * 2, "prompt") == "whole"
    assert pairing([(rest, prompt)] * 2, "prompt") == "apart"
    assert pairing([(rest, prompt), (whole, prompt)], "prompt") == "mixed"
    assert pairing([(rest, prompt), (whole, prompt[:2])], "prompt") == "apart"  # two tokens, by chance
    assert pairing([(prompt, rest)], "completion") == "apart"


# --- in every entrance ----------------------------------------------------------------------------------------------


def calls(columns, ids=IDS):
    """The same two samples as a list (of lists, of arrays that are ready), padded and flat, and where it is said."""
    sample = {"input_ids": ids, **columns}
    row = {name: np.stack([x, x]) for name, x in sample.items()}
    yield "sample 0: it", [{name: x.tolist() for name, x in sample.items()}] * 2, {}
    yield "sample 0: it", [sample] * 2, {}
    yield "the batch", {**row, "attention_mask": np.ones((2, len(ids)), int)}, {}
    wide = {name: np.pad(x, ((0, 0), (3, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=9) for name, x in row.items()}
    yield "the batch", {**wide, "attention_mask": np.repeat([[0] * 3 + [1] * len(ids)], 2, 0)}, {}
    flat = {name: np.concatenate([x, x]) for name, x in sample.items()}
    yield "the batch", {**flat, "cu_seqlens": [0, len(ids), 2 * len(ids)]}, {"per_token": list(columns)}


def refused(columns, *parts, ids=IDS):
    for where, samples, options in calls(columns, ids):
        with pytest.raises(treepack.PackError) as caught:
            treepack.pack(samples, max_tokens=99, **options)
        says(caught, where, *parts)
    packer = treepack.Packer(max_tokens=99)
    for _ in range(2):
        with pytest.raises(treepack.PackError) as caught:
            packer.add({"input_ids": ids, **columns})
        says(caught, "sample 0: it has", *parts)


@pytest.mark.parametrize("name", ["env_mask", "tool_mask", "loss_masks", "train_mask", "zork"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
def test_a_mask_under_any_name_stops(name, dtype):
    """CASE 56."""
    refused({name: np.array(MASK, dtype)}, f"a column {name!r} and no completion_mask", f"completion_mask = {name}")


@pytest.mark.parametrize("name", ["targets", "zork"])
def test_labels_under_any_name_stop(name):
    refused({name: np.array(LABELS)}, f"a column {name!r} and no completion_mask", "as of labels")


def test_rows_that_are_packed_already_stop():
    """CASE 58."""
    again = np.array([0, 1, 2, 0, 1, 2])
    refused({"zork": again}, "a column 'zork' whose values are positions that start again")
    for masked in ({}, {"completion_mask": np.array(MASK)}):
        refused({"position_ids": again, **masked}, "'position_ids' whose values are positions that start again")
        refused({"segment_ids": np.array([0, 0, 1, 1, 2, 2]), **masked}, "'segment_ids' whose values are numbers of")
    for name, values in {"seq_lens": [2, 4], "doc_lengths": [2, 4], "cu": [0, 2, 6]}.items():
        with pytest.raises(treepack.PackError) as caught:
            treepack.pack([{"input_ids": IDS, name: values}], max_tokens=99)
        says(caught, f"sample 0: {name} has", "as of several samples in one row")


def test_positions_of_one_sample_are_a_column():
    for _, samples, options in calls({"position_ids": np.arange(6)}):
        (tree,) = treepack.pack(samples, max_tokens=99, **options)
        assert tree.positions["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["output_ids", "completion_ids", "response_tokens"])
def test_half_of_a_pair_stops(name):
    """CASE 57: a completion beside what may be its prompt, of another length and of the same."""
    for n in (3, 6):
        for samples in ([{"input_ids": IDS, name: np.arange(n)}], {"input_ids": [IDS], name: [np.arange(n)]}):
            if isinstance(samples, dict):
                samples["attention_mask"] = np.ones((1, 6), int)
            with pytest.raises(treepack.PackError) as caught:
                treepack.pack(samples, max_tokens=99)
            says(caught, f"has input_ids, a column {name!r} and no completion_mask", f"join 'input_ids' and {name!r}")


def test_what_users_have_today_is_packed():
    """Floats, numbers for the whole sample, ids of many values, several axes, names that say what they are."""
    good = {
        "advantage": np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
        "rewards": np.array([0, 0, 0, 0, 0, 1]),
        "old_log_probs": np.zeros(6),
        "expert": np.array([0, 1, 2, 1, 0, 3]),
        "policy_version": np.array([7, 7, 7, 7, 8, 8]),
        "identity": np.array([0, 0, 0, 1, 1, 1]),
        "mrope": np.zeros((6, 3), int),
        "always": np.ones(6, int),
        "token_type_ids": np.zeros(6, int),
        "special_tokens_mask": np.array([1, 0, 0, 0, 0, 1]),
    }
    for _, samples, options in calls(good):
        (tree,) = treepack.pack(samples, max_tokens=99, **options)
        assert tree.terms["always"].tolist() == [1] * 10
    packer = treepack.Packer(max_tokens=99)
    for _ in range(3):
        packer.add({"input_ids": IDS, **good, "done": 1, "group_id": 0, "prompt_tokens": 3})
    ((tree,),) = packer.flush()
    assert tree.samples["prompt_tokens"].tolist() == [3, 3, 3]  # CASE 72: a number is no column of ids


def test_policy_versions_of_0_and_1_stop_and_ones_say_that_they_are_meant():
    version = {"policy_version": np.array([0, 0, 0, 1, 1, 1])}
    refused(version, "a column 'policy_version'", "completion_mask = ones to train every token and carry")
    for _, samples, options in calls({**version, "completion_mask": np.ones(6, int)}):
        (tree,) = treepack.pack(samples, max_tokens=99, **options)
        assert tree.terms["policy_version"].tolist() == [0, 0, 1, 1, 1] * 2


def test_one_sample_with_other_values_clears_a_column():
    two, three = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2])
    samples = [{"input_ids": IDS, "turn": two}, {"input_ids": IDS, "turn": three}]
    (tree,) = treepack.pack(samples, max_tokens=99)
    assert tree.terms["turn"].tolist() == [*two[1:], *three[1:]]
    with pytest.raises(treepack.PackError, match="a column 'turn' and no completion_mask"):
        treepack.pack([samples[0]] * 2, max_tokens=99)  # ready, as those of the call before
    packer = treepack.Packer(max_tokens=99)
    packer.add(samples[1])
    packer.add(samples[0])
    assert packer.flush()[0][0].num_samples == 2


def test_a_stream_stops_at_the_first_sample_that_tells():
    packer = treepack.Packer(max_tokens=99)
    packer.add({"input_ids": IDS, "zork": np.ones(6, int), "copy": IDS})
    for bad in ({"zork": np.array(MASK), "copy": IDS}, {"zork": np.ones(6, int), "copy": np.array(LABELS)}):
        for _ in range(2):
            with pytest.raises(treepack.PackError, match=r"sample 1: it has a column '(zork|copy)' and no comp"):
                packer.add({"input_ids": IDS, **bad})
    packer.add({"input_ids": IDS, "zork": np.full(6, 2), "copy": IDS})  # no mask, then
    packer.add({"input_ids": IDS, "zork": np.array(MASK), "copy": IDS})
    assert packer.flush()[0][0].num_samples == 3


@pytest.mark.parametrize("name", ["tool_mask", "env_mask", "loss_mask", "response_mask", "labels"])
def test_a_second_mask_that_disagrees_stops(name):
    other = np.array(LABELS if name == "labels" else MASK)
    mask = np.array([0, 0, 1, 1, 1, 1])
    refused({"completion_mask": mask, name: other}, f"a completion_mask and a column {name!r} that disagree: token 3")
    for first in (0, 1):  # the first token is never a target
        agreed = np.array([first, 0, 1, 0, 1, 1])
        for _, samples, options in calls({"completion_mask": agreed, name: other}):
            (tree,) = treepack.pack(samples, max_tokens=99, **options)
            assert tree.term_target.tolist() == [12, 14, 15] * 2
    for _, samples, options in calls({"completion_mask": np.ones(6, int), name: other}):
        (tree,) = treepack.pack(samples, max_tokens=99, **options)
        assert tree.num_terms == 10


def test_weights_and_classes_beside_a_mask_are_columns():
    for name, values in {"loss_mask": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0], "labels": [0, 1, 0, 1, 2, 0]}.items():
        columns = {"completion_mask": np.array(MASK), name: np.array(values)}
        for _, samples, options in calls(columns):
            assert treepack.pack(samples, max_tokens=99, **options)[0].num_terms == 6


def test_collators_say_the_same():
    collate = DataCollatorForTreePacking()
    feature = {"input_ids": IDS, "completion_mask": np.array([0, 0, 1, 1, 1, 1]), "tool_mask": np.array(MASK)}
    with pytest.raises(treepack.PackError, match="'tool_mask' that disagree: token 3"):
        collate([feature])
    with pytest.raises(treepack.PackError, match="'position_ids' whose values are positions"):
        collate([{"input_ids": IDS, "completion_mask": np.array(MASK), "position_ids": np.array([0, 1, 2, 0, 1, 2])}])
    del feature["completion_mask"]
    assert DataCollatorForTreePacking(train_all=True)([feature])["tree"].num_terms == 5
