"""Samples, one by one -> what is wrong with their numbers: counts, and the first of each kind.

Samples are counted from 0 in the order of the file. Memory: a few bytes for each group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..inputs.finite import LOG_PROBS, bad_log_probs, targets

#: Columns that are looked at here and nowhere else in `inspect`.
COLUMNS = (*LOG_PROBS, "advantage", "group_id")
_NAMED = 5
#: What tools write where a tokenizer has no limit is far beyond this.
_NO_LIMIT = 10**9


class Quality:
    """Takes samples with `add` and gives counts with `finish`.

    max_positions: of the model; None where it is not known.
    """

    def __init__(self, max_positions: int | None):
        self._max_positions = max_positions
        self._samples = self._without = self._bad = self._bad_tokens = self._long = self._longest = 0
        self._first_without: list[int] = []
        self._first_bad: list[dict[str, Any]] = []
        self._first_long: list[dict[str, int]] = []
        self._log_probs: set[str] = set()
        self._groups: dict[Any, bool] = {}  # whether a sample of it has an advantage

    def add(self, sample: dict[str, Any]) -> None:
        """Take one sample as a reader gives it."""
        number, tokens = self._samples, len(sample["input_ids"])
        self._samples += 1
        trained = targets(sample)
        if not trained.any():
            self._without += 1
            self._first_without += [number] if len(self._first_without) < _NAMED else []
        self._log_probs.update(name for name in LOG_PROBS if name in sample)
        bad = list(bad_log_probs(sample))
        self._bad += bool(bad)
        for name, at, values in bad:
            self._bad_tokens += len(at)
            if len(self._first_bad) < _NAMED:
                value = str(np.ravel(values[0])[~np.isfinite(np.ravel(values[0]))][0])
                self._first_bad.append({"sample": number, "column": name, "token": int(at[0]), "value": value})
        if self._max_positions is not None and tokens > self._max_positions:
            self._long += 1
            self._longest = max(self._longest, tokens)
            if len(self._first_long) < _NAMED:
                self._first_long.append({"sample": number, "tokens": tokens})
        if "group_id" in sample and "advantage" in sample:
            advantage = np.asarray(sample["advantage"])
            some = bool((advantage[trained] if advantage.ndim else advantage).any())
            group = sample["group_id"]
            self._groups[group] = self._groups.get(group, False) or some

    def finish(self) -> dict[str, Any]:
        """The counts, ready for JSON; what could not be looked at, for want of a column or a limit, is None."""
        zero = [group for group, some in self._groups.items() if not some]
        return {
            "without_terms": {"samples": self._without, "first": self._first_without},
            "non_finite_log_probs": {
                "columns": sorted(self._log_probs),
                "samples": self._bad,
                "tokens": self._bad_tokens,
                "first": self._first_bad,
            }
            if self._log_probs
            else None,
            "zero_advantage_groups": {"groups": len(zero), "of": len(self._groups), "first": zero[:_NAMED]}
            if self._groups
            else None,
            "beyond_positions": {
                "max_positions": self._max_positions,
                "samples": self._long,
                "longest": self._longest,
                "first": self._first_long,
            }
            if self._max_positions is not None
            else None,
        }


def positions_of(folder: str | None) -> int | None:
    """The positions of the model whose tokenizer a folder holds, as its config.json or tokenizer_config.json has them;
    None where neither does."""
    if folder is None:
        return None
    names = {"config.json": ("max_position_embeddings", "n_positions"), "tokenizer_config.json": ("model_max_length",)}
    for file, settings in names.items():
        try:
            parsed = json.loads(Path(folder, file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        found = [parsed, parsed.get("text_config")] if isinstance(parsed, dict) else []
        for limit in (config.get(setting) for config in found if isinstance(config, dict) for setting in settings):
            if isinstance(limit, int) and not isinstance(limit, bool) and 0 < limit < _NO_LIMIT:
                return limit
    return None
