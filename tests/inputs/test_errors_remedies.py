"""What is easily given by mistake: the message says what to do instead, and doing so packs."""

import numpy as np
import pytest

import treepack

IDS = [1, 2, 3, 4]
TWO = {"input_ids": np.ones((2, 4), int), "attention_mask": np.ones((2, 4), int)}


def message(samples, error=treepack.PackError):
    with pytest.raises(error) as caught:
        treepack.pack(samples, max_tokens=64)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sample(**columns):
    return [{"input_ids": IDS, **columns}]


# ------------------------------------------------------------------------------------------------- no ids, or no list


@pytest.mark.parametrize("name", ["tokens", "token_ids", "input_tokens"])
def test_ids_under_another_name(name):
    assert message([{name: IDS}]) == f"sample 0: it has no input_ids; it has ['{name}']: rename '{name}' to input_ids"
    assert message({name: [IDS], "attention_mask": [[1] * 4]}).endswith(f": rename '{name}' to input_ids")


@pytest.mark.parametrize("names", [("prompt_ids", "completion_ids"), ("prompt_token_ids", "response_ids")])
def test_prompt_and_completion(names):
    prompt, completion = names
    said = message([{prompt: [1, 2], completion: [3]}])
    assert f"join '{prompt}' and '{completion}' into input_ids, with a completion_mask of 0 for each token of " in said
    assert "join" not in message([{prompt: [1, 2]}])
    packer = treepack.Packer(max_tokens=8)
    with pytest.raises(treepack.PackError, match=f"sample 0: it has no input_ids; .* join '{prompt}'"):
        packer.add({prompt: [1, 2], completion: [3]})


@pytest.mark.parametrize("names", [("prompt_token_ids", "token_ids"), ("response_ids", "tokens")])
def test_a_half_beside_ids_under_another_name(names):
    """CASE 57: renaming the one alone would lose the other."""
    half, other = names
    assert message([{half: [1, 2, 3, 4], other: [5, 6]}]).endswith(
        f": where '{half}' and '{other}' are the two halves of a sample, join them into input_ids; where '{other}' "
        f"holds both, rename it to input_ids and leave '{half}' out; with a completion_mask of 0 for each token of the "
        "prompt and 1 for each of the completion"
    )


def test_a_single_sample():
    assert "input_ids has shape (4,); a single sample goes in as a list of one, [sample]; " in message(
        {"input_ids": IDS}
    )
    assert len(treepack.pack([{"input_ids": IDS}], max_tokens=8)) == 1


def test_lists_of_different_lengths():
    assert message({"input_ids": np.arange(5), "cu_seqlens": [0, 2, 5], "x": [[1], [2, 3]]}).startswith("column 'x'")
    assert message({**TWO, "x": [[1], [2, 3]]}).startswith("x is ragged: its lists have different lengths; give a list")
    said = message(sample(table=[[1], [2, 3], [4], [5]]))
    assert said.startswith("sample 0: table is ragged: its items have different lengths; one number, or one row")


# --------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("ids", ["some text", ["some", "text"], [b"some", b"text"], np.array(["a", "b"])])
def test_text_instead_of_ids(ids):
    said = message([{"input_ids": ids}], TypeError)
    assert said.startswith("sample 0: input_ids is text (dtype ")
    assert said.endswith("; allowed are integers: tokenize it first")
    if not isinstance(ids, str):
        said = message({"input_ids": [ids], "attention_mask": [[1, 1]]}, TypeError)
        assert said.startswith("input_ids is text (dtype ")
        assert said.endswith("; allowed are integers: tokenize it first")


def test_text_in_a_column():
    ends = "; allowed are booleans, integers and floats: leave it out of what is packed"
    assert message(sample(prompt="2 + 2"), TypeError) == f"sample 0: prompt is text (dtype <U5){ends}"
    assert message({**TWO, "prompt": ["2", "3"]}, TypeError) == f"prompt is text (dtype <U1){ends}"


def test_objects_in_a_column():
    assert message(sample(meta={"a": 1}), TypeError).startswith("sample 0: meta is a dict; allowed are booleans, ")
    assert message(sample(old_log_probs=[None, -0.5, -0.5, -1]), TypeError).startswith(
        "sample 0: old_log_probs holds None; allowed are booleans, integers and floats"
    )
    notes = np.empty(4, object)
    notes[:] = [1.0, np.zeros(2), np.zeros(3), None]
    assert message(sample(notes=notes), TypeError).startswith("sample 0: notes holds a ndarray; allowed are booleans, ")


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floats_for_integers(kind):
    remedy = ": convert it by .astype(int), a tensor by .long()"
    name = np.dtype(kind).name
    said = message(sample(completion_mask=np.ones(4, kind)), TypeError)
    assert said == f"sample 0: completion_mask has dtype {name}; allowed are booleans and integers{remedy}"
    said = message({**TWO, "completion_mask": np.ones((2, 4), kind)}, TypeError)
    assert said == f"completion_mask has dtype {name}; allowed are booleans and integers{remedy}"
    said = message({**TWO, "attention_mask": np.ones((2, 4), kind)}, TypeError)
    assert said == f"attention_mask has dtype {name}; allowed are booleans and integers{remedy}"
    said = message([{"input_ids": np.ones(4, kind)}], TypeError)
    assert said == f"sample 0: input_ids has dtype {name}; allowed are integers{remedy}"


# ------------------------------------------------------------------------------------------------- numbers of rows


@pytest.mark.parametrize("ready", [False, True])
def test_one_value_for_a_sample_in_a_list(ready):
    """Also after a call whose arrays were ready: then Rust sees the columns first."""
    bad = [{"input_ids": np.array(IDS), "advantage": np.array([0.5], np.float32) if ready else [0.5]}]
    treepack.pack([{"input_ids": np.array(IDS), "advantage": np.zeros(4, np.float32)}], max_tokens=8)
    for _ in range(2):
        assert message(bad) == (
            "sample 0: advantage has 1 row; input_ids has 4 tokens, so 4 are needed; a value for the whole sample is a "
            "number, not a list of one"
        )
    (tree,) = treepack.pack(sample(advantage=0.5), max_tokens=8)
    assert tree.samples["advantage"].tolist() == [0.5]


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("name", ["completion_mask", "old_log_probs", "sampling_mask_counts"])
def test_values_for_the_completion_alone(name, ready):
    good = {"input_ids": IDS, "completion_mask": [0, 0, 1, 1], "old_log_probs": [0.0, 0.0, -1.0, -2.0]}
    good |= {"sampling_mask": [3, 4], "sampling_mask_counts": [0, 0, 1, 1]}
    bad = {**good, name: good[name][2:]}
    if ready:
        kinds = {"completion_mask": np.uint8, "old_log_probs": np.float32, "input_ids": np.int64}
        good, bad = ({key: np.array(x, kinds.get(key, np.int32)) for key, x in row.items()} for row in (good, bad))
    packer = treepack.Packer(max_tokens=64)
    for _ in range(2):
        treepack.pack([good, good], max_tokens=64)
        packer.add(good)
    end = f"{name} has 2 rows; input_ids has 4 tokens, so 4 are needed; every token has one, those of the prompt too"
    end += " (0, say)"
    assert message([good, bad]) == f"sample 1: {end}"
    with pytest.raises(treepack.PackError) as caught:
        packer.add(bad)
    assert str(caught.value) == f"sample 2: {end}"
    assert packer.flush()[0][0].num_samples == 2


def test_too_many_values_have_no_hint():
    assert message(sample(old_log_probs=[0.0] * 5)).endswith("has 5 rows; input_ids has 4 tokens, so 4 are needed")


def test_kept_sets_as_a_list_for_each_token():
    said = message(sample(sampling_mask=[[], [2], [3], [4]]))
    assert said.endswith("kept sets need both: flat ids, and of each token how many are its own")


def test_batch_columns_as_wide_as_the_completions():
    wide = "columns per token are as wide as input_ids, with 0 (say) at the prompt and at padding"
    said = message({**TWO, "old_log_probs": np.zeros((2, 3))})
    assert said == (
        f"old_log_probs has shape (2, 3); a column of this batch has (2, 4, ...) per token or (2,) per sample; {wide}"
    )
    said = message({**TWO, "completion_mask": np.zeros((2, 3), int)})
    assert said == f"completion_mask has shape (2, 3); a column of this batch has (2, 4); {wide}"
    said = message({**TWO, "advantage": np.zeros((2, 1))})
    assert said.endswith("or (2,) per sample; one value per sample is (2,): take [:, 0]")
    assert message({**TWO, "advantage": np.zeros(3)}).endswith("(2, 4, ...) per token or (2,) per sample")
