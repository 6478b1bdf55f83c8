"""Small forests for tests and benches: nests of (length, children) to depth-first arrays and paths. Needs NumPy
only."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

Nest = tuple  # (length, [Nest, ...])


class Forest(NamedTuple):
    """The arrays of a packed forest that attention needs, and the packed indices of every root-to-leaf path."""

    subtree_end: np.ndarray  # (N,) int32
    depth: np.ndarray  # (N,) int32
    paths: list[np.ndarray]  # one (L,) int64 per leaf
    segments: np.ndarray  # (S, 3) int32: start, stop, subtree end

    @property
    def tokens(self) -> int:
        return len(self.subtree_end)


def layout(nests: list[Nest], padding: int = 0) -> Forest:
    """Depth-first pre-order arrays of `nests`, followed by `padding` rows that see and are seen by nothing."""
    segments: list[list[int]] = []
    depths, paths = [], []
    position = 0
    stack = [(nest, 0, [], -1) for nest in reversed(nests)]  # (nest, depth, ranges above, parent segment)
    parents = []
    while stack:
        (length, children), depth, above, parent = stack.pop()
        ranges = [*above, (position, position + length)]
        segments.append([position, position + length, position + length])
        parents.append(parent)
        depths.append(np.arange(depth, depth + length, dtype=np.int32))
        position += length
        index = len(segments) - 1
        if not children:
            paths.append(np.concatenate([np.arange(a, b) for a, b in ranges]))
        stack.extend((child, depth + length, ranges, index) for child in reversed(children))
    for i in range(
        len(segments) - 1, -1, -1
    ):  # children come after their parent, so one backward pass carries the ends up
        if parents[i] >= 0:
            segments[parents[i]][2] = max(segments[parents[i]][2], segments[i][2])
    end = np.arange(position + padding, dtype=np.int32)
    for start, stop, last in segments:
        end[start:stop] = last
    depth = np.concatenate([*depths, np.zeros(padding, np.int32)]).astype(np.int32)
    return Forest(end, depth, paths, np.asarray(segments, np.int32).reshape(-1, 3))


def random_nests(rng: random.Random, tokens: int, branching: int = 3) -> list[Nest]:
    """A random forest of exactly `tokens` tokens: runs of random length, each with up to `branching` children."""

    def grow(budget: int) -> list[Nest]:
        nests: list[Nest] = []
        while budget > 0:
            part = budget if len(nests) == branching - 1 else rng.randint(1, budget)
            length = rng.randint(1, part)
            nests.append((length, grow(part - length)))
            budget -= part
        rng.shuffle(nests)
        return nests

    return grow(tokens)


def chain(tokens: int = 16384) -> list[Nest]:
    """One sample."""
    return [(tokens, [])]


def docs(count: int = 16, length: int = 1024) -> list[Nest]:
    """Samples that share nothing."""
    return [(length, []) for _ in range(count)]


def agent(groups: int = 1, n: int = 8, prompt: int = 6000, response: int = 400, seed: int = 0) -> list[Nest]:
    """`groups` prompts with `n` answers each, of about `response` tokens."""
    rng = random.Random(seed)
    return [(prompt, [(max(1, int(rng.gauss(response, response / 4))), []) for _ in range(n)]) for _ in range(groups)]


def multiturn(n=8, turns=6, prompt=1500, think=450, answer=120, tool=150, keep=2) -> list[Nest]:
    """`n` rollouts of `turns` turns: after `keep` turns thinking is dropped, so every turn forks off a spine without
    thoughts."""

    def spine(turn: int) -> list[Nest]:
        branches: list[Nest] = [((think + answer) * keep + tool, [])]
        return branches + ([(answer + tool, spine(turn + 1))] if turn + 1 < turns else [])

    return [(prompt, [branch for _ in range(n) for branch in spine(keep - 1)])]


def gpu_trees() -> dict[str, list[Nest]]:
    """The benchmark trees by name."""
    return {
        "chain16k": chain(),
        "agent9k": agent(),
        "agent2x16k": agent(2, 8, 4096, 512),
        "docs16k": docs(),
        "multiturn": multiturn(),
    }
