"""Token ids and log-probs as inference servers write them -> plain lists.

vLLM and OpenAI: {"content": [{"logprob": -0.5, ...}]}, {"token_logprobs": [-0.5]}, or of each token {"17": {"logprob":
-0.5}, ...} with other tokens beside it. SGLang: [[-0.5, 17, "text"], ...].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def plain_ids(value: Any) -> Any:
    """The ids of [log-prob, id, text] of each token; any other value as it is."""
    return [item[1] for item in value] if _is_triples(value) else value


def plain_log_probs(value: Any, ids: Iterable[int]) -> Any:
    """A log-prob for each token, whatever stands around it; any other value as it is. `ids`: of those tokens."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("content", "token_logprobs") if value.get(name) is not None), value)
    if _is_triples(value):
        return [item[0] for item in value]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return value
    if all("logprob" in item for item in value):
        return [item["logprob"] for item in value]
    found = [_log_prob_of_token(item, token) for item, token in zip(value, ids, strict=False)]
    return value if None in found or len(found) != len(value) else found


def _is_triples(value: Any) -> bool:
    """Whether a list holds [log-prob or null, id, text or null] of each token."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(item, list | tuple)
            and len(item) == 3
            and (item[0] is None or isinstance(item[0], float | int))
            and type(item[1]) is int
            and (item[2] is None or isinstance(item[2], str))
            for item in value
        )
    )


def _log_prob_of_token(item: dict[str, Any], token: int) -> Any:
    """The log-prob of a token among those that a server lists at its place."""
    entry = item.get(str(token))
    return entry.get("logprob") if isinstance(entry, dict) else entry
