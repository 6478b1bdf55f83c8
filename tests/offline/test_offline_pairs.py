"""Preference pairs: both samples of each in one tree, within the budget, and the loss over them equal to plain DPO."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import says
from hypothesis import given
from hypothesis import strategies as st
from offline_rows import assert_equal, contents

import treepack
from treepack import PackError

pa = pytest.importorskip("pyarrow", reason="offline packing needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="offline packing needs pyarrow")

from treepack import offline  # noqa: E402
from treepack.offline.pairs import Pair, _path, pack_pairs  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


@st.composite
def pair_lists(draw):
    """Pairs that share prompts, whole samples and odd parts with each other, on a tiny alphabet."""
    token = st.integers(0, 1)
    width = draw(st.sampled_from([0, 0, 1, 2]))
    seen, out = [[0]], []

    def ids():
        base = draw(st.sampled_from(seen))
        made = (base[: draw(st.integers(0, len(base)))] + draw(st.lists(token, min_size=1, max_size=4)))[:7]
        seen.append(made)
        return made

    for _ in range(draw(st.integers(1, 7))):
        sides = []
        for _ in range(2):
            sample = {"input_ids": np.array(ids(), np.int64)}
            if width:
                shape = (len(sample["input_ids"]), width)
                values = draw(st.lists(st.integers(0, 1), min_size=shape[0] * width, max_size=shape[0] * width))
                sample["identity"] = np.array(values, np.int64).reshape(shape if width > 1 else -1)
            sides.append(sample)
        out.append(Pair(*sides))
    return out


@given(
    pair_lists(),
    st.sampled_from(["token", "label"]),
    st.sampled_from(["shared", "first_fit"]),
    st.sampled_from([None, 2]),
    st.sampled_from([16, 17, 24, 40]),
)
def test_both_samples_of_a_pair_lie_in_one_tree(pairs, branching, placement, multiple, max_tokens):
    options = offline.Options(
        max_tokens=max_tokens, branching=branching, placement=placement, pad_to_multiple_of=multiple, pairs=True
    )
    packed, skipped = pack_pairs(pairs, options, start=100)
    assert skipped == 0
    found = []
    for one in packed:
        (tree,) = one
        assert tree.num_tokens <= max_tokens
        pair, chosen = tree.samples["pair"], tree.samples["chosen"]
        assert chosen.dtype == np.bool_
        assert chosen.tolist() == [True, False] * (len(chosen) // 2)
        assert pair[0::2].tolist() == pair[1::2].tolist()
        found += pair[0::2].tolist()
        for number, ids in zip(pair.tolist(), tree.unpack(tree.input_ids), strict=True):
            assert ids.tolist() in [sample["input_ids"].tolist() for sample in pairs[number - 100]]
        members = [sample for number in pair[0::2].tolist() for sample in pairs[number - 100]]
        assert [ids.tolist() for ids in tree.unpack(tree.input_ids)] == [x["input_ids"].tolist() for x in members]
    assert sorted(found) == list(range(100, 100 + len(pairs)))


def sizes(pairs, branching):
    """N of the samples of these pairs, and N of their paths, each as one tree."""
    options = {"max_tokens": 10_000, "branching": branching}
    samples = [sample for pair in pairs for sample in pair]
    paths = [_path(pair.chosen, pair.rejected, branching == "label") for pair in pairs]
    return tuple(treepack.pack(inputs, **options)[0].num_tokens for inputs in (samples, paths))


@given(pair_lists(), st.sampled_from(["token", "label"]))
def test_paths_are_never_smaller_than_what_they_stand_for(pairs, branching):
    samples, paths = sizes(pairs, branching)
    assert samples <= paths


@pytest.mark.parametrize(
    ("branching", "texts", "expected"),
    [
        # The rejected end of the one is the chosen end of the other.
        ("token", [("ab", "ac"), ("abc", "abc")], (4, 4)),
        # The same ends, which start after another number of tokens.
        ("token", [("ab", "c"), ("ab", "ac")], (4, 4)),
        # Shared as far as can be: the prompt, and the whole chosen sample.
        ("token", [("ab", "ac"), ("ab", "ad")], (4, 4)),
        # A fork costs its last common token once more.
        ("label", [("ab", "ac")], (4, 4)),
        # A chosen sample ends where the rejected end of its path begins as another chosen sample goes on.
        ("label", [("abb", "a"), ("ab", "b")], (6, 6)),
    ],
)
def test_paths_by_eye(branching, texts, expected):
    pairs = [Pair(*({"input_ids": [ord(letter) for letter in text]} for text in pair)) for pair in texts]
    assert sizes(pairs, branching) == expected


def test_pairs_by_eye():
    pairs = [
        Pair({"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4, 5]}),
        Pair({"input_ids": [1, 2, 6]}, {"input_ids": [1, 7]}),
        Pair({"input_ids": [8, 9]}, {"input_ids": [8, 9, 9]}),
    ]
    ((tree,),), skipped = pack_pairs(pairs, offline.Options(max_tokens=16, pairs=True))
    assert skipped == 0
    assert sorted(tree.input_ids.tolist()) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert tree.samples["pair"].tolist() == [0, 0, 1, 1, 2, 2]
    assert tree.samples["chosen"].tolist() == [True, False] * 3
    # Trained is what comes after the common prefix: [3], [4 5], [2 6], [7], nothing, [9].
    assert np.diff(tree.cu_terms).tolist() == [1, 2, 2, 1, 0, 1]
    assert tree.term_target.tolist() == [3, 4, 5, 2, 6, 7, 9]


def test_a_pair_that_fits_no_tree():
    pairs = [
        Pair({"input_ids": [1, 2]}, {"input_ids": [1, 3]}),
        Pair({"input_ids": list(range(1, 6))}, {"input_ids": [1, 2, 9, 9, 9]}),
    ]
    with pytest.raises(PackError) as error:
        pack_pairs(pairs, offline.Options(max_tokens=7, pairs=True), start=40)
    says(error, "pair 41: chosen and rejected have 8 tokens", "holds 7", "overlong='skip'")
    packed, skipped = pack_pairs(pairs, offline.Options(max_tokens=7, pairs=True, overlong="skip"))
    assert (len(packed), skipped) == (1, 1)
    assert packed[0][0].samples["pair"].tolist() == [0, 0]
    packed, skipped = pack_pairs(pairs, offline.Options(max_tokens=8, pairs=True))
    assert skipped == 0


def test_an_error_names_the_side():
    pairs = [Pair({"input_ids": [1, 2]}, {"input_ids": [1, 3]}), Pair({"input_ids": [1, 2]}, {"input_ids": [1, -3]})]
    with pytest.raises(PackError) as error:
        pack_pairs(pairs, offline.Options(max_tokens=8, pairs=True), start=10)
    says(error, "pair 11", "-3")
    pairs[1] = Pair({"input_ids": [1, 2], "a": [1, 2]}, {"input_ids": [1, 3], "a": [1]})
    pairs[0] = Pair({"input_ids": [1, 2], "a": [1, 2]}, {"input_ids": [1, 3], "a": [1, 1]})
    with pytest.raises(PackError) as error:
        pack_pairs(pairs, offline.Options(max_tokens=8, pairs=True), start=10)
    says(error, "pair 11 (rejected): ")


@pytest.mark.parametrize("name", ["sample 7", "samples 0 and 1", "pair 7"])
def test_a_column_that_is_named_like_a_sample(name):
    """Both samples of an error are named as sides of pairs, and the column as it is."""
    pairs = [Pair({"input_ids": [1, 2], name: 0}, {"input_ids": [1, 3], name: 0}) for _ in range(2)]
    pairs[1].rejected[name] = [1, 2]
    with pytest.raises(PackError) as error:
        pack_pairs(pairs, offline.Options(max_tokens=8, pairs=True), start=10)
    assert str(error.value) == f"pair 11 (rejected): {name} is an array; pair 10 (chosen) has a scalar there"
    assert (error.value.sample, error.value.token) == (11, None)
    pairs[1].rejected[name] = "text"
    with pytest.raises(TypeError) as error:
        pack_pairs(pairs, offline.Options(max_tokens=8, pairs=True), start=10)
    assert str(error.value).startswith(f"pair 11 (rejected): {name} is text ")
    with pytest.raises(PackError) as error:
        pack_pairs(
            [Pair(*({"input_ids": [1, 2, 3, at]} for at in (4, 5)))], offline.Options(max_tokens=4, pairs=True), 7
        )
    assert (error.value.sample, error.value.budget) == (7, "max_tokens")
    assert error.value.detail == "chosen and rejected have 5 tokens, their common prefix once; a tree holds 4"
    assert error.value.needs == 5
    assert error.value.remedy == "raise max_tokens to 5 or more, or leave such pairs out with overlong='skip'"
    padded = offline.Options(max_tokens=4, pairs=True, pad_to_multiple_of=4)
    with pytest.raises(PackError, match="raise max_tokens to 8 or more"):
        pack_pairs([Pair(*({"input_ids": [1, 2, 3, at]} for at in (4, 5)))], padded, 7)


# ------------------------------------------------------------------------------------------------------------- files


def preferences(rows=30, seed=0):
    random = np.random.default_rng(seed)
    out, prompt = [], []
    for i in range(rows):
        if i % 2 == 0:
            prompt = random.integers(0, 16, 5 + i % 3).tolist()
        chosen, rejected = (random.integers(0, 16, int(random.integers(1, 8))).tolist() for _ in range(2))
        out.append(
            {
                "prompt_ids": prompt,
                "chosen_ids": chosen,
                "rejected_ids": rejected,
                "ref_chosen_logps": -float(i),
                "ref_rejected_logps": -float(i) - 0.5,
                "margin": i / 4,
                "uid": f"prompt {i // 2}",
            }
        )
    return out


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_file_of_pairs(tmp_path, format):
    rows = preferences()
    path = tmp_path / f"pairs.{format}"
    jsonl(path, rows) if format == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), path)
    columns = {"chosen.ref_logps": "ref_chosen_logps", "rejected.ref_logps": "ref_rejected_logps", "margin": "margin"}
    options = {"max_tokens": 48, "window": 150, "shard_tokens": 200, "pairs": True}
    manifest = offline.pack_file(path, tmp_path / "out", columns=columns, **options)
    assert manifest.rows == 30
    assert sum(shard.samples for shard in manifest.shards) == 60
    trees = offline.load(tmp_path / "out", shuffle_seed=1)
    found = []
    for i, tree in enumerate(trees):
        samples = {name: tree.samples[name] for name in tree.samples}
        assert trees.sample_numbers(i).tolist() == samples["pair"].tolist()
        for at, ids in enumerate(tree.unpack(tree.input_ids)):
            row = rows[samples["pair"][at]]
            side = "chosen" if samples["chosen"][at] else "rejected"
            assert ids.tolist() == row["prompt_ids"] + row[f"{side}_ids"]
            assert samples["ref_logps"][at] == row[f"ref_{side}_logps"]
            assert samples["margin"][at] == row["margin"]
            terms = tree.term_target[tree.cu_terms[at] : tree.cu_terms[at + 1]]
            assert terms.tolist() == row[f"{side}_ids"]  # the prompt is not trained
        found += samples["pair"][0::2].tolist()
    assert sorted(found) == list(range(30))


def test_pairs_stopped_and_continued(tmp_path):
    path = jsonl(tmp_path / "pairs.jsonl", preferences())
    options = {"max_tokens": 48, "window": 150, "shard_tokens": 100, "pairs": True}
    offline.pack_file(path, tmp_path / "whole", **options)

    def stop(now):
        if now.shards == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offline.pack_file(path, tmp_path / "stopped", progress=stop, **options)
    assert len(list((tmp_path / "stopped").glob("*.parquet"))) == 2
    offline.pack_file(path, tmp_path / "stopped", resume=True, **options)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_pairs_of_whole_samples(tmp_path):
    rows = [{"chosen": [1, 2, 3], "rejected": [1, 2, 4]}, {"chosen": [5], "rejected": [5]}]
    path = jsonl(tmp_path / "pairs.jsonl", rows)
    offline.pack_file(path, tmp_path / "out", max_tokens=8, pairs=True)
    (tree,) = offline.load(tmp_path / "out")
    assert tree.term_target.tolist() == [3, 4]
    ((expected,),), _ = pack_pairs(
        [Pair(*({"input_ids": np.array(row[side])} for side in ("chosen", "rejected"))) for row in rows],
        offline.Options(max_tokens=8, pairs=True),
    )
    assert_equal(tree, expected)


@pytest.mark.parametrize(
    ("row", "columns", "parts"),
    [
        ({"chosen": [1]}, {}, ["no column of rejected tokens", "it has chosen", "--column rejected=NAME"]),
        ({"chosen": [1], "rejected": "text"}, {}, ["line 1: rejected is text"]),
        ({"chosen": [1], "rejected": [1]}, {"chosen.x": "no"}, ["no column 'no'"]),
        ({"chosen": [1], "rejected": [1], "x": 1}, {"chosen.x": "x"}, ["x is a column of one side alone"]),
        ({"chosen": [{"role": "user"}], "rejected": [1]}, {}, ["chosen holds chat messages", "--tokenizer DIR"]),
    ],
)
def test_files_that_hold_no_pairs(tmp_path, row, columns, parts):
    path = jsonl(tmp_path / "pairs.jsonl", [row])
    with pytest.raises(ValueError, match=r"pairs\.jsonl") as error:
        offline.pack_file(path, tmp_path / "out", max_tokens=8, pairs=True, columns=columns)
    says(error, *parts)


# -------------------------------------------------------------------------------------------------------------- loss


def recipe():
    """`dpo_loss` as the page gives it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "def dpo_loss" in block]
    space = {}
    exec(
        block[block.index("def dpo_loss") : block.index("\n\n\n", block.index("def dpo_loss"))], space | _torch(), space
    )
    return space["dpo_loss"]


def _torch():
    import torch

    return {"torch": torch}


def plain_dpo(policy, reference, rows, beta):
    """Every sample alone, all of its completion; the mean over the pairs. Nothing of treepack."""
    import torch
    from torch.nn import functional

    def log_prob(model, row, side):
        ids = torch.tensor(row["prompt_ids"] + row[f"{side}_ids"])
        n, prompt = len(ids), len(row["prompt_ids"])
        rows = model(ids, torch.arange(n), torch.full((n,), n), torch.arange(n - 1))
        return functional.log_softmax(rows, -1).gather(1, ids[1:, None])[prompt - 1 :, 0].sum()

    losses = []
    for row in rows:
        with torch.no_grad():
            base = log_prob(reference, row, "chosen") - log_prob(reference, row, "rejected")
        margin = log_prob(policy, row, "chosen") - log_prob(policy, row, "rejected") - base
        losses.append(-functional.logsigmoid(beta * margin))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("whole", [False, True])
def test_the_recipe_is_plain_dpo(tmp_path, whole):
    """Loss and every gradient in float64. `whole`: without a prompt column, where the common prefix is not trained."""
    torch = pytest.importorskip("torch")
    import tiny_model

    rows = preferences(12)
    table = [{side: row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")} for row in rows]
    path = jsonl(tmp_path / "pairs.jsonl", table if whole else rows)
    offline.pack_file(path, tmp_path / "out", max_tokens=32, window=100, pairs=True)
    policy, reference = tiny_model.Model(seed=0), tiny_model.Model(seed=1)
    expected = plain_dpo(policy, reference, rows, beta=0.3)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()

    def log_probs(model, tree):
        logits = torch.log_softmax(tiny_model.logits(model, tree), -1)
        return logits[tree.term_row.long(), tree.term_target.long()]

    dpo_loss, total, trees = recipe(), 0.0, offline.load(tmp_path / "out", shuffle_seed=0)
    assert len(trees) > 3
    for host in trees:
        tree = host.to("cpu")
        with torch.no_grad():
            base = log_probs(reference, tree)
        loss = dpo_loss(log_probs(policy, tree), base, tree, beta=0.3) / len(rows)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), abs=1e-9)
    for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-9)


def test_sft_is_the_masked_mean_of_every_sample_alone(tmp_path):
    """No log-probs, no advantage: `completion_mask` trains."""
    torch = pytest.importorskip("torch")
    import tiny_model

    samples = [
        {
            "input_ids": row["prompt_ids"] + row["chosen_ids"],
            "completion_mask": [0] * len(row["prompt_ids"]) + [1] * len(row["chosen_ids"]),
        }
        for row in preferences(12)
    ]
    path = jsonl(tmp_path / "sft.jsonl", samples)
    offline.pack_file(path, tmp_path / "out", max_tokens=64, window=100)
    model = tiny_model.Model()
    expected, terms = tiny_model.alone(model, [sample | {"advantage": 1.0} for sample in samples])
    model.zero_grad()
    trees = offline.load(tmp_path / "out")
    assert sum(len(tree.term_row) for tree in trees) == terms
    for host in trees:
        tree = host.to("cpu")
        logits = torch.log_softmax(tiny_model.logits(model, tree), -1)
        (-logits[tree.term_row.long(), tree.term_target.long()].sum() / terms).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-9)


def test_packing_alone_does_not_keep_pairs_together():
    """What the placement of pairs is for."""
    rows = preferences()
    samples = [
        {"input_ids": row["prompt_ids"] + row[f"{side}_ids"], "pair": i}
        for i, row in enumerate(rows)
        for side in ("chosen", "rejected")
    ]
    trees = treepack.pack(samples, max_tokens=20)
    torn = [tree for tree in trees for pair in tree.samples["pair"] if list(tree.samples["pair"]).count(pair) == 1]
    assert torn
