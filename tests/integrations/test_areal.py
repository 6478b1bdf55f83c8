"""AReaL's packing by treepack, against AReaL 1.0.4 itself: the batch, the tries, and what AReaL computes from them.

Tokens lie in another order, so arrays are compared position by position through the paths of the sequences.
"""

import gc
import pickle
import weakref
from itertools import pairwise

import numpy as np
import pytest
from helpers import id_lists
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import areal_stubs  # noqa: E402
from areal_stubs import SCALARS, Spec, padded, positions, same_place  # noqa: E402

AREAL = areal_stubs.loaded()

from treepack.integrations import areal  # noqa: E402

VOCABULARY = 8
CPU = torch.device("cpu")
# Several trees, one tree that is full, one with padding.
batches = st.tuples(id_lists(max_samples=9), st.sampled_from([8, 16, 64]))
SETS = [("lats_agent_tree", 30, 512), ("qwen_math_n8", 16, 512), ("tau_airline_turns", 16, 512)]
fewer = settings(max_examples=settings.default.max_examples // 3)  # AReaL's functions take their time


def both(data, max_tokens, **options):
    """(AReaL's batch, ours)."""
    spec = Spec(max_tokens)
    return AREAL.tree.build_packed_tree_batch(data, spec), areal.build_packed_tree_batch(data, spec, **options)


def pairs(theirs, ours):
    """(their micro-batch, ours, where their positions are in ours)."""
    for a, b, size in zip(theirs.mbs, ours.mbs, theirs.padded_to_lengths, strict=True):
        yield a, b, same_place(a["trie_node"], b["trie_node"], size)


def rows(folder, name, samples, length=250):
    """The first rows of a set, cut to `length` tokens, with small ids."""
    with np.load(folder / "data" / f"{name}.npz") as file:
        cut = [file["tokens"][a : min(b, a + length)] for a, b in pairwise(file["offsets"][: samples + 1])]
    _, ids = np.unique(np.concatenate(cut), return_inverse=True)
    return [part.tolist() for part in np.split(ids, np.cumsum([len(part) for part in cut])[:-1])]


# ------------------------------------------------------------------------------------------------------- by eye


def test_three_samples():
    """1 2 ─┬─ 3 4
    └─ 5        and  9"""
    data = padded([[1, 2, 3, 4], [1, 2, 5], [9]])
    SCALARS.clear()
    batch = areal.build_packed_tree_batch(data, Spec(8))
    (mb,) = batch.mbs
    assert mb["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 0, 0]]
    assert mb["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 0, 0]]
    assert mb["logprobs"].tolist() == [0, 1, 2, 3, 100, 101, 102, 200]
    assert mb["rewards"] is data["rewards"]
    trie = mb["trie_node"]
    assert [node.tree_indices for node in trie.nodes] == [(0, 1), (2, 3), (4, 4), (5, 5)]
    assert trie.get_sequence_tree_indices(1) == [(0, 1), (4, 4)]
    assert trie.get_sequence_tree_indices(3) == []
    assert (trie.num_tokens, trie.all_sequence_ids, trie.is_root) == (6, [0, 1, 2], True)
    assert (batch.group_lens, batch.padding_lengths, batch.padded_to_lengths) == ([6], [2], [8])
    assert batch.mbs is batch.padded_mbs
    assert [float(x["tree_token_ratio"]) for x in SCALARS] == [6 / 8]


# --------------------------------------------------------------------------------------------------- the contract


def check_contract(data, max_tokens, **options):
    SCALARS.clear()
    theirs, ours = both(data, max_tokens, **options)
    assert ours.data is data
    assert ours.mb_spec is theirs.mb_spec
    for name in ("group_lens", "padding_lengths", "padded_to_lengths", "_max_seqlen"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert vars(ours).keys() == vars(theirs).keys()
    x, y = (scalar["tree_token_ratio"] for scalar in SCALARS)
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)  # 0 / 0 without tokens
    for a, b, place in pairs(theirs, ours):
        assert a.keys() == b.keys()
        assert a["trie_node"].all_sequence_ids == b["trie_node"].all_sequence_ids
        for name, value in a.items():
            if name in ("input_ids", "position_ids"):
                assert b[name].shape == value.shape
                assert b[name].dtype == value.dtype
                assert torch.equal(b[name][0, place], value[0]), name
            elif name in ("logprobs", "loss_mask"):
                assert b[name].dtype == value.dtype
                assert torch.equal(b[name], value), name
            elif name != "trie_node":
                assert b[name] is value, name


@given(batches, st.sampled_from([torch.int32, torch.int64]), st.sampled_from([torch.bool, torch.int64, torch.float]))
def test_same_micro_batches(batch, ids, mask):
    samples, max_tokens = batch
    data = padded(samples)
    data |= {"input_ids": data["input_ids"].to(ids), "attention_mask": data["attention_mask"].to(mask)}
    check_contract(data, max_tokens)


@given(batches)
def test_same_micro_batches_in_the_order_with_fewer_partial_tiles(batch):
    check_contract(padded(batch[0]), batch[1], order="largest_first")


def test_rows_without_a_token():
    check_contract(padded([[], [1, 2], [], [1, 3]]), 8)
    check_contract(padded([[], []], input_ids=torch.zeros(2, 3, dtype=torch.int64),
                          attention_mask=torch.zeros(2, 3, dtype=torch.int64)), 8)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the tries


def check_node(theirs, ours, place):
    def moved(spans):
        return [(int(place[a]), int(place[b])) for a, b in spans]

    assert [ours.tree_indices] == moved([theirs.tree_indices])
    for name in ("tree_id", "num_tokens", "tokens", "sequence_ids", "all_sequence_ids", "is_root", "nodes"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_all_tree_indices() == moved(theirs.get_all_tree_indices())
    assert [node.tree_indices for node in ours.ancestors] == moved(node.tree_indices for node in theirs.ancestors)


@given(batches)
def test_same_tries(batch):
    for a, b, place in pairs(*both(padded(batch[0]), batch[1])):
        theirs, ours = a["trie_node"], b["trie_node"]
        for name in ("tree_id", "num_tokens", "tokens", "sequence_ids", "all_sequence_ids", "is_root", "tree_indices"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.ancestors, ours.get_all_tree_indices()) == ([], [])
        assert len(ours.nodes) == len(theirs.nodes)
        waiting = [(theirs, ours)]
        while waiting:
            x, y = waiting.pop()
            assert x.children.keys() == y.children.keys()
            below = [(child, y.children[token]) for token, child in x.children.items()]
            for pair in below:
                check_node(*pair, place)
            waiting += below
        again = pickle.loads(pickle.dumps(ours))
        assert [node.tree_indices for node in again.nodes] == [node.tree_indices for node in ours.nodes]


def test_a_trie_deeper_than_the_stack():
    samples = [[5] * (n + 1) for n in range(2000)]
    (trie,) = areal.build_tries(*list(padded(samples).values())[:2], 2000)
    assert len(trie.get_sequence_tree_indices(1999)) == len(trie.nodes) == 2000
    assert len(trie.nodes[-1].ancestors) == 1999
    assert pickle.loads(pickle.dumps(trie)).num_tokens == 2000


def test_a_trie_that_is_let_go_gives_its_memory_back_at_once():
    """Nodes and roots are no cycle: the memory of a batch does not wait for the garbage collector."""
    (trie,) = areal.build_tries(*list(padded([[1, 2, 3], [1, 4]]).values())[:2], 8)
    parts = [trie.nodes, trie.children, trie.nodes[1].ancestors, trie.nodes[0].children, trie.nodes[0].sequence_ids]
    assert trie.children[1] == trie.nodes[0] == trie.nodes[1].ancestors[0]
    assert len({*trie.nodes, *trie.children.values()}) == 3
    alive = weakref.ref(trie.tree)
    gc.disable()
    try:
        del trie, parts
        assert alive() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------------------- what AReaL computes from them


def check_functions(data, max_tokens, vocabulary):
    """AReaL's log-probs, entropies and extrema, and the gradients, from the same logits at the same tokens."""
    f = AREAL.functional
    theirs, ours = both(data, max_tokens)
    merged = []
    for a, b, place in pairs(theirs, ours):
        logits = torch.randn(max_tokens, vocabulary, requires_grad=True)
        moved = torch.empty_like(logits).index_copy(0, place, logits.detach()).requires_grad_()
        found = []
        for mb, values in ((a, logits), (b, moved)):
            trie, ids = mb["trie_node"], mb["input_ids"]
            log_probs = f.gather_packed_tree_logprobs(values, trie, ids, temperature=0.7)
            both_of = f.gather_packed_tree_logprobs_entropy(values, trie, ids, temperature=0.7)
            (log_probs.cos().sum() + both_of[1].sum()).backward()
            found.append([log_probs, *both_of, *f.gather_packed_tree_vocab_stats(values, trie)])
        for x, y in zip(*found, strict=True):
            assert torch.equal(x, y)
        assert len(found[1][0]) == len(b["logprobs"])
        torch.testing.assert_close(moved.grad[place], logits.grad, rtol=1e-6, atol=1e-7)
        merged.append(
            [
                f._gather_packed_tree_logprobs(values, mb["trie_node"], mb["input_ids"])
                for mb, values in ((a, logits.detach()), (b, moved.detach()))
            ]
        )
    x, y = (f.merge_packed_tree_results(list(parts), len(data["input_ids"])) for parts in zip(*merged, strict=True))
    assert torch.equal(x, y)


def check_attention(data, max_tokens):
    """AReaL's parent array, dense mask, block mask and Triton data say the same of the same tokens."""
    for a, b, place in pairs(*both(data, max_tokens)):
        theirs, ours = a["trie_node"], b["trie_node"]
        parents = [AREAL.tree.trie_to_parent_array(trie, max_tokens)[0].long() for trie in (theirs, ours)]
        assert torch.equal(torch.where(parents[0] < 0, -1, place[parents[0]]), parents[1][place])
        dense = [AREAL.tree.build_tree_attn_kwargs(trie, max_tokens, CPU, dense_mask=True) for trie in (theirs, ours)]
        x, y = (kwargs["attention_mask"] for kwargs in dense)
        assert torch.equal(x, y[place][:, place])
        assert torch.equal(y, torch.from_numpy(ours.tree.attention_mask()))  # subtree_end says the same
        flex = AREAL.tree.build_tree_attn_kwargs(ours, max_tokens, CPU)["tree_block_mask"]
        assert torch.equal(flex.to_dense()[0, 0].bool(), blocks(y, *flex.BLOCK_SIZE))
        masks = []
        for trie in (theirs, ours):
            found = AREAL.tree.build_triton_attn_data_from_trie(trie, max_tokens)
            words = found.packed_mask[0]
            bits = (words[:, :, None] >> torch.arange(64)) & 1
            masks.append(bits.reshape(max_tokens, -1)[:, :max_tokens].bool())
            seen = blocks(masks[-1], 128, 64)
            assert torch.equal(listed(found.kv_indices, found.kv_offsets[0], seen.shape[1]), seen)
            assert torch.equal(listed(found.q_indices, found.q_offsets[0], seen.shape[0]), seen.T)
        assert torch.equal(masks[0], masks[1][place][:, place])
        count = ours.num_tokens  # at padding their Triton mask lets a token see itself
        assert torch.equal(masks[1][:count], y[:count])


def blocks(mask, height, width):
    """Which (height, width) blocks of a mask hold anything."""
    h, w = -(-mask.shape[0] // height), -(-mask.shape[1] // width)
    whole = torch.zeros(h * height, w * width, dtype=torch.bool)
    whole[: mask.shape[0], : mask.shape[1]] = mask
    return whole.reshape(h, height, w, width).any(3).any(1)


def listed(indices, offsets, width):
    """Sparse lists -> the same as booleans."""
    out = torch.zeros(len(offsets) - 1, width, dtype=torch.bool)
    for row, (a, b) in enumerate(pairwise(offsets.tolist())):
        out[row, indices[a:b].long()] = True
    return out


@fewer
@given(batches)
def test_same_log_probs(batch):
    torch.manual_seed(0)
    check_functions(padded(batch[0]), batch[1], VOCABULARY)


@fewer
@given(batches)
def test_same_attention(batch):
    check_attention(padded(batch[0]), batch[1])


@pytest.mark.parametrize(("name", "samples", "max_tokens"), SETS)
def test_real_rollouts(treepack_data, name, samples, max_tokens):
    ids = rows(treepack_data, name, samples)
    data = padded(ids)
    check_contract(data, max_tokens)
    check_functions(data, max_tokens, max(map(max, ids)) + 1)
    check_attention(data, max_tokens)


# ------------------------------------------------------------------------------------------------- other padding


@given(batches, st.one_of(st.just("left"), st.integers(0, 5)))
def test_padding_anywhere_packs_as_on_the_right(batch, side):
    samples, max_tokens = batch
    moved = areal.build_packed_tree_batch(padded(samples, side), Spec(max_tokens))
    right = areal.build_packed_tree_batch(padded(samples), Spec(max_tokens))
    assert moved.group_lens == right.group_lens
    for a, b in zip(moved.mbs, right.mbs, strict=True):
        assert [x.tree_indices for x in a["trie_node"].nodes] == [x.tree_indices for x in b["trie_node"].nodes]
        for name in ("input_ids", "position_ids", "logprobs", "loss_mask"):
            assert torch.equal(a[name], b[name]), name
        for sequence, at in positions(a["trie_node"]).items():
            assert a["input_ids"][0, at].tolist() == samples[sequence]


@given(batches, st.one_of(st.sampled_from(["left", "right"]), st.integers(0, 5)), st.data())
def test_what_is_not_0_in_the_mask_is_a_token(batch, side, data):
    """Masks of other values than 0 and 1 and of any type, as `mask.bool()` in AReaL reads them."""
    samples, max_tokens = batch
    wanted = padded(samples, side)
    values = {torch.int8: -1, torch.uint8: 255, torch.int32: 256, torch.float: 0.5, torch.bfloat16: -0.5}
    dtype = data.draw(st.sampled_from(list(values)))
    mask = wanted["attention_mask"] * values[dtype]
    if data.draw(st.booleans()):
        mask = mask.t().contiguous().t()  # not contiguous
    found = areal.build_tries(wanted["input_ids"], mask.to(dtype), max_tokens)
    tries = areal.build_tries(wanted["input_ids"], wanted["attention_mask"], max_tokens)
    assert [trie.all_sequence_ids for trie in found] == [trie.all_sequence_ids for trie in tries]
    for x, y in zip(found, tries, strict=True):
        assert x.tree.input_ids.tolist() == y.tree.input_ids.tolist()
        assert x.tree.subtree_end.tolist() == y.tree.subtree_end.tolist()


@pytest.mark.parametrize("side", ["right", "left", 3])
def test_rows_without_a_token_between_others(side):
    samples = [[], [1, 2], [], [1, 2, 3], [4], []]
    batch = areal.build_packed_tree_batch(padded(samples, side), Spec(8))
    (mb,) = batch.mbs
    assert mb["trie_node"].all_sequence_ids == [1, 3, 4]
    assert mb["logprobs"].tolist() == [100, 101, 300, 301, 302, 400]
    assert mb["input_ids"][0, :4].tolist() == [1, 2, 3, 4]


def test_left_padding_is_what_areal_gets_wrong():
    samples = [[1, 2, 3, 4], [1, 2]]
    theirs, ours = both(padded(samples, "left"), 8)
    assert theirs.mbs[0]["input_ids"][0, :4].tolist() == [7, 1, 2, 3]  # padding as tokens, the last token lost
    assert ours.mbs[0]["input_ids"][0, :4].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_tensors_that_are_not_dense(name):
    data = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    data[name] = data[name].to_sparse()
    with pytest.raises(TypeError, match=f"{name} is a tensor of kind torch.sparse_coo; it must be a dense one"):
        areal.build_packed_tree_batch(data, Spec(8))
