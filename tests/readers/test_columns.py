"""Columns that are no mask and still no plain columns: rows that are packed already, halves of a pair, counts, second
masks, misspelled names. CASES 57, 58, 72 and 76, from files of every format."""

import pytest

from treepack.readers import open_rollouts

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")

from rollout_files import WRITERS, dataset, jsonl, message, parquet, terms

IDS = list(range(10, 16))
MASK = [0, 0, 1, 0, 1, 1]
LABELS = [-100, -100, 12, -100, 14, 15]
EVERYTHING = "every token, as there is no mask of what is trained (completion_mask)"


# --- packed rows, halves, counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("seq_lens", [2, 4], "lengths that add up to the number of tokens"),
        ("zork", [2, 4], "lengths that add up to the number of tokens"),
        ("cu_seqlens", [0, 2, 6], "offsets up to the number of tokens"),
        ("zork", [0, 1, 2, 0, 1, 2], "positions that start again"),
        ("position_ids", [0, 1, 2, 0, 1, 2], "positions that start again"),
        ("segment_ids", [1, 1, 2, 2, 3, 3], "numbers of segments"),
    ],
)
def test_rows_that_are_packed_already_stop(tmp_path, name, values, shown):
    """CASE 58; beside a mask where the name says it."""
    for write in (jsonl, parquet):
        path = write(tmp_path, {"input_ids": IDS, name: values})
        said = message(path)
        assert f"column {name!r} is not read, and its values are {shown}, as of several samples in one row" in said
        assert len(terms(path, columns={name: ""})) == 5
        masked = write(tmp_path, {"input_ids": IDS, name: values, "completion_mask": MASK})
        if name == "zork":
            assert terms(masked) == [12, 14, 15]
        else:
            assert shown in message(masked)


@pytest.mark.parametrize("write", [jsonl, parquet, dataset])
@pytest.mark.parametrize(
    ("ids", "half"), [("token_ids", "prompt_token_ids"), ("tokens", "prompt_ids"), ("input_ids", "output_ids")]
)
def test_halves_of_a_pair_are_paired(tmp_path, write, ids, half):
    """CASE 57: the other half of the prompt, or of the completion, is read."""
    front, back = (half, ids) if half.startswith("prompt") else (ids, half)
    path = write(tmp_path, {front: IDS[:4], back: IDS[4:]}, {front: IDS[:3], back: IDS[:1]})
    rollouts = open_rollouts(path)
    assert rollouts.columns == {"prompt_ids": front, "completion_ids": back}
    ((first, second),) = rollouts.batches()
    assert first["input_ids"].tolist() == IDS
    assert second["input_ids"].tolist() == [10, 11, 12, 10]
    assert first["completion_mask"].tolist() == [0, 0, 0, 0, 1, 1]


def test_whole_samples_that_begin_or_end_with_a_half(tmp_path):
    path = jsonl(tmp_path, {"token_ids": IDS, "prompt_token_ids": IDS[:4], "logprobs": [-0.5, -0.25]})
    rollouts = open_rollouts(path)
    assert rollouts.account.trains == "what follows prompt_token_ids in token_ids"
    ((sample,),) = rollouts.batches()
    assert sample["completion_mask"].tolist() == [0, 0, 0, 0, 1, 1]
    assert sample["old_log_probs"].tolist() == [0, 0, 0, 0, -0.5, -0.25]
    assert terms(jsonl(tmp_path, {"input_ids": IDS, "output_ids": IDS[3:]})) == [13, 14, 15]
    # A mask says it better.
    assert terms(jsonl(tmp_path, {"input_ids": IDS, "prompt_ids": IDS[:4], "loss_mask": MASK})) == [12, 14, 15]


def test_halves_that_cannot_be_distinguished_are_refused(tmp_path):
    def said(*rows):
        return message(jsonl(tmp_path, *rows))

    whole, half = {"token_ids": IDS, "prompt_token_ids": IDS[:5]}, {"token_ids": [1], "prompt_token_ids": IDS[:5]}
    text = said(whole, half)
    assert "some rows of 'token_ids' hold 'prompt_token_ids' at the front and some do not" in text
    assert "--column prompt_ids= reads 'token_ids' alone" in text
    assert "--column prompt_ids=prompt_token_ids --column completion_ids=token_ids takes the two" in text
    path = jsonl(tmp_path, half, half)
    both = {"prompt_ids": "prompt_token_ids", "completion_ids": "token_ids"}
    assert terms(path, columns=both) == terms(path) == [1, 1]
    assert terms(path, columns={"prompt_ids": ""}) == []
    # Names that contradict the rows.
    assert "'input_ids' do not hold 'prompt_ids'" in said({"input_ids": IDS, "prompt_ids": [1, 2, 3]})
    assert "'tokens' do not hold 'response_ids'" in said({"tokens": IDS, "response_ids": [1, 2, 3]})
    # A row that is not like the first ones.
    rows = [half] * 100
    assert "line 101: token_ids holds prompt_token_ids, and in the first rows it does not" in said(*rows, whole)
    rows = [whole] * 100
    assert "line 101: token_ids does not hold prompt_token_ids at the front, as the first" in said(*rows, half)


def test_a_number_is_no_column_of_ids(tmp_path):
    """CASE 72: counts of tokens under names of token ids."""
    row = {"token_ids": IDS, "prompt_tokens": 3, "completion_tokens": 3, "loss_mask": MASK}
    for write in (jsonl, parquet):
        rollouts = open_rollouts(write(tmp_path, row))
        assert rollouts.columns == {"input_ids": "token_ids", "completion_mask": "loss_mask"}
        assert sorted(rollouts.account.unread) == ["completion_tokens", "prompt_tokens"]
    assert "no column of token ids; it has prompt_tokens, completion_tokens" in message(
        jsonl(tmp_path, {"prompt_tokens": 3, "completion_tokens": 3})
    )


# --- second masks, names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("first", "second"), [("completion_mask", "tool_mask"), ("loss_mask", "labels")])
def test_a_second_mask_that_disagrees_stops(tmp_path, write, first, second):
    other = LABELS if second == "labels" else MASK
    rows = [{"input_ids": IDS, first: MASK, second: other}] * 70
    assert len(terms(write(tmp_path, *rows))) == 70 * 3
    path = write(tmp_path, *rows, {"input_ids": IDS, first: [0, 0, 1, 1, 1, 1], second: other})
    said = message(path)
    assert f"{first} and {second} disagree on token 3, 1 and {other[3]}" in said
    assert len(terms(path, columns={"completion_mask": first})) == 70 * 3 + 4
    if second == "tool_mask":
        assert len(terms(path, columns={"completion_mask": second})) == 71 * 3
    assert len(terms(path, columns={second: ""})) == 70 * 3 + 4
    ones = write(tmp_path / "ones" if write is dataset else tmp_path, {"input_ids": IDS, first: [1] * 6, second: other})
    assert len(terms(ones)) == 5


@pytest.mark.parametrize(
    ("target", "right"),
    [
        ("completion_maks", "completion_mask"),
        ("completion_masks", "completion_mask"),
        ("loss_mask", "completion_mask"),
        ("inputids", "input_ids"),
        ("advantge", "advantage"),
        ("identiy", "identity"),
    ],
)
def test_a_misspelled_target_is_refused(tmp_path, target, right):
    """CASE 76."""
    path = jsonl(tmp_path, {"input_ids": IDS, "m": MASK})
    said = message(path, columns={target: "m"})
    assert f"--column {target}=m: a sample has no column {target!r}; did you mean --column {right}=m?" in said


def test_a_misspelled_column_to_leave_out_is_refused(tmp_path):
    path = jsonl(tmp_path, {"input_ids": IDS, "zork_mask": MASK})
    assert "did you mean --column zork_mask=?" in message(path, columns={"zork_maks": ""})


def test_names_of_ones_own_are_columns(tmp_path):
    path = jsonl(tmp_path, {"input_ids": IDS, "x": 1.0, "reward_model": 2.0})
    own = {"margin": "x", "reward2": "x", "reward_model": "reward_model", "policy_version": "x"}
    rollouts = open_rollouts(path, columns=own)
    assert {use.name for use in rollouts.account.select_uses("carried")} == set(own)


def test_a_tokenizer_that_is_not_used_is_said(tmp_path):
    path = jsonl(tmp_path, {"input_ids": IDS})
    assert open_rollouts(path).account.notes == []
    (note,) = open_rollouts(path, tokenizer="models/qwen").account.notes
    assert note == "the tokenizer models/qwen makes no ids: the file has token ids, and no chat is read"
