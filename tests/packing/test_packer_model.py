"""`Packer` driven at random, add, flush and errors in any order, against the oracle of the stream rule."""

import re

import naive
import numpy as np
import pytest
from helpers import ARRAYS, kept_for
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from stream_oracle import Stream

import treepack

DTYPES = {"input_ids": np.int64, "completion_mask": np.uint8, "identity": np.int64, "old_log_probs": np.float32}
DTYPES |= {"table": np.int64, "sampling_mask": np.int32, "sampling_mask_counts": np.int32}
VOCABULARY = 8


@st.composite
def options(draw):
    out = {"max_tokens": draw(st.sampled_from([4, 6, 8, 9, 12, 20])), "ranks": draw(st.integers(1, 4))}
    out["branching"] = draw(st.sampled_from(["token", "label"]))
    if draw(st.booleans()):
        out["max_terms"] = draw(st.integers(2, 12))
    if draw(st.booleans()):
        out["max_kept"] = draw(st.integers(2, 20))
    if draw(st.booleans()):
        out["pad_to_multiple_of"] = draw(st.integers(1, 3))
    return out


class PackerMachine(RuleBasedStateMachine):
    """One packer and its oracle. `taken`: samples that add() took; `calls`: adds that did not raise."""

    @initialize(call=options(), overlong=st.sampled_from(["raise", "skip"]), data=st.data())
    def start(self, call, overlong, data):
        order = data.draw(st.sampled_from(["largest_first", "first_seen"]))
        columns = st.sets(
            st.sampled_from(["completion_mask", "identity", "sets", "old_log_probs", "advantage", "table"])
        )
        self.columns = data.draw(columns)
        self.call, self.order, self.overlong = call, order, overlong
        self.packer = treepack.Packer(order=order, overlong=overlong, vocab_size=VOCABULARY, **call)
        self.oracle = Stream(**call)
        self.seen, self.skipped, self.calls = [], [], 0
        names = ("samples", "raw_tokens", "packed_tokens", "trees", "terms", "kept_ids", "padding", "dummies")
        self.sums = dict.fromkeys((*names, "attention_pairs", "attention_pairs_alone", "balance_tokens"), 0)
        self.slowest = self.total = 0

    # ------------------------------------------------------------------------------------------------------- samples

    def draw_sample(self, data):
        """A sample with the columns of this stream, as dict of lists; it often begins like an earlier one."""
        token = st.integers(0, 2)
        tail = data.draw(st.lists(token, min_size=1, max_size=4))
        base = data.draw(st.sampled_from([[], *self.seen[-8:]]))
        ids = (base[: data.draw(st.integers(0, len(base)))] + tail)[: data.draw(st.sampled_from([3, 5, 9]))]
        n = len(ids)
        sample = {"input_ids": ids}
        if "completion_mask" in self.columns:
            sample["completion_mask"] = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        if "identity" in self.columns:
            sample["identity"] = data.draw(st.sampled_from([[7] * n, [7] * (n - 1) + [8]]))
        if "sets" in self.columns:
            none = [], [0] * n
            kept = data.draw(kept_for(sample)) if data.draw(st.integers(0, 3)) else none
            sample["sampling_mask"], sample["sampling_mask_counts"] = kept
        if "old_log_probs" in self.columns:
            sample["old_log_probs"] = [self.calls + i / 8 for i in range(n)]
        if "advantage" in self.columns:
            sample["advantage"] = self.calls / 4
        if "table" in self.columns:
            sample["table"] = [[i, self.calls] for i in range(n)]
        return sample

    def form(self, sample, data):
        """Lists as they are, or arrays that are ready, or arrays that are not."""
        kind = data.draw(st.sampled_from(["lists", "ready", "strided"]))
        if kind == "lists":
            return sample
        out = {}
        for name, value in sample.items():
            if name not in DTYPES or not isinstance(value, list):
                out[name] = value
                continue
            array = np.array(value, DTYPES[name])
            out[name] = array if kind == "ready" else np.repeat(array, 2, axis=0)[::2]
        return out

    # --------------------------------------------------------------------------------------------------------- rules

    @rule(data=st.data())
    def add(self, data):
        sample = self.draw_sample(data)
        budget = self.oracle.broken(sample)
        if budget is None:
            closed = self.packer.add(self.form(sample, data))
            self.seen.append(sample["input_ids"])
            expected = self.oracle.add(sample)
            self.calls += 1
            self.compare(closed, expected, exact=True)
        elif self.overlong == "skip":
            assert self.packer.add(self.form(sample, data)) == []
            self.skipped.append((self.calls, len(sample["input_ids"])))
            self.calls += 1
            assert budget in self.packer.skipped[-1].reason
        else:
            self.refuse(self.form(sample, data), treepack.PackError, budget)
        self.check_stats()

    @rule()
    def flush(self):
        self.compare(self.packer.flush(), self.oracle.flush(), exact=False)
        assert self.packer.flush() == []
        self.check_stats()

    @rule(data=st.data())
    def faulty_ids(self, data):
        sample = self.draw_sample(data)
        at = data.draw(st.integers(0, len(sample["input_ids"]) - 1))
        wrong = data.draw(st.sampled_from([-1, VOCABULARY, 2**31, 2**63 - 1]))
        sample["input_ids"] = [wrong if i == at else x for i, x in enumerate(sample["input_ids"])]
        self.refuse(self.form(sample, data), treepack.PackError, "id")

    @rule(data=st.data())
    def faulty_values(self, data):
        """A column that is too short or too long, of another type, or with values that are not allowed."""
        sample = self.draw_sample(data)
        n = len(sample["input_ids"])
        faults = [("input_ids", [], treepack.PackError), ("input_ids", [0.5] * n, TypeError)]
        faults += [("input_ids", [sample["input_ids"]], treepack.PackError), ("input_ids", "abc", TypeError)]
        if "completion_mask" in sample:
            faults += [("completion_mask", [2] * n, treepack.PackError), ("completion_mask", [0.5] * n, TypeError)]
            faults.append(("completion_mask", [1] * (n + 1), treepack.PackError))
        for name in ("identity", "old_log_probs", "table", "sampling_mask_counts"):
            if name in sample:
                faults.append((name, [*sample[name], sample[name][0]], treepack.PackError))
        if "sampling_mask" in sample:
            faults.append(("sampling_mask", [*sample["sampling_mask"], 1], treepack.PackError))
        if "advantage" in sample:
            faults.append(("advantage", "high", TypeError))
        name, value, error = data.draw(st.sampled_from(faults))
        self.refuse({**sample, name: value}, error, name)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def faulty_columns(self, data):
        """A column more or less than the first sample of the stream had."""
        sample = self.draw_sample(data)
        names = [name for name in sample if name not in ("input_ids", "sampling_mask", "sampling_mask_counts")]
        name = data.draw(st.sampled_from([*names, "extra", "listed", *({*DTYPES} - {*sample, *names})]))
        if name in sample:
            value = sample.pop(name)
            if name != "completion_mask" and data.draw(st.booleans()):  # or as the other kind
                sample[name] = value[0] if isinstance(value, list) else [value] * len(sample["input_ids"])
                if name == "identity":  # one value for all tokens is allowed there
                    del sample[name]
        elif name.startswith("sampling_mask"):
            trained = sample.get("completion_mask", [1] * len(sample["input_ids"]))
            sample["sampling_mask_counts"] = [int(i > 0 and bool(x)) for i, x in enumerate(trained)]
            sample["sampling_mask"] = [
                x for x, c in zip(sample["input_ids"], sample["sampling_mask_counts"], strict=True) if c
            ]
        else:
            sample[name] = 1.0 if name == "extra" else [1] * len(sample["input_ids"])
        says = "kept sets" if name.startswith("sampling_mask") else name
        self.refuse(self.form(sample, data), (treepack.PackError, TypeError), says)

    @rule(sample=st.sampled_from([None, 3, [1, 2], "abc", {}, {"advantage": 1.0}]))
    def no_sample(self, sample):
        self.refuse(sample, (treepack.PackError, TypeError), "")

    def teardown(self):
        if hasattr(self, "packer"):
            self.flush()

    # -------------------------------------------------------------------------------------------------------- checks

    def refuse(self, sample, error, says):
        """An error that names no other sample than this one. That nothing changed shows in all that follows."""
        before = self.packer.stats, list(self.packer.skipped)
        with pytest.raises(error) as caught:
            self.packer.add(sample)
        assert (self.packer.stats, self.packer.skipped) == before
        message = str(caught.value)
        assert says in message
        assert {int(number) for number in re.findall(r"sample (\d+)", message)} <= {self.calls}, message

    def compare(self, closed, expected, exact):
        """The micro-batch that was closed, array by array. `exact`: its trees are those of the rule, rank by rank; a
        flush may split some where ranks would be empty."""
        if expected is None:
            assert closed == []
            return
        samples, by_rule = expected
        (trees,) = closed
        assert isinstance(trees, tuple)
        assert len(trees) == self.call["ranks"]
        members = [tree.sample_index.tolist() for tree in trees]
        note(f"{members} of {by_rule}")
        if exact or all(by_rule):
            assert members == by_rule
        else:
            assert sorted(s for tree in members for s in tree) == list(range(len(samples)))
            assert all(members) or max(map(len, members)) == 1
        multiple = self.call.get("pad_to_multiple_of", 1)
        works = []
        for tree, inside in zip(trees, members, strict=True):
            self.check_tree(tree, samples, inside, multiple)
            works.append(self.oracle.work(samples, inside))
            self.count(tree, samples, inside)
        before = sum(len(self.oracle.positions(samples, inside)) for inside in by_rule)
        self.sums["balance_tokens"] += sum(len(self.oracle.positions(samples, inside)) for inside in members) - before
        self.slowest, self.total = self.slowest + max(works), self.total + sum(works)

    def check_tree(self, tree, samples, inside, multiple):
        assert tree.num_tokens <= self.call["max_tokens"]
        if not inside:
            assert tree.num_tokens == multiple
            assert tree.subtree_end.tolist() == list(range(multiple))
            assert len(tree.row_position) == len(tree.term_row) == len(tree.sampling_mask) == 0
            assert all(len(tree.terms[name]) == 0 for name in tree.terms)
            return
        expected = naive.layout(samples, inside, self.call["branching"], self.order, multiple)
        for name in ARRAYS:
            assert getattr(tree, name).tolist() == expected[name], name
        assert len(tree.term_row) <= self.call.get("max_terms", np.inf)
        assert len(tree.sampling_mask) <= self.call.get("max_kept", np.inf)
        if self.call["branching"] == "label":
            assert tree.shift_labels.tolist() == expected["shift_labels"]
        for name, values in expected["terms"].items():
            assert tree.terms[name].tolist() == values, name
        for name, values in expected["samples"].items():
            assert tree.samples[name].tolist() == values, name
        for name, values in expected["positions"].items():
            assert name in tree.positions
            if values is not None:
                assert tree.positions[name][: expected["real"]].tolist() == values, name

    def count(self, tree, samples, inside):
        real = int(tree.cu_segments[-1])
        lengths = [len(samples[s]["input_ids"]) for s in inside]
        amounts = {
            "samples": len(inside),
            "raw_tokens": sum(lengths),
            "packed_tokens": real,
            "trees": 1,
            "terms": len(tree.term_row),
            "kept_ids": len(tree.sampling_mask),
            "padding": tree.num_tokens - real,
            "dummies": int(not inside),
            "attention_pairs": int((tree.position_ids[:real] + 1).sum()),
            "attention_pairs_alone": sum(n * (n + 1) // 2 for n in lengths),
        }
        for name, amount in amounts.items():
            self.sums[name] += amount

    def check_stats(self):
        stats = self.packer.stats
        assert {name: getattr(stats, name) for name in self.sums} == self.sums
        assert stats.skipped == len(self.skipped)
        assert [(x.sample, x.tokens) for x in self.packer.skipped] == self.skipped
        packed = self.sums["packed_tokens"]
        assert stats.packing_ratio == (self.sums["raw_tokens"] / packed if packed else 1.0)
        even = self.total / self.call["ranks"]
        assert stats.imbalance == pytest.approx(self.slowest / even if even else 1.0)


TestPackerModel = PackerMachine.TestCase
TestPackerModel.settings = settings(settings(), stateful_step_count=30, report_multiple_bugs=False)
