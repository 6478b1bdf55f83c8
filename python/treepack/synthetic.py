"""Seeded rollouts in two common shapes: answers to one prompt, and agent turns whose earlier thoughts are dropped.

    agent       prompt -+- answer 1           multi-turn    prompt - think 1 - answer 1 - tool 1 - think 2 - answer 2
                        +- answer 2                                - answer 1 - tool 1 - think 2 - ... - answer 3
                        +- ...                                     - answer 1 - tool 1 - answer 2 - tool 2 - think 3 ...

Token ids, log-probs and kept sets are random, the shapes and the sizes are real. A *segment* (a prompt, a thought, an
answer, a tool result) is drawn once and carries its columns with it, so samples that share a segment agree on every
column. No two segments start with the same token: samples part exactly where their segments do, and N is known in
advance. Everything is drawn in a few NumPy calls, O(tokens + kept ids).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["agent", "multi_turn"]

QWEN_VOCABULARY = 151_646  # ids of the Qwen2 tokenizer
TOP_K = 512
SINGLE = 0.45  # the share of trained tokens at which top-p leaves one id alone
# Sizes above one are 1 + a Pareto variable, cut at TOP_K. With this exponent the mean over all trained tokens is 3.06.
TAIL_EXPONENT = 1.25


def agent(
    seed: int = 0,
    *,
    answers: int = 8,
    prompt: int = 6_000,
    answer: int = 400,
    vocab_size: int = QWEN_VOCABULARY,
    kept_sets: bool = True,
) -> list[dict[str, Any]]:
    """Answers to one prompt: by default 8 samples, 51,200 raw tokens, N = 9,200 packed ones, M = 3,200 terms.

    Args:
        seed: the same seed gives the same bytes; other arguments equal, `kept_sets` changes no other column.
        answers: samples that share the prompt.
        prompt, answer: their lengths in tokens. The answers are trained.
        vocab_size: ids are drawn from `range(vocab_size)`.
        kept_sets: bring `sampling_mask` and `sampling_mask_counts` too.

    Returns:
        One dict per answer: `input_ids` (L,) int64, `completion_mask` (L,) uint8, `old_log_probs` (L,) float32 (0 at
        untrained tokens), `advantage` float (mean 0 and deviation 1 over the rollouts), `group_id` int, and the kept
        sets as a top-p 0.95 / top-k 512 sampler leaves them: `sampling_mask` (T,) int32, the sets of the trained tokens
        end to end, each with its target and no id twice; `sampling_mask_counts` (L,) int32, 0 at untrained tokens.

    Raises:
        ValueError: a size below 1, or a vocabulary with fewer ids than there are segments.

    >>> samples = agent(prompt=30, answers=2, answer=10)
    >>> [len(sample["input_ids"]) for sample in samples]
    [40, 40]
    """
    _check_sizes(answers=answers, prompt=prompt, answer=answer)
    lengths = [prompt] + [answer] * answers
    trained = [False] + [True] * answers
    segments = _Segments(seed, lengths, trained, vocab_size, kept_sets)
    return [segments.sample([0, 1 + i], advantage) for i, advantage in enumerate(segments.advantages(answers))]


def multi_turn(
    seed: int = 0,
    *,
    rollouts: int = 8,
    turns: int = 6,
    thinking_turns: int = 2,
    prompt: int = 1_000,
    thinking: int = 450,
    answer: int = 120,
    tool: int = 150,
    vocab_size: int = QWEN_VOCABULARY,
    kept_sets: bool = True,
) -> list[dict[str, Any]]:
    """Rollouts whose older thoughts are dropped: by default 40 samples, 113,200 raw tokens, N = 61,240, M = 55,200.

    A turn is `thinking`, `answer` and `tool` (the result of its call). There is a sample for each turn from number
    `thinking_turns` on: the prompt, all turns before it and the turn itself up to its answer, without the thinking of
    turns other than the last `thinking_turns`. All thinking and answers in a sample are trained.

    Args:
        seed, vocab_size, kept_sets: as in `agent`.
        rollouts: rollouts that start from the one prompt.
        turns: turns of each rollout.
        thinking_turns: how many of a sample's last turns keep their thinking, at most `turns`.
        prompt, thinking, answer, tool: lengths in tokens.

    Returns:
        One dict per sample, rollout by rollout, with the keys of `agent`; samples of one rollout have one advantage.

    Raises:
        ValueError: a size below 1, `thinking_turns` above `turns`, or fewer ids than segments.

    >>> len(multi_turn(rollouts=2, turns=3, prompt=20, thinking=8, answer=4, tool=5))
    4
    """
    _check_sizes(rollouts=rollouts, turns=turns, thinking_turns=thinking_turns)
    _check_sizes(prompt=prompt, thinking=thinking, answer=answer, tool=tool)
    if thinking_turns > turns:
        raise ValueError(f"thinking_turns is {thinking_turns}, at most turns = {turns} is allowed")
    lengths = [prompt] + [thinking, answer, tool] * (rollouts * turns)
    trained = [False] + [True, True, False] * (rollouts * turns)
    segments = _Segments(seed, lengths, trained, vocab_size, kept_sets)
    samples = []
    for rollout, advantage in enumerate(segments.advantages(rollouts)):
        for last in range(thinking_turns - 1, turns):
            path = [0]
            for turn in range(last + 1):
                first = 1 + 3 * (rollout * turns + turn)
                path += [first, first + 1, first + 2] if turn > last - thinking_turns else [first + 1, first + 2]
            samples.append(segments.sample(path[:-1], advantage))
    return samples


class _Segments:
    """Segments with their columns, drawn once; samples are paths over them. `trained`: a model wrote the segment."""

    def __init__(self, seed: int, lengths: list[int], trained: list[bool], vocab_size: int, kept_sets: bool) -> None:
        if vocab_size < len(lengths):
            raise ValueError(
                f"vocab_size is {vocab_size}, at least one id for each of {len(lengths)} segments is needed"
            )
        self.random = np.random.default_rng(seed)
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        total = int(self.offsets[-1])
        self.input_ids = self.random.integers(0, vocab_size, total)
        self.input_ids[self.offsets[:-1]] = self.random.permutation(vocab_size)[: len(lengths)]
        self.completion_mask = np.repeat(np.asarray(trained, np.uint8), lengths)
        terms = np.flatnonzero(self.completion_mask)
        sizes = _set_sizes(self.random, len(terms), min(TOP_K, vocab_size))
        # Renormalised over the set: 0 where it holds one id, here never below a uniform choice among its ids.
        self.old_log_probs = np.zeros(total, np.float32)
        self.old_log_probs[terms] = self.random.random(len(terms)) * np.log(1 / sizes)
        self.advantage_random = self.random.spawn(1)[0]
        self.counts: npt.NDArray[np.int32] | None = None
        if kept_sets:
            self.counts = np.zeros(total, np.int32)
            self.counts[terms] = sizes
            self.set_offsets = np.concatenate(([0], np.cumsum(self.counts)))
            self.sets = _kept_sets(self.random, self.input_ids[terms], sizes, vocab_size)

    def advantages(self, count: int) -> list[float]:
        """Normalised rewards of `count` rollouts: mean 0, deviation 1 (0.0 for a single one)."""
        reward = self.advantage_random.standard_normal(count)
        centred = reward - reward.mean()
        return [float(value) for value in centred / max(float(centred.std()), 1e-6)]

    def sample(self, path: list[int], advantage: float) -> dict[str, Any]:
        """The sample that runs over the segments of `path`."""

        def join(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([values[offsets[segment] : offsets[segment + 1]] for segment in path])

        columns: dict[str, Any] = {
            name: join(getattr(self, name), self.offsets) for name in ("input_ids", "completion_mask", "old_log_probs")
        }
        columns |= {"advantage": advantage, "group_id": 0}
        if self.counts is not None:
            columns["sampling_mask"] = join(self.sets, self.set_offsets[self.offsets])
            columns["sampling_mask_counts"] = join(self.counts, self.offsets)
        return columns


def _set_sizes(random: np.random.Generator, count: int, largest: int) -> npt.NDArray[np.int32]:
    """Sizes of `count` kept sets; stratified, so that share and mean hold for small counts too."""
    quantile = (random.permutation(count) + 0.5) / max(count, 1)
    tail = 1 + np.floor(((1 - quantile) / (1 - SINGLE)) ** (-1 / TAIL_EXPONENT))
    return np.where(quantile < SINGLE, 1, np.clip(tail, 2, largest)).astype(np.int32)


def _kept_sets(
    random: np.random.Generator, targets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Sets end to end, (sum of sizes,): steps of at least 1 through the vocabulary, the target at a random place.

    A set spans less than `vocab_size` (steps are at most `vocab_size // largest`), so modulo keeps its ids distinct.
    """
    if not len(sizes):
        return np.zeros(0, np.int32)
    starts = np.cumsum(sizes) - sizes
    steps = random.integers(1, max(vocab_size // int(sizes.max()), 1) + 1, int(sizes.sum()))
    reach = np.cumsum(steps)
    place = starts + (random.random(len(sizes)) * sizes).astype(np.int64)
    return ((np.repeat(targets - reach[place], sizes) + reach) % vocab_size).astype(np.int32)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, at least 1 is allowed")
